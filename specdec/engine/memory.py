"""The memory for keys and values that requests share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specdec.engine.request import Request
from specdec.errors import OptionError
from specdec.models import LanguageModel, free_bytes


class MemoryLimit:
    """A limit on the keys and values of all running sequences, target and drafts together.

    `kv_budget`: bytes (int), or a share of the memory that is free at the first request (float). A request counts as if
    every sequence grew to its maximal length.
    """

    def __init__(self, kv_budget: int | float, model: LanguageModel) -> None:
        is_bytes = isinstance(kv_budget, int) and not isinstance(kv_budget, bool) and kv_budget > 0
        if not (is_bytes or (isinstance(kv_budget, float) and 0 < kv_budget <= 1)):
            raise OptionError.of(
                "kv_budget", "a number of bytes, or a share of the free memory (above 0, up to 1.0)", kv_budget
            )
        self.kv_budget, self._model = kv_budget, model
        self._ample = (0, 0)  # rows and columns that buffers may keep allocated
        self.buffer_bytes = 0  # their bytes

    @property
    def limit(self) -> int:
        """In bytes."""
        kv_budget = self.kv_budget
        if isinstance(kv_budget, float):  # several threads may be here
            kv_budget = self.kv_budget = int(kv_budget * free_bytes(self._model.device))
        return kv_budget

    def check(self, request: Request) -> None:
        """Raises OptionError for a request that does not even fit alone."""
        if (size := self.bytes([request])) > self.limit:
            chains = "draft chains (`num_assistant_branches`=1), " if request.pacing.schedule.max_branches > 1 else ""
            raise OptionError(
                f"the request may need {size:,} bytes of keys and values, and `kv_budget` allows {self.limit:,}: "
                f"lower `max_new_tokens`, shorten the prompt, pass fewer rows, {chains}or raise `kv_budget`"
            )

    def fits(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether a request can run beside others, some of which may be named twice."""
        return self.bytes([*dict.fromkeys(running), request]) <= self.limit

    def bounds(self, requests: Sequence[Request]) -> tuple[int, int]:
        """The most rows and columns of a cache that these requests may need."""
        seqs = [seq for request in requests for seq in request.seqs]
        longest = max((seq.most_positions for seq in seqs), default=0)
        widest = max((request.most_nodes(seq) for request in requests for seq in request.seqs), default=1)
        return sum(len(seq.batch_seqs) for seq in seqs), longest + widest + 1

    def ample(self, requests: Sequence[Request]) -> tuple[int, int]:
        """The bounds, or earlier, larger ones while they take at most half of the limit.

        Otherwise buffers would shrink and grow, and be copied, with every request that leaves and comes.
        """
        rows, columns = self.bounds(requests)
        ample = max(rows, self._ample[0]), max(columns, self._ample[1])
        models = {id(model): model for request in requests for model in _cached(request)}
        width = self._model.kv_bytes + sum(model.kv_bytes for model in models.values())
        fits = 2 * ample[0] * ample[1] * width <= self.limit
        self._ample = ample if fits else (rows, columns)
        self.buffer_bytes = self._ample[0] * self._ample[1] * width
        return self._ample

    def bytes(self, requests: Sequence[Request]) -> int:
        """The most bytes of keys and values of these requests, in the target and in drafts."""
        rows, columns = self.bounds(requests)
        frames = sum(len(request.seqs) * request.frames for request in requests)  # that cross-attention reads
        total = (rows * columns + frames) * self._model.kv_bytes
        for request in requests:
            for model in _cached(request):
                positions = columns + (request.frames if model.is_encoder_decoder else 0)
                total += len(request.seqs) * positions * model.kv_bytes
        return total


def _cached(request: Request) -> Sequence[LanguageModel]:
    """The models of a request's draft that keep keys and values in a cache."""
    return () if request.draft is None or not request.draft.is_cached else request.draft.models
