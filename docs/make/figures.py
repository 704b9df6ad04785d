"""The picture, the plots and the tables of the documents, made from recorded results.

    python docs/make/figures.py            # from benchmarks/results and docs/make/round.json
    python docs/make/figures.py --record   # plays the picture's round again first, with the package's pair

The pictures go to docs/assets, light and dark; tables stand between `<!-- figures: NAME -->` and `<!-- /figures -->` in
the README and in benchmarks/results/transformers.md. A test compares.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PROMPT = "for name in names:\n    if name"
DOCUMENTS = ("README.md", "benchmarks/results/transformers.md")
WIDTH = 520

# What the documents show of `benchmarks/vs_transformers.py`: the system there, and its name here.
SYSTEMS = {
    "transformers greedy": "transformers, greedy",
    "transformers assisted": "transformers, draft model",
    "transformers prompt lookup": "transformers, prompt lookup",
    "specdec plain": "specdec, no draft",
    "specdec suffix, cost": "specdec, suffix",
    "specdec model, cost": "specdec, draft model",
    "specdec hybrid, cost": "specdec, both",
}


class Theme(NamedTuple):
    """Colours of one picture; blue and orange are told apart by everybody."""

    text: str
    faint: str
    line: str
    other: str
    own: str
    right: str
    wrong: str


THEMES = {
    "light": Theme("#1f2328", "#59636e", "#d1d9e0", "#9aa4b2", "#0a62c4", "#dbeafe", "#ffe8cc"),
    "dark": Theme("#e6edf3", "#9198a1", "#3d444d", "#6b7685", "#58a6ff", "#12335c", "#5c3a10"),
}


# the plot


def backends() -> list[str]:
    """The backends that were measured."""
    return [backend for backend in ("packed",) if _file(backend).is_file()]


def _file(backend: str) -> Path:
    return RESULTS / f"pair-{backend}.json"


def results(backend: str) -> dict[str, Any]:
    """What `benchmarks/vs_transformers.py --json` wrote of the package's pair in this backend."""
    found: dict[str, Any] = json.loads(_file(backend).read_text(encoding="utf-8"))
    return found


def measured(backend: str) -> dict[str, dict[str, str]]:
    """Its rows in float32 by system, those that the documents show."""
    rows = {row["system"]: row for row in results(backend)["tables"]["float32"]}
    return {name: rows[name] for name in SYSTEMS}


def speed(row: Mapping[str, str]) -> float:
    """How many times as fast as transformers' greedy decoding."""
    return float(row["vs greedy"].removesuffix("x"))


def sizes_plot(theme: Theme) -> str:
    """Milliseconds per token over parameters; both axes are logarithmic."""
    found = json.loads((RESULTS / "sizes.json").read_text(encoding="utf-8"))
    sizes: list[dict[str, float]] = found["sizes"]
    left, top, wide, tall = 44, 44, 340, 180
    slowest = max(max(one["transformers"], one["specdec"]) for one in sizes)
    fastest = min(min(one["transformers"], one["specdec"]) for one in sizes)
    ends = [log2(sizes[0]["parameters"]), log2(sizes[-1]["parameters"])]

    def place(one: Mapping[str, float], system: str) -> tuple[float, float]:
        across = (log2(one["parameters"]) - ends[0]) / (ends[1] - ends[0] or 1)
        return left + wide * across, top + tall * log2(slowest / one[system]) / log2(slowest / fastest)

    parts = [text(0, 18, "Milliseconds per token, without a draft", theme.text, size=15, weight=600)]
    parts.append(f'<path d="M{left} {top + tall + 18}h{wide}" stroke="{theme.line}"/>')
    for system, colour, above in (("transformers", theme.other, -8), ("specdec", theme.own, 17)):
        points = [place(one, system) for one in sizes]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), one in zip(points, sizes, strict=True):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
            parts.append(text(x, y + above, f"{one[system]:.1f}", theme.text, size=12, anchor="middle"))
        parts.append(text(points[-1][0] + 18, points[-1][1] + 4, system, theme.text, size=12))
    for one in sizes:
        x, _ = place(one, "specdec")
        parts.append(text(x, top + tall + 38, f"{one['parameters'] / 1e6:.0f}", theme.faint, size=12, anchor="middle"))
    under = f"million parameters. {found['processor'].strip()}, {found['threads']} threads, float32"
    parts.append(text(left, top + tall + 60, under, theme.faint, size=12))
    label = "; ".join(f"{one['parameters'] / 1e6:.0f} M: {one['transformers']}, {one['specdec']}" for one in sizes)
    return svg(top + tall + 70, f"Milliseconds per token, transformers and specdec: {label}", parts)


# the table


