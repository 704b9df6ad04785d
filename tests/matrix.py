"""Options that many tests share: calls that only their length ends, and one call of each strategy."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def endless(max_new_tokens: int, /, **more: Any) -> dict[str, Any]:
    """Options of a call that no token ends, so that its texts are as long as they may be."""
    return {"max_new_tokens": max_new_tokens, "eos_token_id": [], "pad_token_id": 0, **more}


STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"do_sample": True, "seed": 3},
    "rejection": {"do_sample": True, "seed": 4, "sampling": "rejection"},
    "block": {"do_sample": True, "seed": 4, "sampling": "block"},
    "copies": {"do_sample": True, "seed": 5, "num_return_sequences": 2, "temperature": 0.7},
    "ranked": {"do_sample": True, "seed": 6, "num_samples": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 2, "do_sample": True, "seed": 8},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constrained": {"num_beams": 3, "force_words_ids": [[20, 21]]},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
    "guided": {"guidance_scale": 1.8},
}
"""One call of each strategy, over vocabularies of 22 tokens and more."""


def pairwise(**parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases of one value of each parameter, few of them, in which any two values of two parameters come together."""

    def pairs(case: tuple[int, ...]) -> set[Any]:
        return set(combinations(enumerate(case), 2))

    every = [*product(*(range(len(values)) for values in parameters.values()))]
    left, cases = set[Any]().union(*map(pairs, every)), []
    while left:
        cases.append(max(every, key=lambda case: len(pairs(case) & left)))
        left -= pairs(cases[-1])
    return [tuple(values[i] for values, i in zip(parameters.values(), case, strict=True)) for case in cases]


def in_pairs(**parameters: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by `pairwise`."""
    return pytest.mark.parametrize(tuple(parameters), pairwise(**parameters))


def slow(*case: Any) -> Any:
    """A case that CI runs, and not everybody."""
    return pytest.param(*case, marks=pytest.mark.slow)


def with_kinds(names: Sequence[str], usual: Sequence[str], kinds: Sequence[Any]) -> list[Any]:
    """Cases of a name and kinds of drafts: all of them for usual names, half right for others but in CI."""
    cases: list[Any] = [(name, kinds) for name in names if name in usual]
    for name in (name for name in names if name not in usual):
        cases += [(name, ["half"]), slow(name, kinds)]
    return cases


def in_turn(**parameters: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by all cases, of which every other one runs in CI alone."""
    cases = product(*(enumerate(values) for values in parameters.values()))
    turns = [(sum(i for i, _ in case) % 2, [value for _, value in case]) for case in cases]
    return pytest.mark.parametrize(tuple(parameters), [slow(*case) if odd else tuple(case) for odd, case in turns])


def some(*names: str) -> dict[str, dict[str, Any]]:
    """These of the strategies."""
    return {name: STRATEGIES[name] for name in names}
