"""The tokenizer of a GGUF file, which writes the ids that llama.cpp writes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specdec.errors import LoadError
from specdec.models.gguf.end_tokens import SpecialIds, special_ids
from specdec.models.gguf.reader import GgufReader
from specdec.models.gguf.split_rules import SplitRule, split_rule

_SPACE = "\u2581"
_ALWAYS_USER_DEFINED = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
_KEEP_BLANKS = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's other special tokens take the blanks behind them


class _Type(IntEnum):
    """A token's type, as the file numbers it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


class Vocabulary:
    """The tokens of a file: their texts, scores and types."""

    def __init__(self, reader: GgufReader) -> None:
        keys = reader.keys
        self.texts: list[str] = [
            text or f"[EMPTY_{number}]" for number, text in enumerate(keys.get("tokenizer.ggml.tokens") or [])
        ]
        self.ids = {text: number for number, text in enumerate(self.texts)}
        if not self.texts or len(self.ids) != len(self.texts):
            fault = "no tokens" if not self.texts else "several tokens of one text"
            raise LoadError(f"{reader.path} has {fault} in tokenizer.ggml.tokens: it is broken, make it again")
        self.special = special_ids(reader)
        count = len(self.texts)
        scores, types = keys.get("tokenizer.ggml.scores"), keys.get("tokenizer.ggml.token_type")
        for name, values in (("scores", scores), ("token_type", types)):
            if values is not None and len(values) < count:
                raise LoadError(
                    f"{reader.path} has {len(values)} values in tokenizer.ggml.{name}, and {count} tokens: it is "
                    "broken, make it again"
                )
        self.scores: list[float] = [0.0] * count if scores is None else scores.tolist()
        self.types: list[int] = [int(_Type.NORMAL)] * count if types is None else types.tolist()
        self._correct_types()

    def _correct_types(self) -> None:
        """Sets the types that llama.cpp gives tokens by their text, whatever the file says."""
        for number in self.special.control:
            self.types[number] = _Type.CONTROL
        user_defined = [self.ids[text] for text in _ALWAYS_USER_DEFINED if text in self.ids]
        if self.special.turn_goes_on is not None:
            user_defined.append(self.special.turn_goes_on)
        for number in user_defined:
            self.types[number] = _Type.USER_DEFINED
        if "</s>" in self.ids and self.ids["</s>"] not in self.special.control:  # Gemma 4 and PLaMo have it as a word
            self.types[self.ids["</s>"]] = _Type.NORMAL


