"""What a call returns: a `Generation`, which a notebook shows in colour, or the `Event`s of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from reprlib import Repr
from typing import Any, NamedTuple

from torch import Tensor
from transformers.utils import ModelOutput

from specdec.core.stats import Stats
from specdec.generator.tokenizers import decode, pieces

PerToken = tuple[Tensor, ...]
PerTokenAndLayer = tuple[tuple[Tensor, ...], ...]

_BOX = "font-family:monospace;white-space:pre-wrap;line-height:1.5"
# Drafted text is underlined for readers who see no colour.
_DRAFTED = "background:rgba(47,158,119,.28);border-bottom:2px solid rgb(47,158,119)"
_QUIET = "opacity:.75;font-size:90%"
_BRIEF = Repr()
_BRIEF.maxstring, _BRIEF.maxlist = 60, 4  # characters of a text, entries of a list


@dataclass
class Generation(ModelOutput):  # type: ignore[misc]
    """The result of `generate`; it indexes like a transformers `ModelOutput`.

    `sequences` `[rows, length]`: ids, padded on the right; with a decoder-only target they begin with the prompt.
    `scores` and `logits`: one `[rows, vocab]` per new token, after and before processors. `attentions` and
    `hidden_states` (`decoder_…` and `cross_attentions` for encoder-decoder targets): a tuple of layers per new token.
    `sequences_scores` `[rows]`: scores of hypotheses or ranked samples. `beam_indices` `[rows, tokens]`: the beam that
    each token continued. `trace[prompt][step]`: a search's live beams and hypotheses after that step.
    `drafted[row][i]`: whether the draft guessed the row's new token `i`; None for searches. A notebook shows the texts
    with these tokens in colour.
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

    def __repr__(self) -> str:
        """One line: the beginnings of texts, or of rows of ids, then figures and the names of the other fields."""
        if self.stats is None:
            return f"Generation({', '.join(self)})"
        rows = self.texts if self.texts is not None else self.new_tokens()
        others = [name for name in self if name not in ("sequences", "texts", "stats", "drafted")]
        return f"Generation({', '.join([_BRIEF.repr(rows), *_figures(self.stats), *others])})"

    def _repr_html_(self) -> str:
        decoding = self.__dict__.get("_decoding", _Decoding())
        if decoding.tokenizer is not None and self.drafted is not None:
            rows = zip(self.new_tokens(), self.drafted, strict=True)
            html = [pieces(decoding.tokenizer, ids, origins, decoding.cut_before) for ids, origins in rows]
            return as_html(html, self.stats)
        plain = self.texts if self.texts is not None else [" ".join(map(str, ids)) for ids in self.new_tokens()]
        return as_html([[(text, False)] for text in plain], self.stats)

    def decode(self, tokenizer: Any, cut_before: Sequence[str] = ()) -> None:
        """Fills in `texts`, each cut before the first of `cut_before`; the tokenizer is kept for notebooks."""
        self.texts = [decode(tokenizer, ids, cut_before) for ids in self.new_tokens()]
        self.__dict__["_decoding"] = _Decoding(tokenizer, cut_before)

    def new_tokens(self) -> list[list[int]]:
        """Each row's new ids, without prompt and padding."""
        assert self.sequences is not None
        assert self.stats is not None
        counts = self.stats.lengths
        start = self.sequences.shape[1] - max(counts)
        return [row[start : start + n].tolist() for row, n in zip(self.sequences, counts, strict=True)]


class _Decoding(NamedTuple):
    """How ids become text; not part of a pickled or copied result."""

    tokenizer: Any = None
    cut_before: Sequence[str] = ()

    def __reduce__(self) -> tuple[type[_Decoding], tuple[()]]:
        return _Decoding, ()


@dataclass(frozen=True, slots=True)
class Event:
    """New text of one row of a stream, its ids, and how many of the ids, at the front, the draft guessed.

    `finish`: the finish reason in the row's last event, None in earlier events.
    """

    text: str
    token_ids: list[int]
    accepted: int
    row: int = 0
    finish: str | None = None


def as_html(rows: Sequence[Sequence[tuple[str, bool]]], stats: Stats | None) -> str:
    """HTML of texts, each in pieces with whether the draft guessed them, and a line of `stats`.

    The colours work on light and dark pages.
    """
    texts = [f'<div style="{_BOX}">{"".join(_piece(*piece) for piece in row)}</div>' for row in rows]
    if len(texts) > 1:
        texts = [f'<div style="{_QUIET}">{n}/{len(texts)}</div>{text}' for n, text in enumerate(texts, 1)]
    return f"<div>{''.join(texts)}{'' if stats is None else _figures_line(stats)}</div>"


def _piece(text: str, drafted: bool) -> str:
    return f'<span style="{_DRAFTED}" title="from the draft">{escape(text)}</span>' if drafted else escape(text)


def _figures(stats: Stats) -> list[str]:
    """Speed, passes, and the tokens of a round with a draft."""
    figures = [
        f"{stats.num_new_tokens} tokens in {stats.seconds:.2f} s",
        f"{stats.tokens_per_second:.0f} tokens/s",
        f"{stats.num_target_passes} passes of the target",
    ]
    if stats.num_draft_rounds:
        figures.append(f"{stats.mean_acceptance_length:.2f} tokens per round with a draft")
    return figures


def _figures_line(stats: Stats) -> str:
    """HTML of the figures, and with a draft of how many of its guesses were accepted."""
    figures = _figures(stats)
    if stats.num_draft_rounds:
        mark = f'<span style="{_DRAFTED}">from the draft</span>'
        figures.append(f"{mark}: {stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} guesses kept")
    return f'<div style="{_QUIET}">{" · ".join(figures)}</div>'
