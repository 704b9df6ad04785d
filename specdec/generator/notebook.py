"""A result in a notebook: its texts, guessed tokens in colour, and a line of statistics."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from specdec.core.stats import Stats

_BOX = "font-family:monospace;white-space:pre-wrap;line-height:1.5"
# underlined for readers who see no colour
_DRAFTED = "background:rgba(47,158,119,.28);border-bottom:2px solid rgb(47,158,119)"
_QUIET = "opacity:.75;font-size:90%"


def as_html(rows: Sequence[Sequence[tuple[str, bool]]], stats: Stats | None) -> str:
    """HTML of texts, each in pieces with whether the draft guessed them, and a line of `stats`.

    The colours work on light and dark pages.
    """
    texts = [f'<div style="{_BOX}">{"".join(_piece(*piece) for piece in row)}</div>' for row in rows]
    if len(texts) > 1:
        texts = [f'<div style="{_QUIET}">{n}/{len(texts)}</div>{text}' for n, text in enumerate(texts, 1)]
    return f"<div>{''.join(texts)}{'' if stats is None else _figures(stats)}</div>"


def _piece(text: str, drafted: bool) -> str:
    return f'<span style="{_DRAFTED}" title="from the draft">{escape(text)}</span>' if drafted else escape(text)


def _figures(stats: Stats) -> str:
    """Speed, passes, and with a draft how many of its guesses were accepted."""
    facts = [
        f"{stats.num_new_tokens} tokens in {stats.seconds:.2f} s",
        f"{stats.tokens_per_second:.0f} tokens/s",
        f"{stats.num_target_passes} passes of the target",
    ]
    if stats.num_spec_steps:
        facts.append(f"{stats.mean_acceptance_length:.2f} tokens per round with a draft")
        mark = f'<span style="{_DRAFTED}">from the draft</span>'
        facts.append(f"{mark}: {stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} guesses kept")
    return f'<div style="{_QUIET}">{" · ".join(facts)}</div>'
