"""What a call gives back: `Generation`, its statistics, and the events of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from specdec.rows import RunningRow
from specdec.types import Round, Stats, Step

PerToken = tuple[Tensor, ...]
PerTokenAndLayer = tuple[tuple[Tensor, ...], ...]


@dataclass
class Generation(ModelOutput):  # type: ignore[misc]
    """The result of `generate`; it indexes like a transformers `ModelOutput`.

    `sequences` `[rows, length]` hold the prompt for decoder-only targets and are padded on the right. `scores` and
    `logits`, one `[rows, vocab]` per token, are the target's after and before processors. `attentions` and
    `hidden_states` (for encoder-decoder targets `decoder_…` and `cross_attentions`) hold a tuple of layers per token.
    `sequences_scores` `[rows]` are of hypotheses, or of ranked samples; `beam_indices` `[rows, tokens]` say which beam
    each token continued, and `trace[prompt][step]` is the search's state after a step: its live beams and hypotheses.
    """

    sequences: Tensor | None = None
    scores: PerToken | None = None
    logits: PerToken | None = None
    attentions: PerTokenAndLayer | None = None
    hidden_states: PerTokenAndLayer | None = None
    encoder_attentions: PerToken | None = None
    encoder_hidden_states: PerToken | None = None
    decoder_attentions: PerTokenAndLayer | None = None
    cross_attentions: PerTokenAndLayer | None = None
    decoder_hidden_states: PerTokenAndLayer | None = None
    sequences_scores: Tensor | None = None
    beam_indices: Tensor | None = None
    trace: list[Any] | None = None
    texts: list[str] | None = None
    stats: Stats | None = None

    def new_tokens(self) -> list[list[int]]:
        """Each row's new ids, without prompt and padding."""
        assert self.sequences is not None
        assert self.stats is not None
        counts = self.stats.lengths
        start = self.sequences.shape[1] - max(counts)
        return [row[start : start + n].tolist() for row, n in zip(self.sequences, counts, strict=True)]


@dataclass(frozen=True, slots=True)
class Event:
    """New text of one row: its tokens, and how many of them, at the front, came from the draft."""

    text: str
    token_ids: list[int]
    accepted: int
    row: int = 0


class Detokenizer:
    """Ids to text piece by piece, holding back what a later token may still change (incomplete UTF-8)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # decoding begins here, a little before the text not yet given out
        self._given = 0

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """The text that is certain after these ids; everything, when they are the last."""
        self._ids += ids
        before = self._decode(self._ids[self._start : self._given])
        after = self._decode(self._ids[self._start :])
        if not last and (after.endswith("\ufffd") or len(after) <= len(before)):
            return ""
        self._start, self._given = self._given, len(self._ids)
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def sequences(padded: Tensor, new: Sequence[list[int]], pad: int) -> Tensor:
    """`[rows, width + longest]`: prompts as given, each row's new tokens, padding."""
    longest = max(map(len, new))
    return torch.cat([padded, torch.tensor([n + [pad] * (longest - len(n)) for n in new], dtype=torch.long)], 1)


