"""From samples to `results.json`: the figures of every system, speedups with intervals, and a summary in sentences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import starmap
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from specdec.bench.machine import Watch
from specdec.bench.runner import name_of
from specdec.bench.samples import Mismatch, Sample, Store
from specdec.bench.suite import PLAIN, Cell, Group
from specdec.core.stats import Stats, total

Results = dict[str, Any]
RESAMPLES = 2000
CONFIDENCE = 0.95
PERCENTILES = (50, 90, 99)
_MIB = 2**20
_LEARNED = 2  # a draft whose acceptance length grows to so many times the first repeat's has seen the answers


def results(store: Store) -> Results:
    """The content of `results.json`."""
    suite = store.suite
    groups = [_group(store, group) for group in suite.groups()]
    spins = [sample.spin for sample in store.samples.values()]
    load = max(run["load"] for run in store.runs)
    content: Results = {
        "name": suite.name,
        "fingerprint": store.fingerprint,
        "groups": groups,
        "mismatches": [{**asdict(m), "excuse": _excuse(store, m)} for m in store.mismatches],
        "failures": [
            {"group": group, "system": system, "error": why} for (group, system), why in store.failures.items()
        ],
        "contention": Watch(spins, load).verdict() if spins else "nothing was measured",
        "runs": store.runs,
        "suite": suite.model_dump(mode="json", exclude_none=True),
    }
    return {**content, "summary": summary(content)}


def save(content: Results, folder: Path) -> Path:
    """Writes `results.json` into the folder; returns its path."""
    path = folder / "results.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def exit_state(content: Results) -> str:
    """`mismatch` where a text differs without an excuse, else `failed` or `ok`."""
    if any(m["excuse"] is None for m in content["mismatches"]):
        return "mismatch"
    return "failed" if content["failures"] else "ok"


def _group(store: Store, group: Group) -> Results:
    plain = store.of(group.label, PLAIN)
    systems = [_system(store, group, cell, plain) for cell in (None, *group.cells)]
    return {
        "label": group.label,
        "target": group.target,
        "mode": group.mode.label,
        "strategy": group.strategy.label,
        "temperature": group.strategy.temperature,
        "prompts": group.prompts.label,
        "batch": group.batch,
        "comparable": group.strategy.comparable,
        "systems": [system for system in systems if system is not None],
    }


def _system(store: Store, group: Group, cell: Cell | None, plain: list[Sample]) -> Results | None:
    """The figures of one system; None without samples."""
    samples = store.of(group.label, name_of(cell))
    if not samples:
        return None
    tokens, stats = sum(s.count for s in samples), _total(samples)
    faster = speedup(plain, samples) if cell is not None else None
    memory = [s.memory for s in samples if s.memory is not None]
    copies, plus, _ = stats.settings.get("draft_kind", "").partition("+")
    ratios = {
        name: speedup(*([s for s in side if s.category == name] for side in (plain, samples)))
        for name in dict.fromkeys(s.category for s in samples)
    }
    return {
        # A large model copies besides.
        "name": f"{copies}+{cell.label}" if cell is not None and plus and cell.name.word is None else name_of(cell),
        "draft": None if cell is None else cell.draft,
        "schedule": None if cell is None else cell.drafting.options,
        "requests": len(requests(samples)),
        "samples": len(samples),
        "new_tokens": tokens,
        "ms_per_token": 1e3 * per_token(samples),
        "tokens_per_second": 1 / per_token(samples),
        "speedup": None if faster is None else {**faster._asdict(), "state": faster.state, "words": faster.in_words()},
        "categories": {name: ratio.value for name, ratio in ratios.items() if cell is not None and ratio is not None},
        "token_ms": percentiles([1e3 * gap for s in samples for gap in s.gaps]),
        "request_ms": percentiles([1e3 * s.seconds for s in samples]),
        "first_token_ms": percentiles([1e3 * s.first_token for s in samples]),
        "mean_acceptance_length": stats.mean_acceptance_length if stats.num_draft_rounds else None,
        "acceptance_length_by_repeat": [  # 1 where nothing was drafted
            _total([s for s in samples if s.repeat == repeat]).mean_acceptance_length
            for repeat in sorted({s.repeat for s in samples})
        ],
        "draft_acceptance_rate": stats.draft_acceptance_rate if stats.num_draft_tokens else None,
        "target_passes_per_token": stats.num_target_passes / tokens,
        "split_ms_per_token": _split(samples, stats),
        "memory_mib": round(max(memory) / _MIB, 1) if memory else None,
        "exactness": stats.exactness,
        "backend": stats.settings["backend"],
        "draft_backend": stats.settings.get("draft_backend"),
        **_sameness(store, group, samples),
    }


def backends(system: Results) -> str:
    """The backends of a system's target and draft, in words."""
    backend, draft = system["backend"], system["draft_backend"]
    return backend if draft is None else f"both {backend}" if draft == backend else f"{backend}, draft {draft}"


