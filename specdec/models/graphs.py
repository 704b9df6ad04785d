"""The second backend on a GPU: passes of a few sizes, each recorded once as a CUDA graph and then played back whole.

A short pass is hundreds of kernels that take less time than it takes to ask for them; a graph asks once. It works on
the same memory every time: what a pass is given is copied there, and nodes are filled up to the next of a few sizes.
The nodes that fill see nothing, and are written to the last column of a row, which no text ever reaches.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.models.backends.ragged import Given

if TYPE_CHECKING:
    from specdec.models.backends.ragged import RaggedForward

_log = logging.getLogger(__name__)
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Nodes of the passes that are recorded; wider ones run as before."""
_MOST = 32  # recordings that are kept

_CAPTURING = threading.Lock()  # one graph at a time in a process

Run = Callable[[], Sequence[Tensor]]
Recorder = Callable[[Run], tuple[Callable[[], None], Sequence[Tensor]]]
"""Runs what it is given, and returns what plays it back and the tensors that it then writes to."""


class _Recording(NamedTuple):
    given: Given
    play: Callable[[], None]
    said: Sequence[Tensor]


class GraphedForward:
    """The recorded passes of one model, one at a time. What cannot be recorded runs as before, and a warning says why.

    `record` is `cuda_graphs` of the model's device, but for tests.
    """

    is_kept = False  # nothing of it outlives a process
    chains = False  # guesses are chosen on the host

    def __init__(self, ragged: RaggedForward, record: Recorder | None = None) -> None:
        self._model, self._record = ragged.model, record or cuda_graphs(ragged.model.device)
        self._recordings: OrderedDict[object, _Recording] = OrderedDict()
        self._playing = threading.Lock()  # threads that share the model share the memory that passes work on
        self.ready = True

    def start(self) -> GraphedForward:
        """Passes are recorded when they are first run."""
        return self

    def wait(self, timeout: float | None = None) -> bool:
        """Whether passes are recorded."""
        return self.ready

    def __call__(self, *args: Any) -> list[Tensor]:
        """Logits `[1, kept, vocab]` and hidden states; arguments as of `RaggedModel`."""
        given = Given(*args)
        nodes, kept = given.ids.shape[1], len(given.kept)
        width = next((width for width in WIDTHS if width >= nodes), None)
        if width is not None:
            filled = _filled(given, width)
            with self._playing:
                if recording := self._recording(filled):
                    for mine, new in zip(_own(recording.given), _own(filled), strict=True):
                        mine.copy_(new)
                    recording.play()
                    logits, *states = recording.said
                    # Copies, as the next pass writes to the same places.
                    told = [state[:, : len(one)].clone() for state, one in zip(states, given.told, strict=True)]
                    return [logits[:, :kept].clone(), *told]
        return list(self._model(*given))

    def _recording(self, filled: Given) -> _Recording | None:
        """The recording of such a pass, made now if there is none; None where nothing can be recorded."""
        key = _key(filled)
        if self.ready and key not in self._recordings:
            self._add(key, filled)
        if not self.ready:
            return None
        self._recordings.move_to_end(key)
        return self._recordings[key]

    def _add(self, key: object, filled: Given) -> None:
        """Records a pass, if that can be."""
        own = Given(*(_copied(field) for field in filled[:5]), *filled[5:])  # type: ignore[call-arg, arg-type]
        try:
            play, said = self._record(lambda: self._model(*own))
        except Exception as error:
            _log.warning("the passes of %s are not recorded, they run as before: %s", self._name, error)
            self._recordings.clear()
            self.ready = False
            return
        # A session's keys and values go with it: whatever lies there and looks alike later is played on as well.
        self._recordings[key] = _Recording(own._replace(buffers=(), frames=()), play, said)
        if len(self._recordings) > _MOST:
            self._recordings.popitem(last=False)

    @property
    def _name(self) -> str:
        return type(self._model.model).__name__


def cuda_graphs(device: torch.device) -> Recorder:
    """Records CUDA graphs there, which share memory for what lies between a pass's kernels."""
    pool = torch.cuda.graph_pool_handle()

    def record(run: Run) -> tuple[Callable[[], None], Sequence[Tensor]]:
        # Only what is asked of the captured stream is recorded, and kernels ask that of the device they run on.
        with _CAPTURING, torch.cuda.device(device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run()  # what is only done the first time must not be recorded
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                said = run()
        return graph.replay, said

    return record


def _filled(given: Given, width: int) -> Given:
    """With nodes up to `width`, all of which get logits, and words of bits up to a power of two."""
    more = width - given.ids.shape[1]
    last = given.buffers[0][0].shape[2] - 1
    return given._replace(
        ids=F.pad(given.ids, (0, 0) * (given.ids.dim() - 2) + (0, more)),
        positions=F.pad(given.positions, (0, more)),
        kept=F.pad(given.kept, (0, width - len(given.kept))),
        tables=[_longer(table, more, last) for table in given.tables],
        encoders=[_longer(table, more, 0) for table in given.encoders],
        told=[torch.arange(width if len(one) else 0, device=one.device) for one in given.told],
    )


def _longer(table: Tensor, more: int, column: int) -> Tensor:
    """A table with so many more nodes, that see nothing and go to `column` of the row of the first node."""
    words = table.shape[3] - 4
    table = F.pad(table, (0, (1 << (words - 1).bit_length()) - words if words else 0, 0, more))
    if more:
        table[:, :, -more:, 0], table[:, :, -more:, 1] = table[:, :, :1, 0], column
    return table


def _own(given: Given) -> list[Tensor]:
    """The tensors that differ from pass to pass; those of `told` are the same for a size."""
    return [given.ids, given.positions, given.kept, *given.tables, *given.encoders]


def _copied(field: object) -> object:
    return field.clone() if isinstance(field, Tensor) else [tensor.clone() for tensor in field]  # type: ignore[attr-defined]


def _key(filled: Given) -> object:
    """What a recording depends on: sizes, and the memory of keys and values."""
    sizes = tuple(tuple(tensor.shape) for tensor in _own(filled))
    memory = tuple(
        (side.data_ptr(), tuple(side.shape), side.stride())
        for pair in (*filled.buffers, *filled.frames)
        for side in pair
    )
    return sizes, tuple(len(one) > 0 for one in filled.told), memory