def beam_indices(origins: Sequence[Sequence[int]], beams: int, returned: int) -> Tensor:
    """`[rows, longest]` int32: the beam of the whole batch that each token continued, -1 after the end."""
    longest = max(map(len, origins))
    offsets = [row // returned * beams for row in range(len(origins))]
    numbered = [[o + offset for o in own] for own, offset in zip(origins, offsets, strict=True)]
    return torch.tensor([own + [-1] * (longest - len(own)) for own in numbered], dtype=torch.int32)


def per_token(rows: Sequence[RunningRow], name: str, pad: int) -> PerToken:
    """One `[rows, vocab]` per emitted token (a search has as many rows as beams).

    A finished row is certain of its padding: 0 there and -inf elsewhere.
    """
    values = [[_rows_of(getattr(step, name), 2, row.width) for step in row.steps] for row in rows]
    filler = torch.full_like(values[0][0], -torch.inf)  # rows of a call are all equally wide
    filler[:, pad : pad + 1] = 0.0  # some checkpoints pad with an id beyond their vocabulary
    return tuple(
        torch.cat([value[t] if t < len(value) else filler for value in values]) for t in range(max(map(len, values)))
    )


def _rows_of(value: Tensor, dims: int, width: int) -> Tensor:
    """`value` with rows first: a sequence has one; all beams share theirs before the first token."""
    value = value if value.dim() == dims else value[None]
    return value if len(value) == width else value.expand(width, *value.shape[1:])


def traces(rows: Sequence[RunningRow], name: str) -> PerTokenAndLayer | None:
    """Per emitted token and layer one tensor over all rows, aligned on the right and padded with zeros."""
    if getattr(rows[0].traces[0], name) is None:
        return None
    dims = 3 if name == "hidden_states" else 4
    values = [
        [[_rows_of(layer, dims, row.width) for layer in getattr(trace, name)] for trace in row.traces] for row in rows
    ]
    longest = max(values, key=len)
    return tuple(
        tuple(
            _joined_rows([v[t][layer] if t < len(v) else torch.zeros_like(longest[t][layer]) for v in values])
            for layer in range(len(longest[t]))
        )
        for t in range(len(longest))
    )


def _joined_rows(tensors: list[Tensor]) -> Tensor:
    """Tensors of different sizes one after the other, each in the far corner of the common size."""
    size = [max(t.shape[d] for t in tensors) for d in range(1, tensors[0].dim())]
    joined = tensors[0].new_zeros(sum(map(len, tensors)), *size)
    begin = 0
    for t in tensors:
        corner = tuple(slice(full - part, None) for full, part in zip(size, t.shape[1:], strict=True))
        place = (slice(begin, begin + len(t)), *corner)
        joined[place] = t
        begin += len(t)
    return joined


class Recorder:
    """Counts of a call, collected round by round."""

    def __init__(self, count: int) -> None:
        self._rows = [_Counts() for _ in range(count)]
        self._rounds: list[Round] = []

    def add(self, round: Round) -> None:
        """Takes one round into account."""
        self._rounds.append(round)
        for row in round.rows:
            self._rows[row.key].add(row.drafted, row.accepted, row.steps, row.finish)

    def stats(self, passes: int, seconds: float, lengths: Sequence[int], settings: dict[str, str]) -> Stats:
        """Statistics of the call and of every row."""
        rounds = self._rounds
        per_row = tuple(row.stats() for row in self._rows)
        return Stats(
            num_new_tokens=sum(row.num_new_tokens for row in per_row),
            num_target_passes=passes,
            num_spec_steps=sum(row.num_spec_steps for row in per_row),
            num_draft_tokens=sum(row.num_draft_tokens for row in per_row),
            num_accepted_draft_tokens=sum(row.num_accepted_draft_tokens for row in per_row),
            per_step_drafted=_joined(row.per_step_drafted for row in per_row),
            per_step_accepted=_joined(row.per_step_accepted for row in per_row),
            seconds=seconds,
            draft_seconds=sum(r.draft_seconds for r in rounds),
            verify_seconds=sum(r.verify_seconds for r in rounds),
            select_seconds=sum(r.select_seconds for r in rounds),
            finish_reasons=_joined(row.finish_reasons for row in per_row),
            lengths=lengths,
            per_row=per_row,
            settings=settings,
        )


class _Counts:
    """One row's part of the statistics."""

    def __init__(self) -> None:
        self.tokens = self.passes = 0
        self.drafted: list[int] = []
        self.accepted: list[int] = []
        self.finish = "unfinished"

    def add(self, drafted: int, accepted: int, steps: Sequence[Step], finish: str | None) -> None:
        self.tokens += len(steps)
        self.passes += 1
        if drafted:
            self.drafted.append(drafted)
            self.accepted.append(accepted)
        self.finish = finish or self.finish

    def stats(self) -> Stats:
        return Stats(
            num_new_tokens=self.tokens,
            num_target_passes=self.passes,
            num_spec_steps=len(self.drafted),
            num_draft_tokens=sum(self.drafted),
            num_accepted_draft_tokens=sum(self.accepted),
            per_step_drafted=tuple(self.drafted),
            per_step_accepted=tuple(self.accepted),
            finish_reasons=(self.finish,),
        )


def _joined(parts: Iterable[Sequence[Any]]) -> tuple[Any, ...]:
    return tuple(item for part in parts for item in part)
