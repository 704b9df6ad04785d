"""A request to the engine, its results, and the memory for keys and values that requests share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.core.draft_schedules import Schedule, kind_of, make_schedule
from specdec.core.draft_schedules.fixed import MOST_NODES
from specdec.core.drafts import Draft
from specdec.core.outcome import Round
from specdec.core.sequence import RunningSequence
from specdec.core.work import Logits
from specdec.errors import OptionError
from specdec.models import Encoding, LanguageModel, free_bytes
from specdec.options.generate import Options


@dataclass(eq=False)
class Pacing:
    """The draft schedule that all requests of one family share; `users` counts those in flight."""

    schedule: Schedule
    users: int = 0


@dataclass(eq=False)
class ScheduledDraft:
    """A draft of one target, and its schedules, one per kind of call (`options.family`)."""

    draft: Draft | None
    pacings: dict[Hashable, Pacing] = field(default_factory=dict)
    _last: dict[Hashable, Pacing] = field(default_factory=dict)  # by family
    _lock: Any = field(default_factory=threading.Lock)

    def pacing(self, options: Options, **how: Any) -> Pacing:
        """The pacing of a request: its own, or its family's where the schedule learns; `how`: see `make_schedule`.

        A family's schedule begins with what the one has learned with which its last request ended.
        """
        kind = kind_of(options)
        if kind is None or not kind.learns:
            return Pacing(make_schedule(options, **how))
        family = options.family
        key = (family, options.num_assistant_tokens, options.num_assistant_branches)
        with self._lock:
            found, last = self.pacings.get(key), self._last.get(family)
            if found is None:
                learned = None if last is None else last.schedule
                found = self.pacings[key] = Pacing(make_schedule(options, learned=learned, **how))
            elif not found.users:
                found.schedule = make_schedule(options, learned=(last or found).schedule, **how)
            self._last[family] = found
        return found


@dataclass(eq=False, kw_only=True)
class Request:
    """What the engine runs of one call: its sequences, with their options, draft and results.

    `encode` runs the encoder over `[inputs, ...]`; a sequence reads input number `seq.task.encoder_row`.
    `prefill_chunk`: the most prompt tokens of one pass; None: the engine's. `output_hidden_states` and
    `output_attentions` keep those of all layers, `last_hidden` the last layer's hidden states; prompts are then read in
    one pass. `frames`: positions of the encoder's output. `model_state`: the target's at the time of the call.
    `caller_blocks`: until the end, and so cannot change the model meanwhile.

    `rounds`: those that the caller has not taken yet. `error`: what ended the request early. `done`: nothing more will
    come. `passes` counts target passes in which any of its sequences took part.
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
    model_state: bytes = b""
    caller_blocks: bool = False
    encoding: Encoding | None = None
    rounds: deque[Round] = field(default_factory=deque)
    error: BaseException | None = None
    done: bool = False
    counted: bool = False  # in `pacing.users`
    passes: int = 0

    @property
    def traced(self) -> bool:
        """Whether it keeps hidden states or attentions."""
        return self.output_hidden_states or self.output_attentions or self.last_hidden

    def most_nodes(self, seq: RunningSequence) -> int:
        """The most nodes of one of its sequences in one pass, without its prompt."""
        if self.draft is None:
            return seq.width
        widest = self.pacing.schedule.max_branches
        level = 2 * max(seq.width, widest) if seq.is_search or widest > 1 else 1
        return seq.width + min(level * (seq.max_length - seq.prompt_length), MOST_NODES)

    def wanted(self, out: Logits) -> Logits:
        """The output of a pass with only those hidden states and attentions that it keeps."""
        layers = slice(None if self.output_hidden_states else -1, None)
        keeps_hidden = (self.output_hidden_states or self.last_hidden) and out.hidden_states is not None
        return replace(
            out,
            hidden_states=out.hidden_states[layers] if keeps_hidden and out.hidden_states is not None else None,
            attentions=out.attentions if self.output_attentions else None,
            cross_attentions=out.cross_attentions if self.output_attentions else None,
        )


class MemoryBudget:
    """A limit on the keys and values of all running sequences, target and drafts together.

    `given`: bytes (int), or a share of the memory that is free at the first request (float); None: no limit. A request
    counts as if every sequence grew to its maximal length.
    """

    def __init__(self, given: int | float | None, model: LanguageModel) -> None:
        is_bytes = isinstance(given, int) and not isinstance(given, bool) and given > 0
        if not (given is None or is_bytes or (isinstance(given, float) and 0 < given <= 1)):
            raise OptionError.of(
                "kv_budget", "a number of bytes, or a share of the free memory (above 0, up to 1.0)", given
            )
        self.given, self._model = given, model
        self._kept = (0, 0)  # rows and columns that buffers may keep allocated
        self.kept_bytes = 0  # their bytes

    @property
    def limit(self) -> int | None:
        """In bytes; None: no limit."""
        if isinstance(self.given, float):
            self.given = int(self.given * free_bytes(self._model.device))
        return self.given

    def check(self, request: Request) -> None:
        """Raises OptionError for a request that does not even fit alone."""
        if self.limit is not None and (needed := self.bytes([request])) > self.limit:
            raise OptionError(
                f"the request may need {needed:,} bytes of keys and values, and `kv_budget` allows {self.limit:,}: "
                "lower `max_new_tokens`, shorten the prompt, pass fewer rows, or raise `kv_budget`"
            )

    def fits(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether a request can run beside others, some of which may be named twice."""
        return self.limit is None or self.bytes([*dict.fromkeys(running), request]) <= self.limit

    def bounds(self, requests: Sequence[Request]) -> tuple[int, int]:
        """The most rows and columns of a cache that these requests may need."""
        seqs = [seq for request in requests for seq in request.seqs]
        longest = max((seq.most_positions for seq in seqs), default=0)
        widest = max((request.most_nodes(seq) for request in requests for seq in request.seqs), default=1)
        return sum(len(seq.batch_seqs) for seq in seqs), longest + widest + 2

    def ample(self, requests: Sequence[Request]) -> tuple[int, int]:
        """The bounds, or earlier, larger ones while they take at most half of the limit.

        Otherwise buffers would shrink and grow, and be copied, with every request that leaves and comes.
        """
        rows, columns = self.bounds(requests)
        kept = max(rows, self._kept[0]), max(columns, self._kept[1])
        models = {id(m): m for r in requests if r.draft is not None for m in r.draft.models}
        width = self._model.kv_bytes + sum(model.kv_bytes for model in models.values())
        fits = self.limit is None or 2 * kept[0] * kept[1] * width <= self.limit
        self._kept = kept if fits else (rows, columns)
        self.kept_bytes = self._kept[0] * self._kept[1] * width
        return self._kept

    def bytes(self, requests: Sequence[Request]) -> int:
        """The most bytes of keys and values of these requests, in the target and in drafts."""
        rows, columns = self.bounds(requests)
        total = rows * columns * self._model.kv_bytes
        total += sum(len(request.seqs) * self._model.cross_bytes(request.frames) for request in requests)
        drafts = {id(request.draft): request.draft for request in requests if request.draft is not None}
        for draft in drafts.values():
            own = sum(len(request.seqs) for request in requests if request.draft is draft)
            total += own * columns * sum(model.kv_bytes for model in draft.models)
        return total
