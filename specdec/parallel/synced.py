"""Models whose weights each pass gathers from all processes (FSDP, ZeRO-3), while each process has its own texts.

A pass waits for one in every other process. So a process that has finished runs dummy passes until all have finished,
like `synced_gpus` in transformers.
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
    """Whether passes must keep in step with other processes': `asked`, or if None, by how weights are stored."""
    if language.is_sharded or dist.get_world_size() == 1:
        return False
    return bool(is_deepspeed_zero3_enabled() or is_fsdp_managed_module(language.model)) if asked is None else asked


class InStep:
    """A context in which every pass of a model takes place in all processes; it ends when all have reached its end.

    `drafts` run in this process alone. Raises UnsupportedError for a model with an encoder or another backend than
    eager, and for drafts that use its weights or, with `reading`, its hidden states.
    """

    def __init__(self, language: LanguageModel, drafts: Sequence[LanguageModel] = (), *, reading: bool = False) -> None:
        if language.is_encoder_decoder or language.backend != "eager":
            kind = "an encoder" if language.is_encoder_decoder else f"`backend`={language.backend!r}"
            raise UnsupportedError(
                f"`synced_gpus` needs a decoder-only model on `backend`='eager', and this has {kind}"
            )
        own = {id(parameter) for parameter in language.model.parameters()}
        if reading or any(id(parameter) in own for draft in drafts for parameter in draft.model.parameters()):
            raise UnsupportedError("`synced_gpus` needs a draft with weights of its own: a smaller model, or 'suffix'")
        self._model, self._device = language.model, language.device

    def __enter__(self) -> None:
        def announce(*_: object) -> None:
            self._announce(1)

        # Before the hooks that gather weights, which need all other processes in a pass.
        self._hook = self._model.register_forward_pre_hook(announce, prepend=True)

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        ids = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        with torch.inference_mode(False), torch.no_grad():
            while self._announce(0):
                self._model(input_ids=ids, use_cache=False)

    def _announce(self, passes: int) -> bool:
        """Announces that this process runs `passes` (0 or 1); returns whether any process runs one."""
        total = torch.tensor(passes, device=self._device)
        dist.all_reduce(total)
        return bool(total)