def table() -> str:
    """The figures of every backend beside transformers."""
    by_backend = {backend: measured(backend) for backend in backends()}
    head = " | ".join(f"{backend}: ms per token | times as fast" for backend in by_backend)
    lines = [
        f"| | {head} | acceptance length |",
        f"| --- |{' ---: | ---: |' * len(by_backend)} ---: |",
    ]
    for name, shown in SYSTEMS.items():
        cells = [shown]
        for rows in by_backend.values():
            cells += [rows[name]["ms per token"], f"{speed(rows[name]):.2f}×"]
        lines.append(f"| {' | '.join([*cells, rows[name]['mean acceptance length']])} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """Every table by the name between its marks."""
    return {"beside transformers": table()}


def filled(document: str) -> str:
    """A document with its tables as they are now."""
    for name, made in tables().items():
        mark = re.escape(f"<!-- figures: {name} -->")
        document = re.sub(
            f"({mark}\n).*?(<!-- /figures -->)", lambda m, made=made: f"{m[1]}{made}\n{m[2]}", document, flags=re.S
        )
    return document


# the picture of a round


def recorded() -> dict[str, Any]:
    """The round of the picture: prompt, guesses, what was written, and how much of it was guessed."""
    found: dict[str, Any] = json.loads((HERE / "round.json").read_text(encoding="utf-8"))
    return found


def record() -> dict[str, Any]:
    """Plays the round with the package's pair."""
    from specdec import SpecGenerator
    from specdec.options import bundled_models

    target = SpecGenerator.from_pretrained("zoo:python-code")
    small = SpecGenerator.from_pretrained(str(bundled_models.pair().draft))
    rounds: list[list[int]] = []

    def guess(tokens: list[int], k: int) -> list[int]:
        rounds.append(small.generate([tokens], max_new_tokens=k, eos_token_id=[]).new_tokens()[0])
        return rounds[-1]

    gen = SpecGenerator(target.target, guess, tokenizer=target.tokenizer, schedule="constant", num_assistant_tokens=5)
    first = next(iter(gen.stream(PROMPT, max_new_tokens=8)))
    words = [[target.tokenizer.decode([token]) for token in tokens] for tokens in (rounds[0], first.token_ids)]
    return {"prompt": PROMPT, "guessed": words[0], "written": words[1], "accepted": first.accepted}


def round_picture(theme: Theme) -> str:
    """What one round does, in four lines."""
    found = recorded()
    guessed, written, accepted = found["guessed"], found["written"], found["accepted"]
    so_far = shown(found["prompt"])
    parts = [text(0, 18, "The text so far", theme.faint), text(0, 44, so_far, theme.text, mono=True, size=16)]
    parts += [text(0, 82, f"1  The draft guesses {word(len(guessed))} tokens", theme.faint)]
    parts += chips(94, guessed, theme, ["none"] * len(guessed))
    parts += [text(0, 158, "2  The target reads them all in one pass, and says what it writes there", theme.faint)]
    fills = [theme.right] * accepted + [theme.wrong] * (len(written) - accepted)
    parts += chips(170, written, theme, fills)
    for n in range(len(written)):
        mark = ("✓", theme.own) if n < accepted else ("≠", theme.text)
        parts.append(text(column(n) + CHIP / 2, 222, mark[0], mark[1], anchor="middle", size=15, weight=700))
    result = f"3  {word(accepted).capitalize()} guesses were right: {word(len(written))} tokens from one pass"
    parts += [text(0, 252, result, theme.faint), text(0, 278, so_far, theme.text, mono=True, size=16)]
    start = len(so_far) * 9.6
    kept = " " + "".join(map(shown, written[:accepted])).strip()
    parts += [
        text(start, 278, kept, theme.own, mono=True, size=16, weight=700),
        text(start + len(kept) * 9.6, 278, shown(written[-1]), theme.text, mono=True, size=16, weight=700),
    ]
    label = f"The draft guesses {''.join(guessed)!r}; the target keeps {accepted} tokens and writes {written[-1]!r}"
    return svg(292, label, parts)


CHIP, GAP = 92, 14


def column(n: int) -> float:
    """Where the n-th token stands."""
    return n * (CHIP + GAP)


def chips(y: float, words: Sequence[str], theme: Theme, fills: Sequence[str]) -> Iterator[str]:
    """Tokens side by side."""
    for n, (token, fill) in enumerate(zip(words, fills, strict=True)):
        yield box(column(n) + 1, y, CHIP - 2, 34, fill, line=theme.line)
        yield text(column(n) + CHIP / 2, y + 22, shown(token).strip(), theme.text, anchor="middle", mono=True, size=15)


def shown(token: str) -> str:
    """A token with its line breaks visible."""
    return re.sub(r"\n\s*", " ⏎ ", token)


def word(number: int) -> str:
    """A small number in letters."""
    return ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")[number]


# SVG


def text(
    x: float,
    y: float,
    content: str,
    colour: str,
    *,
    size: int = 14,
    anchor: str = "start",
    weight: int = 400,
    mono: bool = False,
) -> str:
    """A line of text."""
    font = "ui-monospace,SFMono-Regular,Menlo,Consolas,monospace" if mono else "system-ui,-apple-system,sans-serif"
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-family="{font}" font-size="{size}" '
        f'font-weight="{weight}" text-anchor="{anchor}" xml:space="preserve">{escape(content)}</text>'
    )


def box(x: float, y: float, width: float, height: float, fill: str, line: str = "none") -> str:
    """A rounded rectangle."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} rx="4" fill="{fill}" stroke="{line}"/>'


def svg(height: float, label: str, parts: Sequence[str], width: int = WIDTH) -> str:
    """A picture, which readers of screens are told of by its label."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(label)}">\n{body}\n</svg>\n'
    )


def pictures() -> dict[Path, str]:
    """Every picture by its file."""
    assets = ROOT / "docs" / "assets"
    makers = {"round": round_picture, "sizes": sizes_plot}
    return {
        assets / f"{name}-{shade}.svg": make(theme) for name, make in makers.items() for shade, theme in THEMES.items()
    }


def main() -> None:
    """Writes pictures and tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="play the picture's round again")
    if parser.parse_args().record:
        (HERE / "round.json").write_text(json.dumps(record(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for path, picture in pictures().items():
        path.write_text(picture, encoding="utf-8")
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
