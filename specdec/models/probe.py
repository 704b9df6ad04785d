"""Finds a capability by trying: tiny passes through sessions, compared with the model's own forward."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.core.tree import Tree
from specdec.core.work import Work
from specdec.errors import UnsupportedError
from specdec.models.cache.recurrent_state import MODULE_STATE, module_state, set_module_state
from specdec.models.capability import COUNTS_COLUMNS, REPLAY, attention_kinds, kv_capability
from specdec.models.encoding import Encoding
from specdec.models.hf.private_api import TAKES_MASKS, attention_of
from specdec.models.hf.probe_cache import holds
from specdec.models.hf.sides import decoder_config, input_names, position_padding, source_width
from specdec.models.hf.tiny_models import SIZES, tiny_alike, tiny_model
from specdec.models.protocols import Capability, ModelSpec, Positions

# Siblings, a grandchild on each side, a second root: each way in which a mask can be wrong.
_PARENTS = [-1, 0, 0, 1, 2, -1, 5]
_LONGEST_PREFIX = 96  # tokens; longer windows are not tried
_FRAMES = 5  # frames of a trial encoding


def find_capability(language: ModelSpec) -> Capability:
    """How a model runs: as tiny models of its family and class do, which are tried once per release, or by `probe`.

    A result must hold for a tiny decoder of the family, and for a tiny model of the class, which may wrap the decoder.
    """
    config, kinds = language.config, attention_kinds(language.config)
    if config.model_type in COUNTS_COLUMNS or (config.model_type == "falcon" and config.alibi):
        return Capability("replay", reason="its attention counts columns of the cache, not positions")
    if config.model_type in SIZES and kinds is not None:
        names = [type(language.model).__name__, config.model_type, *_attention(language).values()]
        for style in _styles(language):
            if holds(" ".join([*names, style]), partial(_tiny_runs, language, style)):
                return kv_capability(style, kinds)
    return probe(language)


def _attention(language: ModelSpec) -> dict[str, str]:
    """The option that gives a tiny model the same attention; none if that takes no masks."""
    attention = attention_of(language.config)
    return {"attn_implementation": attention} if attention in TAKES_MASKS else {}


def _tiny_runs(language: ModelSpec, style: Positions) -> bool:
    """Whether tiny models of the family and of this class run on keys and values, with positions in this style."""

    def runs(model: Any) -> bool:
        kinds = attention_kinds(decoder_config(model.config))
        return kinds is not None and _agrees(language, model, kv_capability(style, kinds))

    with suppress(Exception), torch.autocast("cpu", enabled=False):  # whatever the library raises where it builds none
        small = tiny_model(language.config.model_type, **_attention(language))
        return all(map(runs, {small, tiny_alike(language.model, small)}))
    return False


def probe(language: ModelSpec) -> Capability:
    """The best capability that reproduces the logits of `language`'s model.

    Raises UnsupportedError if the model cannot continue text alone.
    """
    model = language.model
    if language.is_offloaded:
        return Capability("replay", chunks=False, reason="not probed, because its weights are not in memory")
    _check_text(language)
    for candidate in _candidates(language):
        if _agrees(language, model, candidate):
            return candidate
    whole = Capability("none", reason="no cache of its own reproduces its logits, so every pass reads the whole text")
    if _agrees(language, model, whole):
        return whole
    return replace(whole, chunks=False, reason="its logits change with later tokens, so each has a pass of its own")


def _check_text(language: ModelSpec) -> None:
    """Raises UnsupportedError for a model whose forward fails on ids alone; encoders check what they read."""
    if language.is_encoder_decoder:
        return
    kind: Any = type(language)
    state = module_state(language.model, MODULE_STATE.get(language.config.model_type, ()))
    try:
        reference(kind(language.model, capability=Capability("none")), [1, 1])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever an architecture raises
        name = type(language.model).__name__
        raise UnsupportedError(f"{name} reads no text alone: call `model.generate`") from error
    finally:
        set_module_state(state)


def _candidates(language: ModelSpec) -> Iterator[Capability]:
    reason = REPLAY.get(language.config.model_type)
    kinds = attention_kinds(language.config)
    if reason is None and kinds is not None:
        for style in _styles(language):
            capability = kv_capability(style, kinds)
            yield capability
            if len(kinds) == 1 and kinds[0].name != "all":
                yield replace(capability, masks="dict")
            if style == "ids" and (padding := position_padding(language.decoder)) is not None:
                yield replace(capability, padding=padding)
    yield Capability("replay", reason=reason or "its masks or positions cannot be set from outside")
    yield Capability("replay", chunks=False, reason=reason or "its cache takes one token at a time")


def _styles(language: ModelSpec) -> Iterator[Positions]:
    decoder = language.decoder
    # a class may hand `position_ids` on to its decoder without naming them
    if language.prefix + "position_ids" in language.input_names or "position_ids" in input_names(decoder):
        yield "ids"
    if hasattr(decoder, "embed_positions"):
        yield "embedding"
    if any(hasattr(module, "compute_bias") for module in decoder.modules()):
        yield "bias"
    if hasattr(decoder, "build_alibi_tensor"):
        yield "alibi"


def _agrees(language: ModelSpec, model: Any, candidate: Capability) -> bool:
    state = module_state(model, MODULE_STATE.get(language.config.model_type, ()))
    try:
        kind: Any = type(language)
        trial = kind(model, capability=candidate)
        tolerance = 1e-3 if trial.dtype in (torch.float32, torch.float64) else 0.1  # share of the logits' spread
        return all(
            bool((logits - expected).abs().max() <= tolerance * expected.float().std())
            for logits, expected in _trial(trial)
        )
    except Exception:
        # Whatever an architecture raises: it does not run like this.
        return False
    finally:
        set_module_state(state)


def _trial(language: ModelSpec) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of a session's logits and the model's own: ragged prefill, rollback, tree, path commit, one more token."""
    source = random.Random(0)
    encodings, session = [trial_encoding(language, row) for row in range(2)], language.session()
    rows = list(map(session.add, encodings))
    texts: list[list[int]] = [[], []]
    names = ("sliding_window", "attention_chunk_size", "window_size")
    windows = [getattr(language.config, name, None) or 0 for name in names]
    longest = max([6, *(window for window in windows if isinstance(window, int) and window < _LONGEST_PREFIX)]) + 3
    most, lengths = min(language.vocab_size, language.config.vocab_size, 1000), (longest, 4)

    def ids(count: int) -> list[int]:
        return [source.randrange(3, most) for _ in range(count)]

    steps: list[tuple[list[Tree], list[int], list[list[int]]]] = [
        ([Tree.chain(ids(n)) for n in lengths], [1, 1], [list(range(n)) for n in lengths]),
        ([Tree.chain(ids(3)) for _ in lengths], [3, 3], [[0], [0, 1]]),
        ([Tree(ids(len(_PARENTS)), _PARENTS) for _ in lengths], [len(_PARENTS)] * 2, [[0, 2, 4], [0]]),
        ([Tree.chain(ids(1)) for _ in lengths], [1, 1], [[0], [0]]),
    ]
    for trees, keep, paths in steps:
        for row, out in enumerate(session.run(list(map(Work, rows, trees, keep)))):
            for node in range(out.work.first, len(out.work.tree)):
                tokens = texts[row] + [out.work.tree.tokens[n] for n in out.work.tree.path(node)]
                expected = reference(language, tokens, encodings[row])
                yield out.logits[node - out.work.first], expected
        session.commit(rows, paths)
        for text, tree, path in zip(texts, trees, paths, strict=True):
            text += [tree.tokens[node] for node in path]


@torch.no_grad()
def reference(language: ModelSpec, tokens: list[int], encoding: Encoding | None = None) -> Tensor:
    """The model's own logits `[vocab]` after `tokens`, without a cache."""
    ids, inputs = torch.tensor([tokens], device=language.device), dict[str, Any]()
    if language.forgets_order:
        lowest = torch.full([len(tokens)] * 2, torch.finfo(language.dtype).min, dtype=language.dtype)
        inputs[language.prefix + "attention_mask"] = lowest.triu(1)[None, None].to(language.device)
    if encoding is None:
        return language.model(input_ids=ids, use_cache=False, **inputs).logits[0, -1]
    inputs["encoder_outputs"] = encoding.output
    if encoding.mask is not None:
        inputs["attention_mask"] = encoding.mask
    return language.model(decoder_input_ids=ids, use_cache=False, **inputs).logits[0, -1]


def trial_encoding(language: ModelSpec, seed: int = 0) -> Encoding | None:
    """A random encoder output of one row, for trials; None for models without encoder."""
    if not language.is_encoder_decoder:
        return None
    hidden = torch.randn(1, _FRAMES, source_width(language.model), generator=torch.Generator().manual_seed(seed))
    return Encoding(hidden.to(language.device, language.dtype))
