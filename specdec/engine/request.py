"""What was asked of the engine, and what has come of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from specdec.core.draft_schedules import Schedule
from specdec.core.drafts import BatchDrafter
from specdec.core.rounds import Round
from specdec.core.sequence import RunningSequence
from specdec.models import Encoding


@dataclass(eq=False)
class Pacing:
    """How much to draft, as all sequences that go by it have learned so far; `users` requests do at present."""

    schedule: Schedule
    users: int = 0


@dataclass(eq=False, kw_only=True)
class Request:
    """Sequences that were asked for together, and everything that belongs to them alone.

    `encode` runs the encoder, `[inputs, ...]`, of which sequence r reads number `seq.task.place`. `prefill_chunk`
    bounds the prompt tokens of one pass; None leaves that to the engine. `output_hidden_states` and `output_attentions`
    keep those of all layers, and prompts are then read in one pass; `last_hidden` keeps hidden states of the last
    layer. `frames` are the positions of its encoder's output. `model_state` is the target's when the call was made; its
    caller has `waited` since then, and has not changed the model.

    `rounds` are those that nobody has looked at yet. `error` is what ended the request early; `done` says that nothing
    more will come. `passes` counts target passes that any of its sequences took part in.
    """

    seqs: list[RunningSequence]
    pacing: Pacing
    drafter: BatchDrafter | None = None
    encode: Callable[[], Encoding] | None = None
    prefill_chunk: int | None = None
    output_hidden_states: bool = False
    output_attentions: bool = False
    last_hidden: bool = False
    frames: int = 0
    model_state: bytes = b""
    waited: bool = False
    encoding: Encoding | None = None
    rounds: deque[Round] = field(default_factory=deque)
    error: BaseException | None = None
    done: bool = False
    counted: bool = False  # among its pacing's users
    passes: int = 0
    cached_prompt_tokens: int = 0

    @property
    def traced(self) -> bool:
        """Whether what led to a token is kept."""
        return self.output_hidden_states or self.output_attentions or self.last_hidden

    @property
    def layers(self) -> slice:
        """Which layers' hidden states are wanted, where any are."""
        return slice(None) if self.output_hidden_states else slice(-1, None)
