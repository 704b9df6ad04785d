"""Memory: what keys and values take, and what is free."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import torch
from torch import Tensor


def digest(tensor: Tensor) -> bytes:
    """A fingerprint of a tensor's shape, type and content."""
    plain = tensor.detach().cpu().contiguous()
    head = f"{plain.dtype} {tuple(plain.shape)}".encode()
    return hashlib.blake2b(head + plain.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()


def free_bytes(device: torch.device) -> int:
    """Bytes of `device` that are free now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def kv_width(config: Any) -> int:
    """Numbers that the widest layer of a text decoder keeps of a position, keys and values together."""
    if getattr(config, "is_heterogeneous", False):  # layers of different widths, each with a config
        return max(map(kv_width, config.per_layer_config))
    heads = _first(config, "decoder_attention_heads", "num_attention_heads", "num_heads", "n_head", "n_heads")
    hidden = _first(config, "hidden_size", "d_model", "n_embd")
    shared = getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False)
    kept = (
        1 if shared else getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads
    )
    width = getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or hidden // max(heads, 1)
    if (rope := getattr(config, "qk_rope_head_dim", None)) is not None:  # keys and values differ in width
        return heads * (rope + config.qk_nope_head_dim + config.v_head_dim)
    return 2 * kept * width


def _first(config: Any, *names: str) -> int:
    return next((int(value) for name in names if (value := getattr(config, name, None))), 1)
