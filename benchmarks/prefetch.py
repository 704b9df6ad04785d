"""A prefetch thread in front of accelerate's hooks, to be compared with `specdec.models.loading.streamed_layers`.

accelerate reads one weight after the other when their modules run. From the second pass on their order is known, and
a thread copies the next ones into memory while this one computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from specdec.models.hf.device_hooks import hooks


class Prefetched(Mapping[str, Tensor]):
    """accelerate's loader of offloaded weights, `ahead` weights before they are asked for."""

    def __init__(self, loader: Mapping[str, Tensor], ahead: int) -> None:
        self._loader, self._ahead = loader, ahead
        self._after: dict[str, str] = {}
        self._last: str | None = None
        self._coming: dict[str, Future[Tensor]] = {}
        self._thread = ThreadPoolExecutor(1)

    def __getitem__(self, key: str) -> Tensor:
        if self._last is not None:
            self._after[self._last] = key
        self._last, next_ = key, key
        found = self._coming.pop(key, None)
        for _ in range(self._ahead):
            next_ = self._after.get(next_, key)
            if next_ == key:
                break
            if next_ not in self._coming:
                self._coming[next_] = self._thread.submit(self._read, next_)
        return self._read(key) if found is None else found.result()

    def __iter__(self) -> Iterator[str]:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def _read(self, key: str) -> Tensor:
        return self._loader[key].clone()  # out of the mapped file


def prefetch(model: Any, ahead: int) -> Any:
    """The model, offloaded by accelerate, with such a thread for all its hooks."""
    loaders: dict[int, Prefetched] = {}
    for module in model.modules():
        for hook in hooks(module):
            weights = getattr(hook, "weights_map", None)
            if weights is not None:
                weights.dataset = loaders.setdefault(id(weights.dataset), Prefetched(weights.dataset, ahead))
    return model
