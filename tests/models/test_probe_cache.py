"""How models run: what tiny models show of their families is remembered; others are found out by trying."""

import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from specdec.models import LanguageModel, capability, probe
from specdec.models.hf import probe_cache
from specdec.models.hf.tiny_models import SIZES
from tests.tiny import DECODERS, ENCODER_DECODERS, never, tiny

passes = Mock(return_value=True)  # a trial


@pytest.fixture(autouse=True)
def folder(fresh_verdicts: Path) -> Path:
    """An empty memory: nothing was tried in this process, and the folder does not exist yet."""
    return fresh_verdicts


def remembered(folder: Path) -> list[str]:
    """What the folder says."""
    return sorted(file.read_text() for file in folder.glob("*"))


def test_every_family_with_a_tiny_model_is_tested() -> None:
    """So is every family whose state cannot be cut back."""
    assert {*SIZES, *capability.REPLAY} <= {model_type for model_type, _ in (DECODERS | ENCODER_DECODERS).values()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("cache", "names"),
    [
        ("kv", ("llama", "gemma2", "mistral", "llama4_text", "whisper", "bart", "t5", "bloom")),
        ("replay", ("gpt_neo", "mpt", "falcon_alibi", "mamba2")),
    ],
)
def test_probe_finds_what_tiny_models_show(cache: str, names: tuple[str, ...]) -> None:
    """Models that count cache columns or keep a recurrent state get the library's own cache."""
    for language in (LanguageModel(tiny(name)) for name in names):
        found, known = probe.probe(language), language.capability
        assert (found.cache_kind, found.positions, found.masks) == (cache, known.positions, known.masks), language


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "t5", "whisper"])
def test_known_families_hold(name: str, folder: Path) -> None:
    """A family is tried once, silently, and torch's random numbers go on as if it were not."""
    model = tiny(name)
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = LanguageModel(model).capability
    assert found == LanguageModel(model).capability
    assert torch.equal(torch.get_rng_state(), before)
    assert len(remembered(folder)) == 1


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_where_tiny_models_do_not_run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is built, or it runs otherwise: the model itself is probed, and the next process tries again."""
    right = LanguageModel(tiny(name)).capability
    monkeypatch.setattr(probe_cache, "_results", {})
    shutil.rmtree(folder)
    monkeypatch.setattr(probe, "tiny_model", lambda *_, **__: {}["no such option"])
    found = LanguageModel(tiny(name)).capability
    assert (found.cache_kind, found.positions) == (right.cache_kind, right.positions)
    assert not remembered(folder)


def test_huge_and_offloaded_models_are_not_run(folder: Path) -> None:
    """The user's own weights are not touched, so they may as well be elsewhere."""
    assert LanguageModel(tiny("llama").to("meta")).capability.cache_kind == "kv"
    assert remembered(folder)
    assert LanguageModel(tiny("xglm").to("meta")).capability.cache_kind == "replay"  # unknown, and not probed


def test_attention_and_options_are_tried_apart(folder: Path) -> None:
    """Eager attention takes masks another way, and Falcon's two kinds of positions have nothing in common."""
    for name in ("llama", "falcon", "falcon_alibi"):
        LanguageModel(tiny(name))
    LanguageModel(tiny("llama", attn_implementation="eager"))
    assert remembered(folder) == [
        "FalconForCausalLM falcon sdpa ids",
        "LlamaForCausalLM llama eager ids",
        "LlamaForCausalLM llama sdpa ids",
    ]


def test_autocast_changes_no_verdict() -> None:
    """A model that is wrapped where everything is rounded is no reason to distrust its family."""
    with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16):
        warnings.simplefilter("error")
        assert LanguageModel(tiny("llama")).capability.cache_kind == "kv"


def test_remembered_in_the_process() -> None:
    """A trial runs once, whatever came of it; one that could not be run passes."""
    for verdict, expected in ((True, True), (False, False), (None, True)):
        trial = Mock(return_value=verdict)
        for _ in range(3):
            assert probe_cache.holds(f"this {verdict}", trial) is expected
        trial.assert_called_once()


def test_remembered_on_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process believes the folder where the releases are the same, and adds to it otherwise."""
    probe_cache.holds("this", passes)
    monkeypatch.setattr(probe_cache, "_results", {})
    assert probe_cache.holds("this", never) is True
    monkeypatch.setattr(probe_cache, "_results", {})
    monkeypatch.setattr(torch, "__version__", "99.0")
    trial = Mock(return_value=True)
    assert probe_cache.holds("this", trial) is True
    trial.assert_called_once()
    assert remembered(folder) == ["this", "this"]


def test_a_failing_trial_is_not_remembered() -> None:
    """What a trial raises reaches the caller, and the next call tries again."""
    with pytest.raises(KeyboardInterrupt):
        probe_cache.holds("this", Mock(side_effect=KeyboardInterrupt))
    assert probe_cache.holds("this", passes)


def test_where_the_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, homeless: None
) -> None:
    """In the user's cache, unless the environment names another place.

    In a folder that is a file or no home at all, the trial decides, and one line says what that costs, and how to mend
    it. (Nothing was said.)
    """
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_PROBES", str(tmp_path / "file"))
    assert probe_cache.holds("this", passes)
    assert probe_cache.holds("that", passes)
    [line] = caplog.messages
    assert line.startswith("results of trials are not kept, so every load takes longer: ")
    assert line.endswith("change that, or name another folder in SPECDEC_PROBES")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    monkeypatch.delenv("SPECDEC_PROBES")
    assert probe_cache.holds("these", passes)  # no home
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert probe_cache.holds("it", passes)
    assert remembered(tmp_path / "specdec" / "probes") == ["it"]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert probe_cache.holds("those", passes)
    assert remembered(tmp_path / "home" / ".cache" / "specdec" / "probes") == ["those"]


def test_threads_try_once(folder: Path) -> None:
    """Several threads that ask at once wait for one trial."""
    trial = Mock(return_value=True)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: probe_cache.holds("this", trial), range(8)))
    trial.assert_called_once()
    assert remembered(folder) == ["this"]
