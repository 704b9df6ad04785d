"""Every option of a call as one frozen value; fields have transformers' names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specdec.options.fields import (
    SAMPLING,
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
from specdec.options.forms import Form, forms


class Options(BaseModel):
    """What one call of `generate` does: processors, strategy, schedule and criteria are made from it."""

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
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_k: Count | None = None
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
    encoder_no_repeat_ngram_size: Count | None = None
    bad_words_ids: list[Annotated[IdList, Field(min_length=1)]] | None = None
    sequence_bias: Any = None
    renormalize_logits: Flag | None = None
    remove_invalid_values: Flag | None = None
    forced_bos_token_id: TokenId | None = None
    forced_eos_token_id: TokenIds = None
    exponential_decay_length_penalty: tuple[Whole, Number] | None = None
    suppress_tokens: IdList | None = None
    begin_suppress_tokens: IdList | None = None
    guidance_scale: Number | None = None
    watermarking_config: Watermark | None = None
    num_beams: Positive | None = None
    length_penalty: Number | None = None
    early_stopping: Flag | Literal["never", "exhaustive"] | None = None
    num_beam_groups: Positive | None = None
    diversity_penalty: Annotated[Number, Field(ge=0)] | None = None
    constraints: Any = None
    force_words_ids: Any = None
    penalty_alpha: Share | None = None
    num_return_sequences: Positive | None = None
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
    def beams(self) -> int:
        """The number of beams; 1 without beam search."""
        return self.num_beams or 1

    @property
    def groups(self) -> int:
        return self.num_beam_groups or 1

    @property
    def constrained(self) -> bool:
        """Whether the search is constrained: texts must contain given words."""
        return self.constraints is not None or self.force_words_ids is not None

    @property
    def contrastive(self) -> bool:
        return bool(self.penalty_alpha)

    @property
    def form(self) -> Form | None:
        """The form of the answer; None for any text."""
        return next(iter(forms(self)), None)

    @property
    def copies(self) -> int:
        """The number of sequences of each prompt; all its beams are one."""
        return 1 if self.beams > 1 else self.num_samples or self.num_return_sequences or 1

    @property
    def returned(self) -> int:
        """The number of texts that are returned for each prompt."""
        return (self.num_return_sequences or 1) if self.at_the_end else self.copies

    @property
    def at_the_end(self) -> bool:
        """Whether texts are chosen when the call ends: beams and ranked samples."""
        return self.beams > 1 or self.num_samples is not None

    @property
    def cuts_stop_strings(self) -> bool:
        """Whether texts end before their stop string; by default they include it, as in transformers."""
        return self.include_stop_str_in_output is False

    @property
    def needs_q(self) -> bool:
        """Whether verification needs q, the distributions that the draft drew from."""
        return SAMPLING.get(self.sampling or "", False)

    @property
    def family(self) -> tuple[Any, ...]:
        """A key of calls that share a learning schedule: their drafts cost alike and are accepted alike."""
        sampling = (self.sampling or "coupled") if self.samples else None
        return sampling, self.beams, self.groups, self.constrained, self.num_assistant_branches

    @property
    def eos_ids(self) -> list[int]:
        return listed(self.eos_token_id)

    @property
    def start_ids(self) -> list[int]:
        """The first decoder id of an encoder-decoder model: one for all rows, or one each."""
        return listed(self.decoder_start_token_id if self.decoder_start_token_id is not None else self.bos_token_id)


def listed(value: int | list[int] | None) -> list[int]:
    """None, one id or several, as a list."""
    return [] if value is None else [value] if isinstance(value, int) else list(value)