def read_tokenizer(reader: GgufReader) -> Any:
    """A tokenizer with the file's vocabulary, split rules and chat templates; None for a file without one.

    Also None for kinds of tokenizers that no decoder read here has (BERT's, RWKV's, PLaMo's). Raises UnsupportedError
    for a value of tokenizer.ggml.pre that is not known, LoadError for a broken vocabulary.
    """
    build = _BUILDERS.get(reader.keys.get("tokenizer.ggml.model", "none"))
    if build is None:
        return None
    vocabulary = Vocabulary(reader)
    tokenizer = build(reader.keys, vocabulary)
    rstrip = any(name in str(reader.keys.get("general.name", "")).lower() for name in ("phi-3", "phi3"))
    for special, types in ((True, (_Type.CONTROL, _Type.UNKNOWN)), (False, (_Type.USER_DEFINED,))):
        tokens = [
            AddedToken(text, normalized=False, special=special, rstrip=rstrip and text not in _KEEP_BLANKS)
            for text, kind in zip(vocabulary.texts, vocabulary.types, strict=False)
            if kind in types
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(tokens)
    tokenizer.post_processor = _around(reader, vocabulary)
    specials = zip(("bos_token", "eos_token", "unk_token", "pad_token"), vocabulary.special[:4], strict=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=_SharedTokenizer(tokenizer),
        clean_up_tokenization_spaces=False,
        **{name: vocabulary.texts[number] for name, number in specials if number is not None},
    )
    fast.chat_template = _chat_templates(reader.keys)
    return fast


class _SharedTokenizer:
    """A tokenizer whose deep copy is itself: transformers copies what it gets, which takes as long as making it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __deepcopy__(self, memo: Any) -> Tokenizer:
        return self._tokenizer


def _bytes(keys: Mapping[str, Any], vocabulary: Vocabulary) -> Tokenizer:
    """GPT-2's kind: words are split by rules, and their bytes or characters merged by a list of pairs."""
    name = "gemma4" if keys["tokenizer.ggml.model"] == "gemma4" else keys.get("tokenizer.ggml.pre")
    rule = split_rule(name)
    ids, merges = vocabulary.ids, []
    for pair in dict.fromkeys(keys.get("tokenizer.ggml.merges") or []):
        left, _, right = pair[1:].partition(" ")
        left = pair[0] + left
        if left in ids and right in ids and left + right in ids:
            merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=rule.whole_words, byte_fallback=rule.space is not None))
    splitters: list[Any] = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in rule.regexes]
    if rule.space is None:
        splitters.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.normalizer = normalizers.Replace(" ", rule.space)
        tokenizer.decoder = _decoder(prefix=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    return tokenizer


def _sentencepiece(keys: Mapping[str, Any], vocabulary: Vocabulary) -> Tokenizer:
    """SentencePiece's BPE: the neighbours that make the token of the highest score merge, the leftmost first."""
    prefix = bool(keys.get("tokenizer.ggml.add_space_prefix", True))
    unknown = vocabulary.special.unknown
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary.ids,
            _pairs(vocabulary),
            unk_token=None if unknown is None else vocabulary.texts[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = _decoder(prefix)
    return tokenizer


def _pairs(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, the highest score first."""
    ids, pairs = vocabulary.ids, []
    for text, score in zip(vocabulary.texts, vocabulary.scores, strict=False):
        for at in range(1, len(text)):
            if (left := text[:at]) in ids and (right := text[at:]) in ids:
                pairs.append((-score, left, right))
    pairs.sort(key=lambda pair: pair[0])
    return [(left, right) for _, left, right in pairs]


def _unigram(keys: Mapping[str, Any], vocabulary: Vocabulary) -> Tokenizer:
    """SentencePiece's unigrams: the words with the highest sum of scores."""
    scores = [
        0.0 if kind == _Type.USER_DEFINED else score
        for kind, score in zip(vocabulary.types, vocabulary.scores, strict=False)
    ]
    words = list(zip(vocabulary.texts, scores, strict=False))
    tokenizer = Tokenizer(models.Unigram(words, unk_id=vocabulary.special.unknown, byte_fallback=False))
    steps: list[Any] = []
    if (characters := keys.get("tokenizer.ggml.precompiled_charsmap")) is not None:
        steps.append(normalizers.Precompiled(characters.tobytes()))
    prefix = bool(keys.get("tokenizer.ggml.add_space_prefix", False))
    if keys.get("tokenizer.ggml.remove_extra_whitespaces", False):
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        prefix = True
    steps += [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = _decoder(prefix)
    return tokenizer


def _decoder(prefix: bool) -> Any:
    """A decoder that reads U+2581 as a space and <0x0A> as a byte, and drops the space that a `prefix` put first."""
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])


_BUILDERS = {"gemma4": _bytes, "gpt2": _bytes, "llama": _sentencepiece, "t5": _unigram}
"""By `tokenizer.ggml.model`."""
_FIRST, _LAST = ("llama", "gemma4"), ("t5",)  # these kinds begin, or end, texts where no key says so


def _around(reader: GgufReader, vocabulary: Vocabulary) -> Any:
    """The tokens before and after a text, as the file says, or else its kind of tokenizer."""
    keys, kind = reader.keys, reader.keys["tokenizer.ggml.model"]
    rule: SplitRule | None = split_rule(keys.get("tokenizer.ggml.pre")) if kind == "gpt2" else None
    begins = kind in _FIRST or (rule is not None and rule.add_bos)
    forced = kind == "gemma4" or (rule is not None and rule.add_bos and rule.space is not None)
    special: SpecialIds = vocabulary.special
    first = _edge_token(reader, "bos", begins, special.bos, forced)
    last = _edge_token(reader, "eos", kind in _LAST, special.eos)
    texts = {number: vocabulary.texts[number] for number in (*first, *last)}
    parts = [*(f"{texts[number]}:0" for number in first), "$A:0", *(f"{texts[number]}:0" for number in last)]
    pair = [*parts, *(part.replace(":0", ":1").replace("$A", "$B") for part in parts)]
    specials = [(text, number) for number, text in texts.items()]
    return processors.TemplateProcessing(single=parts, pair=pair, special_tokens=specials)


def _edge_token(reader: GgufReader, name: str, default: bool, number: int | None, forced: bool = False) -> list[int]:
    """The token that the key `add_…_token` adds before or after a text."""
    key = f"tokenizer.ggml.add_{name}_token"
    if reader.keys.get(key) and number is None:
        raise LoadError(f"{reader.path} says {key}, and has no such token: it is broken, make it again")
    adds = default if forced else bool(reader.keys.get(key, default))
    return [number] if adds and number is not None else []


def _chat_templates(keys: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The file's chat template; where it has several, all of them by name."""
    prefix = "tokenizer.chat_template"
    default: str | None = keys.get(prefix)
    by_name = {key.removeprefix(f"{prefix}."): text for key, text in keys.items() if key.startswith(f"{prefix}.")}
    if not by_name:
        return default
    return by_name if default is None else {"default": default, **by_name}
