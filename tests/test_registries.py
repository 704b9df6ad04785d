"""One file and one line: names come from the registries, and kinds are found by what they say about themselves."""

from pathlib import Path
from typing import Any

import pytest

from specdec import SpecGenerator
from specdec.cli import flags
from specdec.core import draft_schedules
from specdec.core.budget import Budget
from specdec.core.draft_schedules import Auto, Confidence, Constant, Cost, Heuristic, make_schedule, schedule_kind
from specdec.core.draft_schedules.pause import Pause
from specdec.decoding.processors import Processors
from specdec.decoding.stopping import Stopping
from specdec.decoding.strategies import STRATEGIES, StrategySetup
from specdec.generator.build_request import ScheduledDraft
from specdec.models import LanguageModel
from specdec.models.loading.load import make_quantizer
from specdec.models.loading.quantizers import BitsAndBytes
from specdec.options.drafts import SPELLINGS, WORDS
from specdec.options.fields import DRAFT_WORDS, SAMPLING
from specdec.options.load import QUANTIZATIONS
from specdec.options.resolve import resolve
from specdec.proposers import DRAFTS
from specdec.proposers.copying import TextDraft
from tests.matrix import STRATEGIES as COMMON
from tests.matrix import some
from tests.proposers.heads.test_mtp import with_layers
from tests.tiny import tiny

ROOT = Path(__file__).parent.parent

CASES: dict[str, dict[str, Any]] = {
    **some("greedy", "coupled", "contrastive"),
    **{name: {"do_sample": True, "sampling": name} for name in SAMPLING},
    **{f"{kind}search": COMMON[name] for kind, name in (("beam", "beams"), ("group", "groups"))},
    "constrainedsearch": COMMON["constrained"],
}


@pytest.mark.parametrize("name", CASES)
def test_options_choose_a_strategy(name: str) -> None:
    options = resolve(CASES[name])
    how = {"processors": Processors(), "stop": Stopping(max_length=9)}
    setup = StrategySetup(options=options, **how, prompt=[0, 0, 1, 2], padding=2)
    strategy = next(kind for kind in STRATEGIES if kind.serves(options)).of(setup)
    assert strategy.name == name
    assert strategy.is_search == ("search" in name or name == "contrastive")
    takes_draft = name != "contrastive"
    assert (strategy.sampler is not None) == takes_draft
    assert not takes_draft or strategy.sampler.needs_q == options.needs_q == SAMPLING.get(name, False)
    if strategy.is_search and takes_draft:
        assert strategy.max_new_tokens == 7


