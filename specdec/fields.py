"""What is known of single fields of a call: kinds of values, which are refused, which belong to one strategy."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from specdec.values import plain

# Field -> (where it does nothing, what to do instead). docs/reference/models.md lists them; a test compares.
REFUSED: dict[str, tuple[object, str]] = {
    "assistant_ensemble_weight": (None, "specdec never mixes the draft into the target's distribution"),
    "assistant_lookbehind": (None, "the text bridge aligns by text and needs no window; leave it out"),
    "cache_config": (None, "specdec keeps keys and values in its own store; leave it out"),
    "cache_implementation": (None, "specdec keeps keys and values in its own store; leave it out"),
    "compile_config": (None, "pass `gear='compiled'` to SpecGenerator instead"),
    "continuous_batching_config": (None, "pass a list of prompts for a batch"),
    "disable_compile": (None, "nothing is compiled unless SpecGenerator gets `gear='compiled'`"),
    "dola_layers": (None, "DoLa is not available"),
    "is_assistant": (False, "it is transformers' own marker for a draft's inner call"),
    "low_memory": (None, "the candidates of contrastive search share one cache already; leave it out"),
    "max_cache_len": (None, "the store grows by itself"),
    "speculation_type": (None, "name the draft with `draft=` or `assistant_model=`"),
    "target_lookbehind": (None, "the text bridge aligns by text and needs no window; leave it out"),
    "token_healing": (False, "heal the prompt before the call"),
    "watermarking_config": (None, "pass the watermark's processor through `logits_processor=`"),
}
# Those of them that change the text.
DECIDING = ("dola_layers", "token_healing", "watermarking_config")
# Field that names a way of searching -> the values at which it does nothing. A checkpoint does not choose one.
SEARCHES: dict[str, tuple[object, ...]] = {
    "constraints": (None,),
    "diversity_penalty": (None, 0),
    "force_words_ids": (None,),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0),
}
# Way of sampling -> whether it looks at the distributions that the draft drew from, and not only at its tokens.
SAMPLING = {"coupled": False, "match": False, "rejection": True, "block": True}
# Field of sampling alone -> the values at which it does nothing there, or nothing that is not done anyway.
DRAWING: dict[str, tuple[object, ...]] = {
    "temperature": (0, 1),
    "top_k": (0, 50),
    "top_p": (1,),
    "min_p": (0,),
    "top_h": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "sampling": (),
    "num_samples": (1,),
    "ranking": (),
}
# The same for fields of beam search alone.
BEAMS_ONLY: dict[str, tuple[object, ...]] = {
    "early_stopping": (False,),
    "length_penalty": (1.0,),
    "output_trace": (False,),
}


class DraftWord(NamedTuple):
    """What is known of a word for a draft before torch is loaded.

    `module` and `kind` are the module in `specdec.draft` and the class in it. `argument` is what follows the word
    behind a colon, "N" for a number, None where nothing may. `copies`: it copies from the text, so that it can stand
    beside a model in a pair, and looks for its guesses in a given text.
    """

    module: str
    kind: str
    argument: str | None = None
    copies: bool = False

    def takes(self, argument: str | None) -> bool:
        """Whether this may stand behind the word's colon; None where there is no colon."""
        if self.argument is None or argument is None:
            return self.argument is argument
        return argument.isdecimal() if self.argument == "N" else bool(argument)


# Every word for a draft; `specdec.draft.DRAFTS` has the classes. The first that copies is the usual one.
DRAFT_WORDS: dict[str, DraftWord] = {
    "suffix": DraftWord("suffix", "SuffixDrafter", copies=True),
    "ngram": DraftWord("ngram", "NgramDrafter", copies=True),
    "early_exit": DraftWord("early_exit", "EarlyExitDrafter", argument="N"),
    "mtp": DraftWord("mtp", "MtpDrafter"),
}
# What a value with parts must look like, where pydantic would only tell about one part.
EXPECTED = {
    **dict.fromkeys(
        ("bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_eos_token_id"),
        "a token id, or a list of token ids",
    ),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), "a list of token ids"),
    "bad_words_ids": "a list of words, each a list of at least one token id",
    "exponential_decay_length_penalty": "a pair of a whole number and a factor",
    "sampling": f"one of {', '.join(SAMPLING)}",
    "seed": "a whole number, or a list of one for each row",
    "stop_strings": "text, or a list of texts, none of them empty",
}


def _one(value: object) -> object:
    """A single id, also from a list or tensor of one."""
    value = plain(value)
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _sampling(name: str) -> str:
    if name not in SAMPLING:
        raise ValueError(EXPECTED["sampling"])
    return name


Flag = Annotated[bool, Field(strict=True)]
Whole = Annotated[int, Field(strict=True), BeforeValidator(plain)]
Count = Annotated[Whole, Field(ge=0)]
Positive = Annotated[Whole, Field(ge=1)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False), BeforeValidator(plain)]
Share = Annotated[Number, Field(ge=0, le=1)]
TokenId = Annotated[int, Field(strict=True, ge=0), BeforeValidator(_one)]
IdList = Annotated[list[Whole], BeforeValidator(plain)]
TokenIds = Whole | IdList | None
Text = Annotated[str, Field(min_length=1)]
Sampling = Annotated[str, AfterValidator(_sampling)]
