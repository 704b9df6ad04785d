"""A result as a notebook shows it: its text, with what the draft guessed in colour, and one line of figures."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from specdec.core.stats import Stats

_BOX = "font-family:monospace;white-space:pre-wrap;line-height:1.5"
_DRAFTED = "background:rgba(47,158,119,.28);border-bottom:2px solid rgb(47,158,119)"  # told by more than its colour
_QUIET = "opacity:.75;font-size:90%"


def as_html(rows: Sequence[Sequence[tuple[str, bool]]], stats: Stats | None) -> str:
    """HTML of texts, each as pieces that came from the draft or did not, over what `stats` say in one line.

    It takes over the page's colours, light or dark.
    """
    texts = [f'<div style="{_BOX}">{"".join(_piece(*piece) for piece in row)}</div>' for row in rows]
    if len(texts) > 1:
        texts = [f'<div style="{_QUIET}">{n}/{len(texts)}</div>{text}' for n, text in enumerate(texts, 1)]
    return f"<div>{''.join(texts)}{'' if stats is None else _figures(stats)}</div>"


def _piece(text: str, drafted: bool) -> str:
    return f'<span style="{_DRAFTED}" title="from the draft">{escape(text)}</span>' if drafted else escape(text)


def _figures(stats: Stats) -> str:
    """The line: speed and passes, and where there was a draft what became of its guesses."""
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