def test_every_strategy_has_its_options() -> None:
    assert {strategy.name for strategy in STRATEGIES} == {*CASES}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Auto),
        ({"schedule": "heuristic"}, Heuristic(5)),
        ({"schedule": "heuristic", "num_assistant_tokens": 3, "num_assistant_branches": 2}, Heuristic(3, 0.0, 2)),
        ({"schedule": "constant", "num_assistant_branches": 512}, Constant(2, 0.0, 512)),
        ({"schedule": "confidence"}, Confidence(20, 0.4)),
        ({"schedule": "confidence", "assistant_confidence_threshold": 0.0}, Confidence(20, 0.0)),
        ({"schedule": Constant(7)}, Constant(7)),
        # a threshold alone names the schedule that heeds it
        ({"assistant_confidence_threshold": 0.3}, Heuristic(5, 0.3)),
        # where the text depends on the rounds, a seed gives one that depends on no clock
        ({"do_sample": True, "sampling": "rejection"}, Auto),
        ({"do_sample": True, "sampling": "rejection", "seed": 3}, Heuristic(5)),
        ({"do_sample": True, "sampling": "block", "seed": 3}, Heuristic(5)),
        ({"do_sample": True, "sampling": "coupled", "seed": 3}, Auto),
    ],
)
def test_options_make_a_schedule(given: dict[str, Any], expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name with its usual numbers, by numbers, or the caller's own."""
    monkeypatch.setattr(draft_schedules, "DEFAULT", "auto")
    made = make_schedule(resolve(given))
    assert (type(made) if expected is Auto else made) == expected


def test_prompt_lookup_drafts_as_much_as_it_says() -> None:
    """By transformers' name, unless a schedule or a number was asked for."""
    assert make_schedule(resolve({}), lookup_tokens=8) == Constant(8)
    assert make_schedule(resolve({"num_assistant_tokens": 2}), lookup_tokens=8) == Heuristic(2)
    assert isinstance(make_schedule(resolve({"schedule": "cost"}), lookup_tokens=8), Cost)


@pytest.mark.parametrize(
    ("given", "trees", "most"),
    [
        ({}, True, 32), ({}, False, 1), ({"num_beams": 2}, True, 1),
        ({"do_sample": True, "sampling": "block"}, True, 1), ({"num_assistant_branches": 3}, False, 3),
        ({"num_assistant_tokens": 512}, True, 2),
    ],
)  # fmt: skip
def test_where_the_cost_rule_may_take_trees(given: dict[str, Any], trees: bool, most: int) -> None:
    """Not of beams, not where they are drawn node by node, not where the target cannot verify them in one pass."""
    schedule = make_schedule(resolve({"schedule": "cost", **given}), trees=trees)
    assert schedule.max_branches == most


def test_the_cost_rule_goes_on_from_what_it_learned() -> None:
    """The next request of its family gets it; other schedules have nothing to hand on."""
    options = resolve({"schedule": "cost"})
    learned = Cost(pause=Pause(suspension=99))
    assert schedule_kind(options).learns
    assert make_schedule(options, learned=learned, offloaded=True).pause.suspension == 99
    assert make_schedule(options, learned=Constant(3)).pause.suspension != 99
    assert not schedule_kind(resolve({})).learns
    assert schedule_kind(resolve({"schedule": Cost()})) is None


def test_calls_in_flight_keep_their_kind_of_schedule() -> None:
    """One with `auto` beside one with `cost` learns with it later, but does not take its schedule."""
    scheduled = ScheduledDraft(LanguageModel(tiny("llama")), None)
    first = scheduled.pacing(resolve({"schedule": "cost"}))
    first.users.add(object())  # type: ignore[arg-type]
    second = scheduled.pacing(resolve({"schedule": "auto"}))
    assert (type(first.schedule), type(second.schedule)) == (Cost, Auto)


def test_a_threshold_alone_needs_confidence() -> None:
    """Drafts may leave out the sum over the vocabulary where nobody asks."""
    assert [Budget.sure(5).needs_confidence, Budget.sure(5, 0.1).needs_confidence] == [False, True]
    assert Cost().budgets([0])[0].needs_confidence  # type: ignore[list-item]


def test_words_for_drafts_are_those_of_the_classes() -> None:
    """The table that is read without torch says of each class what the class says of itself."""
    for word, known in DRAFT_WORDS.items():
        assert known.copies == issubclass(DRAFTS[word], TextDraft)
        assert known.copies <= DRAFTS[word].reads_predictions
        assert not known.takes("" if known.argument else "3")


@pytest.mark.parametrize("word", WORDS)
def test_every_word_for_a_draft_is_known_everywhere(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = word.replace(":N", ":1")
    assert word in SPELLINGS
    target = with_layers(monkeypatch, "mellum", 1) if word == "mtp" else tiny("llama")
    assert SpecGenerator(target, name).draft is not None


def test_every_quantization_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name; help and documents tell of it."""
    monkeypatch.setattr("specdec.models.loading.load.find_spec", lambda name: name)
    made = {name: make_quantizer(name) for name in QUANTIZATIONS}
    assert {name for name, one in made.items() if isinstance(one, BitsAndBytes)} == {"int8", "nf4", "fp4"}
    for name, one in made.items():
        assert (one.name, one.converts) == (name, name.endswith("-weight"))
        assert one.converts or not QUANTIZATIONS[name].offloads
        assert name in flags.SHARED["quantization"].default.help
        assert f'"{name}"' in (ROOT / "docs/guides/quantization.md").read_text(encoding="utf-8")
    assert not make_quantizer(None).converts
