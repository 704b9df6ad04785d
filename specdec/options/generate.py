"""Every option of a call as one frozen value, whose fields have transformers' names, and the form of its answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from specdec.errors import OptionError, UnsupportedError
from specdec.options.fields import (
    SAMPLING,
    Bias,
    Count,
    Flag,
    IdList,
    Number,
    Positive,
    ResponseFormat,
    Sampling,
    Schema,
    Share,
    Text,
    TokenId,
    TokenIds,
    Watermark,
    Whole,
)

FORMS = ("response_format", "guided_json", "guided_regex", "guided_grammar", "guided_choice")
"""The options that set the form of the answer; they exclude one another."""
_STACK_BYTES, _STACK_LOCK = 2**28, threading.Lock()  # bytes of addresses: a thread takes memory as it uses them
T = TypeVar("T")
Item = TypeVar("Item", int, str)


@dataclass(frozen=True)
class Form:
    """The form of an answer: a kind of grammar, its source, and the option or the request's field that sets it."""

    kind: str  # json, regex, grammar, choice
    source: Any
    field: str

    def compiled(self) -> str:
        """llguidance's grammar; raises OptionError if the source is invalid, UnsupportedError without llguidance."""
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise UnsupportedError(
                f"`{self.field}` needs llguidance: pip install -c constraints.txt -e '.[structured]'"
            ) from None

        try:
            if self.kind == "regex":
                return LLMatcher.grammar_from_regex(self.source)
            if self.kind == "grammar":
                return LLMatcher.grammar_from_lark(self.source)
            if self.kind == "choice":
                choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in self.source)
                return LLMatcher.grammar_from_lark(f"start: {choices}".replace("\x7f", "\\u007f"))
            # With free whitespace small models repeat it without end.
            schema = self.source if isinstance(self.source, str) else json.dumps(self.source)
            return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
        except (TypeError, ValueError, RecursionError) as error:
            raise self.error(str(error)) from None

    def check(self) -> None:
        """Raises as `compiled`, and OptionError for a grammar that llguidance would refuse with a vocabulary."""
        compiled = self.compiled()
        from llguidance import LLMatcher

        if message := deeply(lambda: LLMatcher.validate_grammar(compiled)):
            raise self.error(message)

    def error(self, message: str) -> OptionError:
        """llguidance's message as an OptionError, without the grammar around a regular expression."""
        if self.kind == "regex":
            message = message.partition("\n   1 |")[0].rpartition("error: ")[2]
        return OptionError(f"`{self.field}`: {message}")


def deeply(function: Callable[[], T]) -> T:
    """The function's result, from a thread with a large stack, as llguidance needs some for each rule in a row."""
    with ThreadPoolExecutor(1) as thread:
        with _STACK_LOCK:  # the size holds for every thread that begins meanwhile
            usual_bytes = threading.stack_size(_STACK_BYTES)
            try:
                result = thread.submit(function)
            finally:
                threading.stack_size(usual_bytes)
        return result.result()


