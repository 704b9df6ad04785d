"""A request to the engine, and its results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from specdec.core.draft_schedules import Schedule
from specdec.core.draft_schedules.fixed import MOST_NODES
from specdec.core.drafts import Draft
from specdec.core.outcome import Round
from specdec.core.sequence import RunningSequence
from specdec.core.work import Logits
from specdec.models import Encoding


@dataclass(eq=False)
class Pacing:
    """A draft schedule, and the requests in flight that use it: one, or, if it learns, all of one family."""

    schedule: Schedule
    users: set[Request] = field(default_factory=set)


@dataclass(eq=False, kw_only=True)
class Request:
    """What the engine runs of one call: its sequences, with their options, draft and results.

    `encode` runs the encoder over `[inputs, ...]`; a sequence reads input number `seq.task.encoder_row`.
    `prefill_chunk`: the most prompt tokens of one pass; None: the engine's. `output_hidden_states` and
    `output_attentions` keep them of all layers, `last_hidden` the last layer's hidden states; prompts are then read in
    one pass. `frames`: positions of the encoder's output, 0 without one.

    `rounds`: the rounds that the caller has not taken yet. `first_token`: when it came, by `perf_counter`; 0 before.
    `error`: what ended the request early. `done`: nothing more will come. `passes` counts target passes in which any of
    its sequences took part.
    """

    seqs: list[RunningSequence]
    pacing: Pacing
    draft: Draft | None = None
    encode: Callable[[], Encoding] | None = None
    prefill_chunk: int | None = None
    output_hidden_states: bool = False
    output_attentions: bool = False
    last_hidden: bool = False
    frames: int = 0
    encoding: Encoding | None = None
    rounds: deque[Round] = field(default_factory=deque)
    first_token: float = 0.0
    error: BaseException | None = None
    done: bool = False
    passes: int = 0

    @property
    def traced(self) -> bool:
        """Whether it keeps hidden states or attentions."""
        return self.output_hidden_states or self.output_attentions or self.last_hidden

    def most_nodes(self, seq: RunningSequence) -> int:
        """The most nodes of one of its sequences in one pass, without its prompt."""
        if self.draft is None:
            return seq.width
        schedule, new = self.pacing.schedule, seq.max_length - seq.prompt_length
        depth, widest = min(schedule.max_tokens, new - 1), schedule.max_branches
        level = 2 * max(seq.width, widest) if seq.is_search or widest > 1 else 1
        return seq.width + max(depth, min(level * depth, MOST_NODES))

    def select(self, out: Logits) -> Logits:
        """The output of a pass with only those hidden states and attentions that it keeps."""
        layers = slice(None if self.output_hidden_states else -1, None)
        hidden = out.hidden_states if self.output_hidden_states or self.last_hidden else None
        return replace(
            out,
            hidden_states=None if hidden is None else hidden[layers],
            attentions=out.attentions if self.output_attentions else None,
            cross_attentions=out.cross_attentions if self.output_attentions else None,
        )
