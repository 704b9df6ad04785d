"""How text is split into words before merges: every value of `tokenizer.ggml.pre` that llama.cpp knows.

Each value stands for regular expressions that apply one after the other, each to the pieces that the earlier ones left
(src/llama-vocab.cpp of llama.cpp, `llm_tokenizer_bpe` and `llama_vocab::impl::load`, in llama-cpp-python 0.3.36).
They are written for Oniguruma, which the library tokenizers has. Where llama.cpp's own engine reads an expression
otherwise, the one here does what that engine does: letters have no case beyond ASCII, blanks are in no range of
characters, and numbers that are grouped from the right take along what stands before them.
"""

from __future__ import annotations

from typing import NamedTuple

from specdec.errors import UnsupportedError


class SplitRule(NamedTuple):
    """Expressions that split a text, and the habits that a value of `tokenizer.ggml.pre` stands for besides.

    `whole_words`: a word that is a token itself stays whole, whatever the merges say. `add_bos`: texts begin with the
    beginning token if no key says otherwise. `space`: words are characters, not bytes, and this one is their space.
    """

    regexes: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    space: str | None = None


def split_rule(name: str | None) -> SplitRule:
    """The rule of a value of `tokenizer.ggml.pre`, None for a file without it; UnsupportedError for unknown values."""
    rule = RULES.get("default" if name is None else name)
    if rule is None:
        raise UnsupportedError(
            f"the file says tokenizer.ggml.pre = {name!r}, and how that splits text is not known: pass the tokenizer "
            "of the checkpoint that it was made of as `tokenizer=`"
        )
    return rule


_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_BLANKS = r"\s+(?!\S)|\s+"
_LINES = rf"\s*[\r\n]+|{_BLANKS}"
_FIRST = r"[^\r\n\p{L}\p{N}]?"  # what a word may take along
_WORD = rf"{_FIRST}\p{{L}}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_SIGNS}|{_BLANKS}"
_FALCON_SIGNS = r"[\p{P}\$\+<=>\^~\|`]+"
_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_HANGUL = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}&&\S]+"
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"
_SIGN_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_PAIRED = rf"{_SIGN_WORD}| ?[\p{{P}}\p{{S}}]+"
# Groups of three from the right; what stands before a number stays with its first group.
_GROUPED = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_HAN = (
    r"\x{3400}-\x{4DBF}\x{4E00}-\x{9FFF}\x{F900}-\x{FAFF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B73F}\x{2B740}-\x{2B81F}"
    r"\x{2B820}-\x{2CEAF}\x{2CEB0}-\x{2EBEF}\x{2F800}-\x{2FA1F}"
)
_ASIA = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}\x{FF65}-\x{FF9F}"
    r"\x{2F00}-\x{2FDF}\x{E40}-\x{E7F}\x{E80}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}"
    r"\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
)
_YOUTU = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}"
    rf"\x{{FF0C}}\x{{3001}}-\x{{303F}}\x{{FE30}}-\x{{FE4F}}]+|[\x{{3105}}-\x{{312F}}]+|{_KANA}"
)
_LATIN = (
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}"
    r"\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}"
    r"\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}"
    r"\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}"
    r"\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}"
    r"\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}"
    r"\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}"
    r"\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}"
    r"\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}"
    r"\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}"
    r"\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}"
    r"\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}"
    r"\x{1E900}-\x{1E943}"
)
_DEEPSEEK_SIGNS = r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3001}-\x{3002}]+"


def _words(numbers: str, *, contraction: str = f"{_CONTRACTION}|", signs: str = rf"{_SIGNS}[\r\n]*") -> str:
    """Llama 3's expression and its relatives, which differ in numbers."""
    return rf"{contraction}{_WORD}|{numbers}|{signs}|{_LINES}"


def _cased(letters: str, numbers: str, contraction: str = "") -> str:
    """Words that break before a capital."""
    upper, lower = rf"(?:(?=[{letters}])[^a-z])", rf"(?:(?=[{letters}])[^A-Z])"
    words = rf"{_FIRST}{upper}*{lower}+{contraction}|{_FIRST}{upper}+{lower}*{contraction}"
    return rf"{words}|{numbers}|{_SIGNS}[\r\n/]*|{_LINES}"


def _uncased(numbers: str) -> str:
    """Words with their marks."""
    return rf"{_FIRST}[\p{{L}}\p{{M}}]+{_CONTRACTION}?|{numbers}|{_SIGNS}[\r\n/]*|{_LINES}"


