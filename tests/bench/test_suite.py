"""What a benchmark's configuration means, and what is wrong with others."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.bench.suite import read_suite
from specdec.errors import OptionError
from specdec.options.resolve import read_yaml

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs" / "bench").glob("*.yaml"))


def test_the_matrix() -> None:
    """Every side multiplies the groups or their cells; a length list is one cell each; 0 is greedy."""
    suite = read_suite(
        {
            "targets": ["a", {"target": "b", "drafts": ["c", "suffix"]}],
            "drafts": ["ngram"],
            "modes": [{"dtype": "float32"}, {"name": "small", "quantization": "int8"}],
            "temperatures": [0, 0.5],
            "schedules": ["cost", {"schedule": "constant", "num_assistant_tokens": [2, 4]}],
            "prompts": ["code", {"source": "x/y.jsonl", "count": 3}],
            "batches": [1, 4],
        }
    )
    groups = suite.groups()
    assert len(groups) == 2 * 2 * 2 * 2 * 2
    assert len({group.label for group in groups}) == len(groups)
    assert groups[0].label == "a · float32 · greedy, temperature 0 · code · batch 1"
    assert groups[-1].label == "b · small · sampling, temperature 0.5 · y · batch 4"
    assert [cell.label for cell in groups[0].cells] == ["ngram, cost", "ngram, constant 2", "ngram, constant 4"]
    assert [cell.draft for cell in groups[-1].cells] == ["c"] * 3 + ["suffix"] * 3
    assert suite.call(groups[0].strategy)["do_sample"] is False
    drawn = suite.call(groups[-1].strategy, groups[-1].cells[1])
    assert (drawn["temperature"], drawn["schedule"], drawn["num_assistant_tokens"]) == (0.5, "constant", 2)
    assert groups[-1].mode.loading == {"quantization": "int8"}


def test_none_is_plain_decoding(tmp_path: Path) -> None:
    """Among drafts, and in a strategy's file, which may name no other draft."""
    (group,) = read_suite({"targets": "t", "drafts": ["none"]}).groups()
    assert not group.cells
    (group,) = read_suite({"targets": "t", "strategies": [{"draft": "none", "num_beams": 2}]}).groups()
    assert not group.cells
    with pytest.raises(OptionError, match="`draft` must be 'none' in strategy"):
        read_suite({"targets": "t", "strategies": [{"draft": "suffix", "num_beams": 2}]})


@pytest.mark.parametrize(("target", "draft"), [("zoo:python-code", "zoo:python-code"), ("some/model", "suffix")])
def test_a_target_alone_is_enough(target: str, draft: str) -> None:
    """The package's pair is its own draft."""
    (group,) = read_suite({"targets": target}).groups()
    assert [cell.label for cell in group.cells] == [f"{draft}, auto"]


def test_strategies() -> None:
    """Presets, files and mappings; what is compared, what has a draft."""
    files = [
        str(ROOT / "configs" / "strategies" / f"{name}.yaml") for name in ("sample-and-rank", "contrastive-search")
    ]
    law = {"name": "law", "do_sample": True, "sampling": "block"}
    entries = ["greedy", *files, {"num_beams": 3}, law]
    groups = read_suite({"targets": "t", "strategies": entries, "max_new_tokens": 8}).groups()
    names = ["greedy", "sample-and-rank", "contrastive-search", "num_beams 3", "law"]
    assert [g.strategy.label for g in groups] == names
    assert [len(g.cells) for g in groups] == [1, 1, 0, 1, 1]
    assert [g.strategy.comparable for g in groups] == [True, True, True, True, False]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "needs `targets`"),
        ({"targets": []}, "`targets`"),
        ({"targets": "t", "typo": 1}, "`typo` is not a key"),
        (
            {"targets": "t", "modes": [{"dtyp": "float32"}]},
            "`modes.0`: `dtyp` is no option of loading: pass one of dtype,",
        ),
        ({"targets": "t", "modes": [{"quantization": "int7"}]}, "`modes.0`: `quantization` must be"),
        ({"targets": "t", "modes": [{"dtype": "float12"}]}, "`modes.0`: `dtype` must be"),
        ({"targets": "t", "modes": [{"draft_options": {"nope": 1}}]}, "`modes.0`: `draft_options` must be"),
        ({"targets": "t", "repeats": 0}, "`repeats` must be"),
        ({"targets": "t", "prompts": [{"source": "code", "count": 0}]}, "`prompts.0.count`"),
        ({"targets": "t", "schedules": ["fast"]}, "`schedule`"),
        ({"targets": "t", "strategies": [{"name": "x", "top_pp": 1}]}, "`top_pp`"),
        ({"targets": "t", "strategies": [{"temperature": 1, "do_sample": True}], "temperatures": [0]}, "temperatures"),
        (
            {"targets": "t", "strategies": "calm"},
            "`strategies` must be greedy, sample or a YAML file of options, got .c",
        ),
        ({"targets": ["t", "t"]}, "twice"),
        ({"targets": "t", "schedules": ["cost", "cost"]}, "twice"),
        ({"targets": "t", "options": {"ranking": "sum"}}, "ranking"),
    ],
)
def test_what_is_wrong_is_named(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        read_suite(keys)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_packages_suites(path: Path) -> None:
    """Each says what it is for, and is understood; there are a quick one, and those that flags cannot say."""
    assert {path.stem for path in CONFIGS} >= {"quick", "strategies", "int8", "offload"}
    assert path.read_text().startswith("#")
    assert read_suite(read_yaml(path)).groups()


def test_the_guide_has_an_example() -> None:
    guide = (ROOT / "docs" / "guides" / "measuring.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(targets:.*?)```", guide, re.S)
    assert len(read_suite(yaml.safe_load(example)).groups()) == 2 * 3 * 4 * 2