def _total(samples: Sequence[Sample]) -> Stats:
    return total([s.stats for s in samples])


def _split(samples: Sequence[Sample], stats: Stats) -> dict[str, float]:
    """Milliseconds per new token by part, over all calls; overhead is all except the other three."""
    seconds = {name: getattr(stats, f"{name}_seconds") for name in ("draft", "verify", "select")}
    seconds["overhead"] = sum(sample.seconds for sample in samples) - sum(seconds.values())
    return {name: 1e3 * value / sum(sample.count for sample in samples) for name, value in seconds.items()}


def _sameness(store: Store, group: Group, samples: Sequence[Sample]) -> Results:
    """How many texts equal plain decoding's; zeros where they may differ."""
    is_compared = samples[0].system != PLAIN and group.strategy.comparable
    compared = sum(len(s.tokens) for s in samples) if is_compared else 0
    keys = {s.key for s in samples}
    excuses = [_excuse(store, m) for m in store.mismatches if m.key in keys]
    return {"compared": compared, "identical": compared - len(excuses), "forgiven": len(excuses) - excuses.count(None)}


def _excuse(store: Store, mismatch: Mismatch) -> str | None:
    """Why a text may differ: a row-dependent target, or a near-tie of its two best logits."""
    exactness, near_tie = store.samples[mismatch.key].stats.exactness, store.suite.near_tie
    if exactness == "row-dependent":
        return exactness
    return "near-tie" if mismatch.gap is not None and mismatch.gap <= near_tie and near_tie > 0 else None


def summary(content: Results) -> list[str]:
    """The outcome in sentences."""
    cells = [(g, s) for g in content["groups"] for s in g["systems"] if s["speedup"]]
    sentences = _speed(cells)
    compared, identical = (sum(s[name] for _, s in cells) for name in ("compared", "identical"))
    if compared:
        excuses = [m["excuse"] for m in content["mismatches"]]
        ties, rows, wrong = (excuses.count(excuse) for excuse in ("near-tie", "row-dependent", None))
        texts, verb = _counted(compared, "assisted text"), "is" if identical == 1 else "are"
        words = [
            f"{identical} of {texts} {verb} identical to plain decoding's",
            *([f"{ties} part at near-ties, which the suite forgives"] if ties else []),
            *([f"{rows} part where the target is row-dependent, so that a draft can change its text"] if rows else []),
            *([f"{wrong} DIFFER"] if wrong else []),
        ]
        sentences.append(f"{'; '.join(words)}.")
    if any(not group["comparable"] for group in content["groups"]):
        sentences.append(
            "Texts of rejection and block sampling follow the target's distribution alone: they are not compared."
        )
    for group, system in cells:
        by_repeat = system["acceptance_length_by_repeat"]
        if by_repeat[-1] > _LEARNED * by_repeat[0]:
            lengths = ", ".join(f"{length:.2f}" for length in by_repeat)
            sentences.append(
                f"{system['name']} ({group['label']}): acceptance length {lengths} by repeat. The draft remembers the "
                "answers: measure it with `repeats: 1` and `warm_up: 0`."
            )
    if content["failures"]:
        sentences.append(f"{_counted(len(content['failures']), 'setting')} could not be measured.")
    return sentences


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


