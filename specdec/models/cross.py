"""Cross-attention of the rows of a session: what their encoders said, projected once per row and layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from specdec.models.encoding import Encoding

if TYPE_CHECKING:
    from specdec.models.language_model import LanguageModel
    from specdec.models.store import KvStore


class _CrossLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's projections: `parts[i]` are keys and values `[1, heads, frames, head width]` of row i of the store.

    Rows of one pass are joined once, and stay joined until other rows run.
    """

    is_sliding = is_compileable = is_croppable = False

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[Tensor, Tensor] | None] = []
        self.pending: tuple[Tensor, Tensor] | None = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is allocated beforehand."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes the projections of the rows that run."""
        self.pending = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Frames of the rows that run."""
        return 0 if self.keys is None else self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All frames."""
        return self.get_seq_length(), 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def select(self, first: int, last: int, frames: int) -> None:
        """Joins the projections of these rows, padded to `frames`, in place of the library's keys and values."""
        parts = [part for part in self.parts[first:last] if part is not None]
        self.keys, self.values = (_joined([part[kind] for part in parts], frames) for kind in (0, 1))
        self._point(first, [part[0].shape[2] for part in parts])

    def forget(self) -> None:
        """Lets the joined projections go; the rows keep theirs."""
        self.keys = self.values = None  # type: ignore[assignment]

    def take(self, first: int, frames: list[int]) -> None:
        """Keeps what `update` was given for rows from `first` on, without padding."""
        assert self.pending is not None
        (self.keys, self.values), self.pending = self.pending, None
        self._point(first, frames)

    def _point(self, first: int, frames: list[int]) -> None:
        """Rows from `first` on become views of the joined tensors: nothing is held twice."""
        for i, count in enumerate(frames):
            self.parts[first + i] = tuple(t[i : i + 1, :, :count] for t in (self.keys, self.values))  # type: ignore


class CrossAttention:
    """What every row's encoder said; a row's projections are made in its first pass, with rows as new as itself."""

    def __init__(self, language: LanguageModel) -> None:
        self._layers = [_CrossLayer() for _ in range(language.num_layers)]
        self._encodings: list[Encoding] = []
        self._projected: list[bool] = []
        self._takes_mask = "attention_mask" in language.input_names
        self._pads = self._takes_mask and language.model.main_input_name == "input_ids"
        self._cache: EncoderDecoderCache | None = None
        self._selected: tuple[int, int] | None = None
        self._joined: dict[str, Any] = {}

    def beside(self, store: KvStore) -> EncoderDecoderCache:
        """The library's pair of caches: `store` for the text, ours for the encoder's output."""
        self._cache = EncoderDecoderCache(store, Cache(layers=self._layers))
        return self._cache

    def add(self, encoding: Encoding) -> None:
        """Rows at the end of the store."""
        rows = [encoding.select([i]) for i in range(len(encoding))] if len(encoding) > 1 else [encoding]
        self._encodings += rows
        self._projected += [False] * len(rows)
        for layer in self._layers:
            layer.parts += [None] * len(rows)
        self._forget_joined()

    def fork(self, index: int) -> None:
        """A row at the end of the store that reads what row `index` reads; projections are shared."""
        self._encodings.append(self._encodings[index])
        self._projected.append(self._projected[index])
        for layer in self._layers:
            layer.parts.append(layer.parts[index])
        self._forget_joined()

    def remove(self, index: int) -> None:
        """Forgets a row; the last one takes its place."""
        lists: list[list[Any]] = [self._encodings, self._projected, *(layer.parts for layer in self._layers)]
        for rows in lists:
            last = rows.pop()
            if index < len(rows):
                rows[index] = last
        self._forget_joined()

    def _forget_joined(self) -> None:
        """Other rows will run next: what was joined for the last ones is let go."""
        self._selected, self._joined = None, {}
        for layer in self._layers:
            layer.forget()

    def kind(self, index: int) -> tuple[Any, ...]:
        """Rows of different kinds cannot share a pass: new ones, and those whose frames no mask could pad."""
        encoding = self._encodings[index]
        return self._projected[index], *(() if self._pads else (encoding.hidden.shape[1], encoding.mask is None))

    def inputs(self, first: int, last: int) -> dict[str, Any]:
        """Keyword arguments of a pass over rows `first` to `last - 1`, which are of one kind."""
        assert self._cache is not None
        projected = self._projected[first]
        self._cache.is_updated = dict.fromkeys(range(len(self._layers)), projected)
        if self._selected != (first, last):
            joined = self._encodings[first] if last == first + 1 else Encoding.joined(self._encodings[first:last])
            self._joined = {"encoder_outputs": BaseModelOutput(last_hidden_state=joined.hidden)}
            if joined.mask is not None and self._takes_mask:
                self._joined["attention_mask"] = joined.mask
            if projected:
                for layer in self._layers:
                    layer.select(first, last, joined.hidden.shape[1])
            self._selected = (first, last)
        return self._joined

    def ran(self, first: int, last: int) -> None:
        """A pass came through: new rows have their projections now."""
        if self._projected[first]:
            return
        frames = [encoding.hidden.shape[1] for encoding in self._encodings[first:last]]
        for layer in self._layers:
            layer.take(first, frames)
        self._projected[first:last] = [True] * (last - first)

    @property
    def bytes(self) -> int:
        """What all projections take."""
        parts = (tensor for layer in self._layers for part in layer.parts or () for tensor in part or ())
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in parts}
        return sum(storages.values())


def _joined(parts: list[Tensor], frames: int) -> Tensor:
    """Rows `[1, heads, frames, width]` one below the other, the shorter ones padded with zeros to `frames`."""
    if len(parts) == 1:  # its memory must not be that of all rows it was joined with
        return parts[0] if parts[0].untyped_storage().nbytes() == parts[0].nbytes else parts[0].clone()
    if all(part.shape[2] == frames for part in parts):
        return torch.cat(parts)
    whole = parts[0].new_zeros(len(parts), parts[0].shape[1], frames, parts[0].shape[3])
    for row, part in enumerate(parts):
        whole[row, :, : part.shape[2]] = part[0]
    return whole
