"""Sessions of models that keep plain keys and values: one padded pass for all rows, rollback for free."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from specdec.errors import OptionError, UnsupportedError
from specdec.models import positions, rotary
from specdec.models.encoding import Encoding
from specdec.models.layout import Layout, Place, Sight
from specdec.models.outputs import Keep, row_scores
from specdec.models.session import Session, check_paths, check_rows, check_trees
from specdec.models.store import KvStore
from specdec.types import EMPTY, Scores, Tree

if TYPE_CHECKING:
    from specdec.models.language_model import LanguageModel


_SLACK = 64  # slots that branches may leave void before what is left of them is moved together


class KvSession(Session):
    """Rows of one model over one `KvStore`: a row's text and branches are slots, beams share what they have in common.

    Branches that die leave void slots behind, which nobody looks at; they are closed up now and then.
    """

    def __init__(self, language: LanguageModel) -> None:
        self.passes = 0
        self.reread = language.capability.reread
        self._places: list[Place] = []
        self._trees: list[Tree] = []
        self._language = language
        self._device = language.device
        self._store = KvStore(language.num_layers)
        self._cross = _CrossAttention() if language.is_encoder_decoder else None
        self._cache: Any = self._store if self._cross is None else self._cross.cache(self._store)
        self._can_keep = "logits_to_keep" in language.input_names

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        """Tokens of text held per row."""
        return [place.length for place in self._places]

    @property
    def crowns(self) -> list[Tree]:
        """Every row's crown."""
        trees = zip(self._trees, self._places, strict=True)
        return [tree.part(range(place.crown)) if place.crown else EMPTY for tree, place in trees]

    def add(self, rows: int, encoding: Encoding | None = None) -> None:
        """Appends `rows` empty rows; an encoder-decoder needs their encoding."""
        if (self._cross is None) != (encoding is None) or (encoding is not None and len(encoding) != rows):
            need = "None, the model has no encoder" if self._cross is None else f"the encoding of {rows} rows"
            raise OptionError.of("encoding", need, None if encoding is None else f"{len(encoding)} rows")
        held = len(self._places)
        if self._cross is not None and encoding is not None:
            self._cross.add(encoding)
            self._cache = self._cross.cache(self._store)
        self._store.reserve_rows(held + rows, held)
        self._places += [Place() for _ in range(rows)]
        self._trees += [EMPTY] * rows

    @torch.no_grad()
    def forward(
        self,
        trees: Sequence[Tree],
        keep: Sequence[int],
        *,
        embeds: Sequence[Tensor | None] | None = None,
        wholes: Sequence[int] | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> list[Scores]:
        """One padded pass over all rows."""
        check_trees(trees, keep, [place.crown for place in self._places])
        self._trees = list(trees)
        if all(len(tree) == place.crown for tree, place in zip(trees, self._places, strict=True)):
            empty = torch.empty(0, self._language.vocab_size, dtype=self._language.dtype, device=self._language.device)
            return [Scores(tree, len(tree), empty, held=len(tree)) for tree in trees]
        for row, (place, tree) in enumerate(zip(self._places, trees, strict=True)):
            place.begin(tree, len(tree) - keep[row], None if wholes is None else wholes[row])
        layout = Layout.of(trees, self._places)
        if layout.sight is None and layout.nodes > 1 and self._language.forgets_order:
            layout = replace(layout, sight=layout.causal())
        kept = Keep.of(layout, keep)
        if output_attentions:
            self._language.check_attentions()
        wanted = {"output_hidden_states": output_hidden_states, "output_attentions": output_attentions}
        extras = {name: True for name, want in wanted.items() if want}
        compiled = self._language.compiled
        self._store.prepare(layout)
        if compiled is not None and compiled.takes(layout) and embeds is None and not extras:
            kept = kept.several(layout)
            output = compiled(self._ids(trees, layout), layout, kept, self._store)
        else:
            inputs = self._inputs(trees, layout, embeds) | extras
            if self._can_keep:
                inputs["logits_to_keep"] = kept.argument(self._device)
            output = self._run(inputs, layout)
        self.passes += 1
        return row_scores(
            output, trees, layout, kept, sliced=self._can_keep, extras=output_hidden_states or output_attentions
        )

    def commit(self, paths: Sequence[list[int]], *, trunks: Sequence[int] | None = None, final: bool = True) -> None:
        """O(1) where the kept nodes are the first ones of a chain; otherwise columns are moved, at once or later."""
        check_paths(paths, trunks, len(self._places))
        moves = []
        for row, (place, tree, path) in enumerate(zip(self._places, self._trees, paths, strict=True)):
            trunk = len(path) if trunks is None else trunks[row]
            place.keep(tree, path, trunk)
            self._trees[row] = EMPTY if trunk == len(path) else tree.part(path, trunk)
            moves += [(row, *move) for move in place.settle(_SLACK)]
        self._move(moves)

    def refresh(self) -> None:
        """Forgets in O(1)."""
        if self.reread is not None:
            grown = [place.whole <= self.reread <= place.extent for place in self._places]
            self._places = [Place() if new else place for place, new in zip(self._places, grown, strict=True)]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forgets in O(1)."""
        moves = []
        for row, (place, length) in enumerate(zip(self._places, lengths, strict=True)):
            if length < place.length:
                self._trees[row] = EMPTY
            moves += [(row, *move) for move in place.cut(length)]
        self._move(moves)

    @torch.no_grad()
    def select(self, rows: Sequence[int]) -> None:
        """Keeps these rows in this order; those that stay where they are cost nothing."""
        check_rows(rows, len(self._places))
        rows = list(rows)
        if len(rows) > self._store.row_capacity:
            self._store.reserve_rows(len(rows), self._store.row_capacity)
        moved = [(source, target) for target, source in enumerate(rows) if source != target]
        if moved:
            self._store.copy_rows(
                [s for s, _ in moved], [t for _, t in moved], max(self._places[s].top for s, _ in moved)
            )
        self._places = [copy(self._places[row]) for row in rows]
        self._trees = [self._trees[row] for row in rows]
        if self._cross is not None:
            self._cross.select(rows)

    def _move(self, moves: list[tuple[int, int, int]]) -> None:
        if moves:
            self._store.move_columns(*(list(part) for part in zip(*moves, strict=True)))

    def _ids(self, trees: Sequence[Tree], layout: Layout) -> Tensor:
        # Built fresh and contiguous: a view or an odd stride would make a compiled forward recompile.
        new = [tree.tokens[place.crown :] for tree, place in zip(trees, layout.places, strict=True)]
        padded = [tokens + [0] * (layout.nodes - len(tokens)) for tokens in new]
        return torch.tensor(padded, device=self._device)

    def _inputs(self, trees: Sequence[Tree], layout: Layout, embeds: Sequence[Tensor | None] | None) -> dict[str, Any]:
        language, ids = self._language, self._ids(trees, layout)
        inputs: dict[str, Any] = {"past_key_values": self._cache, "use_cache": True, "return_dict": True}
        prefix = "" if self._cross is None else "decoder_"
        if embeds is not None and any(e is not None for e in embeds):
            inputs["inputs_embeds"] = self._embed(ids, embeds)
        else:
            inputs[prefix + "input_ids"] = ids
        if self._cross is not None:
            inputs |= self._cross.inputs(language.input_names)
        if layout.sight is not None:
            self._place(inputs, layout.sight, prefix)
        return inputs

    def _place(self, inputs: dict[str, Any], sight: Sight, prefix: str) -> None:
        language, capability = self._language, self._language.capability
        if language.model.config._attn_implementation not in {"sdpa", "eager"}:
            raise UnsupportedError(
                f"attention {language.model.config._attn_implementation!r} takes no mask of ours, which trees and rows"
                ' of different lengths need: load the model with attn_implementation="sdpa"'
            )
        masks = {kind.name: sight.mask(kind, language.dtype).to(language.device) for kind in capability.kinds}
        inputs[prefix + "attention_mask"] = masks if capability.masks == "dict" else next(iter(masks.values()))
        name = {"ids": "position_ids", "decoder_ids": "decoder_position_ids"}.get(capability.positions)
        if name is not None:
            inputs[name] = sight.positions.to(language.device)

    def _embed(self, ids: Tensor, embeds: Sequence[Tensor | None]) -> Tensor:
        if self._cross is not None:
            raise UnsupportedError("an encoder-decoder takes embeddings in its encoder, not as decoder text")
        hidden = self._language.model.get_input_embeddings()(ids).clone()
        for row, given in enumerate(embeds):
            if given is not None:
                hidden[row, : given.shape[0]] = given.to(hidden)
        return hidden

    def _run(self, inputs: dict[str, Any], layout: Layout) -> Any:
        sight, capability = layout.sight, self._language.capability
        if capability.boundary is not None:
            with rotary.running(layout.spans()):
                return self._language.model(**inputs)
        if sight is None or capability.positions not in {"embedding", "bias", "alibi"}:
            return self._language.model(**inputs)
        with positions.running(sight.positions, sight.key_positions):
            return self._language.model(**inputs)


class _CrossAttention:
    """The encoder's output for every row, and the cross-attention keys and values computed from it."""

    def __init__(self) -> None:
        self._encoding: Encoding | None = None
        self._source: list[int] = []
        self._cached: EncoderDecoderCache | None = None

    def add(self, encoding: Encoding) -> None:
        """Appends rows; everyone's cross-attention is projected again in the next pass."""
        first = 0
        if self._encoding is None or not self._source:
            self._encoding, self._source = encoding, []
        else:
            self._encoding = self._encoding.select(self._source).join(encoding)
            first = len(self._source)
        self._source = list(range(first + len(encoding)))
        self._cached = None

    def cache(self, store: KvStore) -> EncoderDecoderCache:
        """The library's pair of caches: ours for the text, its own for the encoder's output."""
        self._cached = EncoderDecoderCache(store, DynamicCache())
        return self._cached

    def select(self, rows: list[int]) -> None:
        """Keeps these rows; beams of one input share an encoding, so their reordering moves nothing."""
        source = [self._source[row] for row in rows]
        if source == self._source or self._encoding is None:
            return
        self._source = list(range(len(rows)))
        self._encoding = self._encoding.select(rows)
        if self._cached is not None and any(self._cached.is_updated.values()):
            index = torch.tensor(rows, dtype=torch.long, device=self._encoding.hidden.device)
            self._cached.cross_attention_cache.reorder_cache(index)

    def inputs(self, names: frozenset[str]) -> dict[str, Any]:
        """Keyword arguments for the model."""
        if self._encoding is None:
            raise OptionError("rows of an encoder-decoder need their encoding: pass it to `add`")
        given: dict[str, Any] = {"encoder_outputs": BaseModelOutput(last_hidden_state=self._encoding.hidden)}
        if self._encoding.mask is not None and "attention_mask" in names:
            given["attention_mask"] = self._encoding.mask
        return given
