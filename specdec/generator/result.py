"""What a call gives back: `Generation`, its statistics, and the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from specdec.core.rounds import Round, SequenceRound
from specdec.core.sequence import RunningSequence
from specdec.core.stats import Stats
from specdec.generator.notebook import as_html

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
    `drafted[row][i]` says whether the row's new token `i` was the draft's guess; searches have none. A notebook shows
    the texts with these tokens in colour.
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
    drafted: list[list[bool]] | None = None

    def _repr_html_(self) -> str:
        words = self.__dict__.get("_wording", _Wording())
        if words.tokenizer is not None and self.drafted is not None:
            rows = zip(self.new_tokens(), self.drafted, strict=True)
            return as_html([pieces(words.tokenizer, ids, origins, words.stops) for ids, origins in rows], self.stats)
        plain = self.texts if self.texts is not None else [" ".join(map(str, ids)) for ids in self.new_tokens()]
        return as_html([[(text, False)] for text in plain], self.stats)

    def word(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        """Fills in `texts`, and remembers how, for notebooks; they end before the first of `stops`."""
        self.texts = [decode(tokenizer, ids, stops) for ids in self.new_tokens()]
        self.__dict__["_wording"] = _Wording(tokenizer, stops)

    def new_tokens(self) -> list[list[int]]:
        """Each row's new ids, without prompt and padding."""
        assert self.sequences is not None
        assert self.stats is not None
        counts = self.stats.lengths
        start = self.sequences.shape[1] - max(counts)
        return [row[start : start + n].tolist() for row, n in zip(self.sequences, counts, strict=True)]


class _Wording(NamedTuple):
    """How ids become text; it stays behind where a result is pickled or copied."""

    tokenizer: Any = None
    stops: Sequence[str] = ()

    def __reduce__(self) -> tuple[type[_Wording], tuple[()]]:
        return _Wording, ()


@dataclass(frozen=True, slots=True)
class Event:
    """New text of one row: its tokens, and how many of them, at the front, came from the draft."""

    text: str
    token_ids: list[int]
    accepted: int
    row: int = 0


def decode(tokenizer: Any, ids: Sequence[int], stops: Sequence[str] = ()) -> str:
    """The text of new ids, without special tokens; it ends before the first of `stops`."""
    return before_stop(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False), stops)


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


class Detokenizer:
    """Ids to text piece by piece, holding back what a later token may still change.

    That is incomplete UTF-8, and with `stops`, before the first of which the text ends, what may be the beginning of
    one.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[int] = []
        self._start = 0  # decoding begins here, a little before the text not yet given out
        self._given = 0
        self._held = ""
        self._ended = False

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """The text that is certain after these ids; everything, when they are the last."""
        self._held += self._text(ids, last)
        text = before_stop(self._held, self._stops)
        ended, self._ended = self._ended, self._ended or len(text) < len(self._held)
        sure = 0 if last or self._ended else max(map(len, self._stops), default=1) - 1
        text = text[: max(len(text) - sure, 0)]
        self._held = self._held[len(text) :]
        return "" if ended else text

    def _text(self, ids: Sequence[int], last: bool) -> str:
        """What these ids add, as far as it is complete."""
        self._ids += ids
        before = decode(self._tokenizer, self._ids[self._start : self._given])
        after = decode(self._tokenizer, self._ids[self._start :])
        if not last and (after.endswith("\ufffd") or len(after) <= len(before)):
            return ""
        self._start, self._given = self._given, len(self._ids)
        return after[len(before) :]


def pieces(
    tokenizer: Any, ids: Sequence[int], drafted: Sequence[bool], stops: Sequence[str] = ()
) -> list[tuple[str, bool]]:
    """The text of new ids in pieces, each with whether it came from the draft."""
    text, found = Detokenizer(tokenizer, stops), []
    for number, (token, origin) in enumerate(zip(ids, drafted, strict=True), 1):
        if piece := text.push([token], last=number == len(ids)):
            found.append((piece, origin))
    return [("".join(text for text, _ in run), origin) for origin, run in groupby(found, key=lambda piece: piece[1])]


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


def per_token(rows: Sequence[RunningSequence], name: str, pad: int) -> PerToken:
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


def traces(rows: Sequence[RunningSequence], name: str) -> PerTokenAndLayer | None:
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
    """Counts of a request, collected round by round."""

    def __init__(self) -> None:
        self._rows: dict[int, list[SequenceRound]] = {}
        self._seconds = [0.0, 0.0, 0.0]  # of drafting, verification, selection

    def add(self, round: Round) -> None:
        """Takes one round into account."""
        for phase, seconds in enumerate((round.draft_seconds, round.verify_seconds, round.select_seconds)):
            self._seconds[phase] += seconds
        for seq in round.seqs:
            self._rows.setdefault(seq.id, []).append(seq)

    def tokens(self, keys: Sequence[int]) -> list[list[int]]:
        """For every row, in the order of `keys`, the tokens that its rounds brought."""
        return [[step.token for round in self._rows.get(key, ()) for step in round.steps] for key in keys]

    def drafted(self, keys: Sequence[int]) -> list[list[bool]]:
        """For every row, in the order of `keys`, which of its new tokens were the draft's."""
        return [
            [step < round.accepted for round in self._rows.get(key, ()) for step in range(len(round.steps))]
            for key in keys
        ]

    def stats(self, keys: Sequence[int], **known: Any) -> Stats:
        """Statistics of the request and of every row, in the order of `keys`; `known` are fields counted elsewhere."""
        per_row = tuple(_stats(self._rows.get(key, [])) for key in keys)
        draft, verify, select = self._seconds
        summed = ("num_new_tokens", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
        joined = ("per_step_drafted", "per_step_accepted", "finish_reasons")
        counts: dict[str, Any] = {name: sum(getattr(row, name) for row in per_row) for name in summed}
        counts |= {name: tuple(item for row in per_row for item in getattr(row, name)) for name in joined}
        counts |= {"draft_seconds": draft, "verify_seconds": verify, "select_seconds": select}
        return Stats(per_row=per_row, **counts, **known)


def _stats(rounds: Sequence[SequenceRound]) -> Stats:
    """One row's part of the statistics."""
    drafted = [row.drafted for row in rounds if row.drafted]
    accepted = [row.accepted for row in rounds if row.drafted]
    return Stats(
        num_new_tokens=sum(len(row.steps) for row in rounds),
        num_target_passes=len(rounds),
        num_spec_steps=len(drafted),
        num_draft_tokens=sum(drafted),
        num_accepted_draft_tokens=sum(accepted),
        per_step_drafted=tuple(drafted),
        per_step_accepted=tuple(accepted),
        finish_reasons=(next((row.finish for row in rounds if row.finish), "cancelled"),),
    )
