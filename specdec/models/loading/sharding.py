"""How transformers distributes a model's weights among the processes of a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from transformers.distributed import DistributedConfig

from specdec.errors import UnsupportedError


def parts(config: Any, plan: str | Mapping[str, str], name: str) -> DistributedConfig:
    """The `distributed_config` of `from_pretrained` for this config and the job's number of processes.

    Raises UnsupportedError for models that cannot be shared so.
    """
    text, count = config.get_text_config(decoder=True), int(os.environ["WORLD_SIZE"])
    if config.is_encoder_decoder:
        raise UnsupportedError(f"{name!r} has an encoder, and `tp_plan` shares decoders alone: leave it out")
    if plan == "auto" and not getattr(text, "base_model_tp_plan", None):
        raise UnsupportedError(
            f"transformers has no plan to share {config.model_type!r} models among processes: pass one as `tp_plan`, a "
            "mapping of modules to styles, or leave it out"
        )
    heads = {what: getattr(text, what, None) for what in ("num_attention_heads", "num_key_value_heads")}
    if odd := [what for what, number in heads.items() if number and number % count]:
        raise UnsupportedError(
            f"{name!r} has {heads[odd[0]]} heads (`{odd[0]}`), which {count} processes cannot share evenly: start as "
            "many as divide that"
        )
    return DistributedConfig(tp_plan=plan if isinstance(plan, str) else dict(plan))