_THREE, _ONE, _ALL = r"\p{N}{1,3}", r"\p{N}", r"\p{N}+"
_CAPITALS = _cased(r"\p{L}", _THREE, rf"{_CONTRACTION}?")
_DEEPSEEK3 = (_THREE, _KANA, rf"{_PAIRED}[\r\n]*|{_LINES}")
_KIMI = (rf"[{_HAN}]+|{_FIRST}[\p{{L}}&&[^{_HAN}]]+{_CONTRACTION}?|{_THREE}|{_SIGNS}[\r\n]*|{_LINES}",)
_LINE = r"[^\n]+|\n+"
_QWEN35 = rf"{_CONTRACTION}|{_FIRST}[\p{{L}}\p{{M}}]+|{_ONE}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
_BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|"
    rf"{_WORD}|{_ONE}|{_SIGNS}[\r\n]*|\s*[\r\n]|{_BLANKS}"
)
_EXAONE = (
    rf"{_CONTRACTION}|{_FIRST}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{_ONE}|"
    rf"{_SIGNS}[\r\n/]?|\s*[\r\n]|{_BLANKS}"
)
_RUNS = "|".join(rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
_JAIS2 = rf"{_CONTRACTION}|{_WORD}|{_THREE}|{_SIGNS}[\r\n]*|\s*[\r\n]+|{_RUNS}|\s"
_CHAMELEON = "<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", _ONE, r"[\p{P}!-/:-@\[-`{-~]", _GPT2


_TABLE = (
    (SplitRule((_FALCON_SIGNS.replace("`", ""), _GPT2, _ALL, "[0-9][0-9][0-9]")), "default"),
    (
        SplitRule((_GPT2,)),
        "a.x-4.0 exaone4 gigachat gpt-2 granite-docling jais jina-de jina-es jina-v1-en jina-v2-code jina-v2-de "
        "jina-v2-es mellum modern-bert mpt olmo phi-2 roberta-bpe trillion",
    ),
    (SplitRule((_ONE, _GPT2)), "codeshell command-r exaone mellum2 minerva-7b refact smollm starcoder"),
    (
        SplitRule((_words(_THREE),), whole_words=True, add_bos=True),
        "falcon-h1 falcon3 jina-v5-nano lfm2 llama-bpe llama-v3 llama3 midm-2.0 pixtral",
    ),
    (SplitRule((_words(_THREE),)), "chatglm-bpe dbrx smaug-bpe"),
    (SplitRule((_words(_THREE),), whole_words=True), "glm4 glm5"),
    (SplitRule((_THREE, _words(_ALL)), whole_words=True), "minicpm5"),
    (SplitRule((_words(_ONE),)), "deepseek-r1-qwen f2llmv2 grok-2 hunyuan kormo megrez qwen2 solar-open stablelm2"),
    (SplitRule((_LINE, _words(_ONE))), "laguna"),
    (SplitRule((_words(_ONE, contraction=""),)), "ufakzeka"),
    (SplitRule((_words(_ONE, signs=r" ?[^\s\p{L}\p{N}\r\n]+"),)), "seed-coder"),
    (SplitRule((_QWEN35,)), "qwen35"),
    (SplitRule((_BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
    (SplitRule((_EXAONE,)), "exaone-moe"),
    (SplitRule((_JAIS2,)), "jais-2"),
    (SplitRule((_cased(r"\p{L}", _ONE),), whole_words=True, add_bos=True), "tekken"),
    (SplitRule((_CAPITALS,)), "gpt-4o kanana2 llama4 minimax-m2 talkie"),
    (SplitRule((_cased(r"\p{L}\p{M}", _THREE, rf"{_CONTRACTION}?"),), whole_words=True), "granite-embed-multi-97m"),
    (SplitRule((_GROUPED, _uncased(_THREE))), "cohere2moe tiny_aya"),
    (SplitRule((_YOUTU, _uncased(_ONE)), whole_words=True), "youtu"),
    (SplitRule(_DEEPSEEK3), "deepseek-v3 hunyuan-dense hy_v4 joyai-llm"),
    (SplitRule((_THREE, _KANA, rf"{_PAIRED}|[\r\n]|{_BLANKS}", _ONE)), "spark2_5"),
    (SplitRule((_GROUPED, _ASIA, rf"{_PAIRED}[\r\n]*|{_LINES}")), "afmoe"),
    (SplitRule(_KIMI), "kimi-k2"),
    (SplitRule((r"[\r\n]", rf"\s?[{_LATIN}]+", _DEEPSEEK_SIGNS, r"\s+\z", _HANGUL, _ALL)), "deepseek-llm"),
    (SplitRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HANGUL, _ONE)), "deepseek-coder"),
    (SplitRule((_FALCON_SIGNS, _GPT2, "[0-9][0-9][0-9]")), "falcon"),
    (SplitRule((_BLOOM,)), "bloom gpt3-finnish poro-chat"),
    (SplitRule((_BLOOM, _ONE)), "viking"),
    (SplitRule((_ALL, r"(?=(?:[0-9]{3})+(?![0-9]))")), "superbpe"),
    (SplitRule(_CHAMELEON, add_bos=True), "chameleon"),
    (SplitRule((_LINE,), whole_words=True, add_bos=True, space="\u2581"), "gemma4 granite-embed-multi-311m"),
    (SplitRule((_LINE,), space="\u2581"), "sarvam-moe"),
    (SplitRule((r"\S+",), space=" "), "whitespace"),
)
RULES = {name: rule for rule, names in _TABLE for name in names.split()}
"""The rule of every value."""