_STATES = {
    "faster": "faster than plain decoding",
    "slower": "SLOWER",
    "same": "without a clear difference",
    "unknown": "of one request, without an interval",
}


def _speed(cells: Sequence[tuple[Results, Results]]) -> list[str]:
    """How many systems are faster, the best of them, and the median."""
    if len(cells) < 2:
        return list(starmap(_outcome, cells))
    states = [s["speedup"]["state"] for _, s in cells]
    counts = ", ".join(f"{states.count(state)} {words}" for state, words in _STATES.items() if state in states)
    faster = [pair for pair in cells if pair[1]["speedup"]["state"] == "faster"]
    none = "None is clearly faster than plain decoding."
    if {*states} == {"unknown"}:
        none = "One request does not say which is faster: give more prompts."
    return [
        f"{_counted(len(cells), 'assisted setting')}: {counts}.",
        f"Best: {_outcome(*max(faster, key=lambda pair: float(pair[1]['speedup']['value'])))}" if faster else none,
        f"Median speedup: {median(s['speedup']['value'] for _, s in cells):.2f}×.",
    ]


def _outcome(group: Results, system: Results) -> str:
    return f"{system['name']} ({group['label']}), {system['speedup']['words']}."


class Speedup(NamedTuple):
    """Plain decoding's seconds per token over another system's, with the 95% interval of several requests."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def state(self) -> str:
        """`faster`, `slower` or `same`: on which side of 1 the interval lies; `unknown` without an interval."""
        if self.low is None or self.high is None:
            return "unknown"
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "same"

    def in_words(self) -> str:
        if self.state == "unknown":
            return f"{self.value:.2f}× plain decoding's speed (one request, no interval)"
        interval = f" (95% interval {self.low:.2f} to {self.high:.2f})"
        return {
            "faster": f"{self.value:.2f}× faster than plain decoding{interval}",
            "slower": f"assistance is SLOWER here: {self.value:.2f}× plain decoding's speed{interval}",
            "same": f"no clear difference from plain decoding: {self.value:.2f}×{interval}",
        }[self.state]


def requests(samples: Sequence[Sample]) -> dict[int, tuple[float, float]]:
    """The requests of one system by batch: median seconds and new tokens over its repetitions."""
    by_batch: dict[int, list[Sample]] = {}
    for sample in samples:
        by_batch.setdefault(sample.batch, []).append(sample)
    return {batch: (median(s.seconds for s in some), median(s.count for s in some)) for batch, some in by_batch.items()}


def per_token(samples: Sequence[Sample]) -> float:
    """Seconds per new token over all requests; infinite without any."""
    timings = requests(samples).values()
    tokens = sum(tokens for _, tokens in timings)
    return sum(seconds for seconds, _ in timings) / tokens if tokens else float("inf")


def speedup(plain: Sequence[Sample], assisted: Sequence[Sample]) -> Speedup | None:
    """The speedup of `assisted` on the requests that both systems have; None if they share none.

    The interval is a percentile bootstrap over requests (Efron and Tibshirani 1993, chapter 13), paired and seeded.
    """
    first, second = requests(plain), requests(assisted)
    pairs = [(*first[batch], *second[batch]) for batch in sorted(first.keys() & second.keys())]
    if not pairs:
        return None
    columns = np.array(pairs, dtype=float).T
    value = float(_ratio(*columns))
    if len(pairs) < 2:
        return Speedup(value)
    picks = np.random.default_rng(0).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    low, high = np.percentile(_ratio(*columns[:, picks]), [50 - 50 * CONFIDENCE, 50 + 50 * CONFIDENCE])
    return Speedup(value, float(low), float(high))


def _ratio(seconds: np.ndarray, tokens: np.ndarray, other_seconds: np.ndarray, other_tokens: np.ndarray) -> np.ndarray:
    """Seconds per token of the first system over the second's `[...]`, from their requests `[..., requests]`."""
    plain = seconds.sum(-1) / tokens.sum(-1)
    result: np.ndarray = plain / (other_seconds.sum(-1) / other_tokens.sum(-1))
    return result


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90 and p99, interpolated; None without values."""
    if not values:
        return None
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}