class Options(BaseModel):
    """The options of one call of `generate`, from which its processors, strategy, schedule and criteria are made."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    # lengths and stopping
    max_length: Positive | None = None
    max_new_tokens: Positive | None = None
    min_length: Count | None = None
    min_new_tokens: Count | None = None
    max_time: Annotated[Number, Field(gt=0)] | None = None
    stop_strings: Text | Annotated[list[Text], Field(min_length=1)] | None = None
    include_stop_str_in_output: Flag | None = None
    bos_token_id: TokenIds = None
    eos_token_id: TokenIds = None
    pad_token_id: TokenId | None = None
    decoder_start_token_id: TokenIds = None
    # processors, sampling and search
    do_sample: Flag | None = None
    temperature: Annotated[Number, Field(ge=0)] = 1.0
    top_k: Count = 50
    top_p: Share | None = None
    min_p: Share | None = None
    top_h: Share | None = None
    typical_p: Share | None = None
    epsilon_cutoff: Share | None = None
    eta_cutoff: Share | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    encoder_repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    no_repeat_ngram_size: Count | None = None
    no_repeat_ngram_window_size: Positive | None = None
    encoder_no_repeat_ngram_size: Count | None = None
    bad_words_ids: list[Annotated[IdList, Field(min_length=1)]] | None = None
    sequence_bias: Bias | None = None
    renormalize_logits: Flag | None = None
    remove_invalid_values: Flag | None = None
    forced_bos_token_id: TokenId | None = None
    forced_eos_token_id: TokenIds = None
    exponential_decay_length_penalty: tuple[Whole, Number] | None = None
    suppress_tokens: IdList | None = None
    begin_suppress_tokens: IdList | None = None
    guidance_scale: Number | None = None
    watermarking_config: Watermark | None = None
    num_beams: Positive = 1
    length_penalty: Number | None = None
    early_stopping: Flag | Literal["never", "exhaustive"] | None = None
    num_beam_groups: Positive = 1
    diversity_penalty: Annotated[Number, Field(ge=0)] | None = None
    constraints: Any = None
    force_words_ids: Any = None
    penalty_alpha: Share | None = None
    num_return_sequences: Positive = 1
    num_samples: Positive | None = None
    ranking: Literal["mean", "sum"] | None = None
    seed: Whole | IdList | None = None
    sampling: Sampling | None = None
    # the form of the answer
    response_format: ResponseFormat | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_grammar: Text | None = None
    guided_choice: Annotated[list[Text], Field(min_length=1)] | None = None
    # drafting
    schedule: Any = None
    num_assistant_tokens: Positive | None = None
    num_assistant_branches: Positive | None = None
    assistant_confidence_threshold: Share | None = None
    prefill_chunk_size: Positive | None = None
    synced_gpus: Flag | None = None
    # outputs
    return_dict_in_generate: Flag | None = None
    output_scores: Flag | None = None
    output_logits: Flag | None = None
    output_attentions: Flag | None = None
    output_hidden_states: Flag | None = None
    output_trace: Flag | None = None
    top_logprobs: Count | None = None

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn; temperature 0 is greedy."""
        return bool(self.do_sample) and self.temperature != 0

    @property
    def constrained(self) -> bool:
        """Whether the search is constrained: texts must contain given words."""
        return self.constraints is not None or self.force_words_ids is not None

    @property
    def form(self) -> Form | None:
        """The form of the answer, None for any text; raises OptionError where two options set it."""
        sources = {name: getattr(self, name) for name in FORMS}
        if (field := self.response_format) is not None:  # OpenAI's field: by default any object
            schema = (field.get("json_schema") or {}).get("schema")
            sources[FORMS[0]] = None if field["type"] == "text" else {"type": "object"} if schema is None else schema
        names = [name for name, source in sources.items() if source is not None]
        if len(names) > 1:
            raise OptionError(f"`{names[0]}` and `{names[1]}` each set the form of the answer: pass one of them")
        kinds = {FORMS[0]: "json", **{name: name.removeprefix("guided_") for name in FORMS[1:]}}
        return Form(kinds[names[0]], sources[names[0]], names[0]) if names else None

    @property
    def copies(self) -> int:
        """The number of sequences of each prompt; all its beams are one."""
        return 1 if self.num_beams > 1 else self.num_samples or self.num_return_sequences

    @property
    def at_the_end(self) -> bool:
        """Whether texts are chosen when the call ends: beams and ranked samples."""
        return self.num_beams > 1 or self.num_samples is not None

    @property
    def needs_q(self) -> bool:
        """Whether verification needs q, the distributions that the draft drew from."""
        return SAMPLING.get(self.sampling or "", False)

    @property
    def family(self) -> tuple[Any, ...]:
        """A key of calls that share a learning schedule: their drafts cost alike and are accepted alike."""
        sampling = (self.sampling or "coupled") if self.samples else None
        return sampling, self.num_beams, self.num_beam_groups, self.constrained, self.num_assistant_branches

    @property
    def eos_ids(self) -> list[int]:
        return to_list(self.eos_token_id)

    @property
    def cut_before(self) -> list[str]:
        """The strings before which texts are cut; none where texts keep them, as by default and in transformers."""
        return [] if self.include_stop_str_in_output is not False else to_list(self.stop_strings)

    @property
    def start_ids(self) -> list[int]:
        """The first decoder ids of an encoder-decoder model: one id for all rows, or an id for each row."""
        return to_list(self.decoder_start_token_id if self.decoder_start_token_id is not None else self.bos_token_id)


def to_list(value: Item | list[Item] | None) -> list[Item]:
    """None, one id or text, or several, as a list."""
    return [] if value is None else [value] if isinstance(value, int | str) else list(value)
