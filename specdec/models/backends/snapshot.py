"""Sessions over transformers' own caches, for state that cannot be cut back: snapshots are restored, text is replayed.

A row's cache has consumed the first `num_cached` tokens of its text; after a rollback it is behind, and the missing
tokens precede the next pass. Exact for everything that the model can do itself.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import eq
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specdec.core.tree import EMPTY, Tree
from specdec.core.work import Logits, Work
from specdec.errors import OptionError
from specdec.models.cache import recurrent_state
from specdec.models.encoding import Encoding
from specdec.models.hf.private_api import hidden_states_of, per_layer
from specdec.models.protocols import ModelSpec, Session

_LONG_REPLAY = 16  # tokens: more missing tokens get a pass alone, after which a snapshot is taken
_MODULE_LOCKS: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()


@dataclass(slots=True)
class _Row:
    """A row: its text, whose first `final` tokens are settled, and the cache, which has consumed `num_cached` tokens.

    `initial_length` is the length of the text that the row began with.
    """

    encoding: Encoding | None
    tokens: list[int] = field(default_factory=list)
    embeds: Tensor | None = None
    final: int = 0
    cache: Any = None
    modules: list[Any] | None = None
    num_cached: int = 0
    snapshot: tuple[int, Any, list[Any] | None] | None = None
    tree: Tree = EMPTY
    last_path: list[int] = field(default_factory=list)
    initial_length: int = 0

    def begin(self, work: Work, reset_length: int | None) -> None:
        """Sets `initial_length` of a row without text, or whose cache is reset; as `ColumnMap.begin`."""
        tree = work.tree
        if not tree.tokens:
            return
        if not (self.tokens and self.initial_length):
            self.initial_length = work.initial_length
        length = len(self.tokens) + tree.depth
        if reset_length is not None and self.initial_length <= reset_length < length:
            self.forget_cache()
            self.initial_length = length

    def forget_cache(self) -> None:
        """Drops the cache: the whole text is replayed in the next pass."""
        self.cache = self.modules = self.snapshot = None
        self.num_cached = 0

    def rewind(self, length: int) -> None:
        """Brings the cache back to `length` tokens, or fewer where it cannot stop there."""
        if self.snapshot is not None and self.snapshot[0] > length:
            self.snapshot = None
        if self.num_cached <= length:
            return
        if recurrent_state.can_be_cut(self.cache):
            recurrent_state.cut_cache(self.cache, length)
            self.num_cached = length
        elif self.snapshot is not None:
            self.num_cached, state, self.modules = self.snapshot
            self.cache = recurrent_state.restore(self.cache, state)
        else:
            self.forget_cache()

    def remember(self) -> None:
        """Takes a snapshot, unless the last one is of this length or cutting needs none."""
        is_current = self.snapshot is not None and self.snapshot[0] == self.num_cached
        if self.num_cached and not is_current and not recurrent_state.can_be_cut(self.cache):
            self.snapshot = (self.num_cached, recurrent_state.snapshot(self.cache), self.modules)


class ReplaySession(Session):
    """Rows run one after another, trees as paths from root to leaf, branches anew with every path through them.

    A snapshot copies the recurrent state, so none is taken before something was taken back or guessed; a rollback
    without one replays the row from its beginning, which is slow but as exact.
    """

    def __init__(self, language: ModelSpec) -> None:
        self.passes = 0  # how many the model has run
        self.cache_reset_length = language.capability.cache_reset_length
        self._language = language
        self.rows: dict[int, _Row] = {}
        self._last_number = 0
        self._cautious = False
        self._proven = False
        names = (name for name in recurrent_state.CACHE_NAMES if name in language.input_names)
        self._cache_name = next(names, None)
        self._state_names = recurrent_state.MODULE_STATE.get(language.config.model_type, ())
        # its cache holds a prompt apart from what follows, and a fork may belong to a longer prompt
        self._begins_anew = recurrent_state.holds_prompts_apart(language.config)
        self._lock = _MODULE_LOCKS.setdefault(language.model, threading.RLock())

    def add(self, encoding: Encoding | None = None) -> int:
        return self._add_row(_Row(encoding))

    def fork(self, row: int, length: int) -> int:
        source = self._row(row)
        if length > len(source.tokens):
            raise OptionError.of("length", f"at most the {len(source.tokens)} tokens that the row holds", length)
        # The snapshot is shared: restoring copies its tensors.
        copies = {"tokens": list(source.tokens), "cache": copy.deepcopy(source.cache)}
        number = self._add_row(branch := replace(source, **copies, tree=EMPTY, last_path=[]))
        self.truncate([number], [length])
        if self._begins_anew:
            branch.forget_cache()
            branch.initial_length = 0
        return number

    def remove(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._row(row)
            del self.rows[row]

    def length(self, row: int) -> int:
        return len(self._row(row).tokens)

    @torch.no_grad()
    def run(
        self, works: Sequence[Work], *, hidden: bool | Sequence[int] = False, attentions: bool = False
    ) -> list[Logits]:
        """Runs every row's paths, after the missing tokens of its cache."""
        rows = [self._row(work.row) for work in works]
        states = hidden_states_of(hidden)
        extras: dict[str, Any] = {"output_hidden_states": states} if states else {}
        if attentions:
            extras["output_attentions"] = True
            self._language.check_attentions(branched=not all(work.tree.is_chain for work in works))
        outputs = []
        for row, work in zip(rows, works, strict=True):
            if work.embeds is not None:  # embeddings of earlier tokens stay, in case the row is replayed
                before = work.embeds[:0] if row.embeds is None else row.embeds
                row.embeds = torch.cat([before[: len(row.tokens)], work.embeds])
            row.rewind(len(row.tokens))
            row.begin(work, self.cache_reset_length)
            row.last_path = []
            passes = self.passes
            out = self._run_work(row, work, extras)
            outputs.append(replace(out, passes=range(passes, self.passes)))
        for row, work in zip(rows, works, strict=True):
            row.tree = work.tree
        return outputs

    def commit(
        self,
        rows: Sequence[int],
        paths: Sequence[list[int]],
        *,
        num_texts: Sequence[int] | None = None,
        final: bool = True,
    ) -> None:
        """Extends texts; a cache beyond the kept path is brought back."""
        for i, (row, nodes) in enumerate(zip(map(self._row, rows), paths, strict=True)):
            path = nodes if num_texts is None else nodes[: num_texts[i]]
            if any(node >= len(row.tree) for node in nodes):
                raise OptionError.of("paths", f"nodes of the last pass, which had {len(row.tree)}", nodes)
            before, last_path = len(row.tokens), row.last_path
            row.tokens += [row.tree.tokens[node] for node in path]
            common = sum(takewhile(bool, map(eq, path, last_path)))
            complete = common >= len(last_path)
            if not complete:
                row.rewind(before + common)
            self._cautious |= not complete or (bool(path) and not final)
            self._proven |= final and complete and row.snapshot is not None
            row.final = len(row.tokens) if final else row.final
            row.tree, row.last_path = row.tree.part(nodes, len(path)), []

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row, length in zip(map(self._row, rows), lengths, strict=True):
            if length < len(row.tokens):
                self._cautious = True
                del row.tokens[length:]
                row.rewind(length)
                row.final, row.tree, row.last_path = length, EMPTY, []

    def _add_row(self, row: _Row) -> int:
        self._last_number += 1
        self.rows[self._last_number] = row
        return self._last_number

    def _row(self, number: int) -> _Row:
        if number not in self.rows:
            raise OptionError.of("rows", f"rows of this session, {sorted(self.rows)}", number)
        return self.rows[number]

    def _run_work(self, row: _Row, work: Work, extras: dict[str, Any]) -> Logits:
        tree, first, num_logits = work.tree, work.first, work.num_logits
        if not work.num_new:
            return Logits(work, self._no_logits())
        if not tree.is_chain:
            return self._run_paths(row, work, extras)
        self._prepare(row, tentative=num_logits > 1)
        num_prompt = first if num_logits > 1 and not extras and first > _LONG_REPLAY and not self._is_plain(row) else 0
        length = len(row.tokens)
        if num_prompt:  # a snapshot between prompt and draft saves reading the prompt twice
            self._feed(row, row.tokens[row.num_cached :] + tree.tokens[:num_prompt], 1, {})
            row.remember()
        rest = row.tokens[row.num_cached :] + tree.tokens[max(row.num_cached - length, 0) :]
        output = self._feed(row, rest, len(tree) if extras else max(num_logits, 1), extras)
        row.last_path = list(range(len(tree)))
        logits = output.pop("logits")
        states: dict[str, Any] = {
            name: tuple(None if layer is None else layer[..., work.num_cached :, :] for layer in layers)
            for name, layers in output.items()
            if layers
        }
        return Logits(work, logits[len(logits) - num_logits :], **states)

    def _run_paths(self, row: _Row, work: Work, extras: dict[str, Any]) -> Logits:
        tree, first, inner = work.tree, work.first, set(work.tree.parents)
        places: dict[int, tuple[dict[str, Any], int]] = {}  # for each node its pass, and its place there
        for leaf in (node for node in range(len(tree)) if node not in inner):
            path = tree.path(leaf)
            row.rewind(len(row.tokens))
            self._prepare(row, tentative=True)
            tokens = row.tokens[row.num_cached :] + [tree.tokens[node] for node in path]
            output = self._feed(row, tokens, len(path), extras)
            row.last_path = path
            places |= {node: (output, depth) for depth, node in enumerate(path)}
        logits = [output["logits"][place] for output, place in (places[node] for node in range(first, len(tree)))]
        nodes = [places[node] for node in range(work.num_cached, len(tree))]
        layers = tuple(
            None if layer is None else torch.stack([output["hidden_states"][i][place] for output, place in nodes])
            for i, layer in enumerate(output["hidden_states"])
        )
        return Logits(work, torch.stack(logits) if logits else self._no_logits(), hidden_states=layers or None)

    def _no_logits(self) -> Tensor:
        return torch.empty(0, self._language.vocab_size, dtype=self._language.dtype, device=self._language.device)

    def _is_plain(self, row: _Row) -> bool:
        return self._language.capability.cache_kind == "none" or recurrent_state.can_be_cut(row.cache)

    def _prepare(self, row: _Row, *, tentative: bool) -> None:
        """Takes a snapshot if this pass may be taken back; long missing text is fed before it."""
        if not (tentative or self._cautious or not self._proven) or self._is_plain(row):
            return
        if len(row.tokens) - row.num_cached > _LONG_REPLAY:
            self._feed(row, row.tokens[row.num_cached :], 1, {})
        if row.num_cached <= row.final:
            row.remember()

    def _feed(self, row: _Row, tokens: list[int], num_last: int, extras: dict[str, Any]) -> dict[str, Any]:
        """Feeds `tokens` to the cache; returns logits and extras of the last `num_last`."""
        capability = self._language.capability
        whole = capability.cache_kind == "none"  # passes read the text from its beginning
        if capability.chunks or (num_last == 1 if whole else row.cache is None or len(tokens) == 1):
            return self._pass(row, tokens, num_last, extras)
        if "output_attentions" in extras:
            self._language.check_attentions(drafted=True)
        ends = range(1, len(tokens) + 1)[-num_last:] if whole else range(1, len(tokens) + 1)
        steps = [self._pass(row, tokens[0 if whole else end - 1 : end], 1, extras) for end in ends][-num_last:]
        hidden = zip(*(step["hidden_states"] for step in steps), strict=True)
        return {
            "logits": torch.cat([step["logits"] for step in steps]),
            "hidden_states": tuple(None if layer[0] is None else torch.cat(layer) for layer in hidden),
        }

    def _pass(self, row: _Row, tokens: list[int], num_last: int, extras: dict[str, Any]) -> dict[str, Any]:
        inputs, spans = self._inputs(row, tokens) | extras, None
        if (name := self._language.logits_argument) is not None:
            inputs[name] = num_last
        if self._language.capability.boundary is not None:  # lengths of the text when plain decoding read each token
            at = torch.arange(row.num_cached + 1, row.num_cached + len(tokens) + 1)
            spans = at[None].clamp(min=row.initial_length)
        try:
            with self._language.scaling(spans):
                output = self._call(row, inputs)
        except BaseException:
            row.forget_cache()  # only some layers may have written
            raise
        self.passes += 1
        row.cache = output.get(self._cache_name) if self._language.capability.cache_kind == "replay" else None
        row.num_cached = row.num_cached + len(tokens) if row.cache is not None else 0
        hidden = per_layer(output, "hidden_states")
        return {
            "logits": output.logits[0, -num_last:],
            "hidden_states": tuple(None if layer is None else layer[0, -num_last:] for layer in hidden),
            **{
                name: tuple(layer[0, :, -num_last:] for layer in per_layer(output, name))
                for name in ("attentions", "cross_attentions")
            },
        }

    def _call(self, row: _Row, inputs: dict[str, Any]) -> Any:
        if not self._state_names:
            return self._language.model(**inputs)
        # This model keeps a row's state in its modules: one row at a time gets them, and restores them.
        with self._lock:
            before = recurrent_state.module_state(self._language.model, self._state_names)
            try:
                recurrent_state.set_module_state(row.modules or [(m, name, None) for m, name, _ in before])
                output = self._language.model(**inputs)
                row.modules = recurrent_state.module_state(self._language.model, self._state_names)
            finally:
                recurrent_state.set_module_state(before)
        return output

    def _inputs(self, row: _Row, tokens: list[int]) -> dict[str, Any]:
        language = self._language
        ids = torch.tensor([tokens], device=language.device)
        inputs: dict[str, Any] = {"use_cache": language.capability.cache_kind == "replay", "return_dict": True}
        if row.cache is None and self._begins_anew:
            row.cache = recurrent_state.cache_for_prompt(language.config, row.initial_length)
        if row.cache is not None and self._cache_name is not None:
            inputs[self._cache_name] = row.cache
        if row.encoding is not None:
            inputs["encoder_outputs"] = row.encoding.output
            if row.encoding.input_mask is not None and "attention_mask" in language.input_names:
                inputs["attention_mask"] = row.encoding.input_mask
            if not inputs["use_cache"] and "input_ids" in language.source_names:
                inputs["input_ids"] = ids  # never read: without them, FSMT's tokens see later ones
        if row.embeds is not None and row.num_cached < len(row.embeds):
            hidden = language.model.get_input_embeddings()(ids).clone()
            embeds = row.embeds[row.num_cached : row.num_cached + len(tokens)]
            hidden[0, : len(embeds)] = embeds.to(hidden)
            return inputs | {"inputs_embeds": hidden}
        return inputs | {language.prefix + "input_ids": ids}
