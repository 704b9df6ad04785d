"""Models whose weights every pass gathers from all processes (FSDP, ZeRO-3), each of which runs texts of its own.

A pass waits for one in every other process. So a process that has nothing left to do goes on with passes over nothing
until all are done, as `synced_gpus` of transformers has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from specdec.errors import UnsupportedError
from specdec.models.language_model import LanguageModel


def waits_for_others(language: LanguageModel, asked: bool | None) -> bool:
    """Whether passes must keep in step with those of other processes: as `asked`, or where weights are gathered so."""
    if language.is_sharded or dist.get_world_size() == 1:
        return False
    return bool(is_deepspeed_zero3_enabled() or is_fsdp_managed_module(language.model)) if asked is None else asked


class InStep:
    """While it is open, every pass of a model takes place in all processes; it closes when all have come to its end.

    `drafts` run beside it, in this process alone. Raises UnsupportedError for a model that cannot be kept in step, and
    for drafts that run on its weights or, `reading` its hidden states, look at them.
    """

    def __init__(self, language: LanguageModel, drafts: Sequence[LanguageModel] = (), *, reading: bool = False) -> None:
        if language.is_encoder_decoder or language.backend != "eager":
            kind = "an encoder" if language.is_encoder_decoder else f"`backend`={language.backend!r}"
            raise UnsupportedError(f"`synced_gpus` keeps decoders in step, layer by layer, and this model has {kind}")
        own = {id(parameter) for parameter in language.model.parameters()}
        if reading or any(id(parameter) in own for draft in drafts for parameter in draft.model.parameters()):
            raise UnsupportedError("`synced_gpus` needs a draft with weights of its own: a smaller model, or 'suffix'")
        self._model, self._device = language.model, language.device

    def __enter__(self) -> None:
        def announce(*_: object) -> None:
            self._announce(1)

        # Before the hooks that gather weights, for which the others must have begun a pass too.
        self._hook = self._model.register_forward_pre_hook(announce, prepend=True)

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        ids = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        with torch.inference_mode(False), torch.no_grad():
            while self._announce(0):
                self._model(input_ids=ids, use_cache=False)

    def _announce(self, passes: int) -> bool:
        """Says whether this process has a pass to run; whether any has."""
        total = torch.tensor(passes, device=self._device)
        dist.all_reduce(total)
        return bool(total)
