"""The recipes: what they train on is what they say, and a step of each runs."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from recipes import RECIPES, functions, main, phrases, python_code, python_summary, shapes, speech, synthesis, windows

SOURCE = '''
# Not about anything.
VALUE = 1


def add(a,
        b=(1, 2)):  # a comment: with a colon
    """Return the sum
    of both.  Never fails.

    More.
    """
    return a + b


class Shape:
    """A shape, e.g. a circle."""

    # Tell how large the shape is.
    def area(self) -> float:
        return 1.0

    def nothing(self): return None

    def only_a_docstring(self):
        """Do nothing at all."""
'''


def test_examples_of_a_module() -> None:
    """The docstring leaves the source; the signature is one line; a comment above may tell what a function does."""
    found = {e.signature: e for e in functions.examples(SOURCE, functions._DEFINITIONS)}
    add = found["def add(a, b=(1, 2)):"]
    assert add.sentence == "Return the sum of both."
    assert add.source == "def add(a,\n        b=(1, 2)):  # a comment: with a colon\n    return a + b\n"
    assert add.summary == "def add(a, b=(1, 2)):\nReturn the sum of both."
    assert found["class Shape:"].sentence == "A shape, e.g. a circle."
    assert found["def area(self) -> float:"].sentence == "Tell how large the shape is."
    assert found["def area(self) -> float:"].source == "def area(self) -> float:\n    return 1.0\n"
    assert found["def nothing(self):"].sentence is None
    assert len(found) == 4
    assert list(functions.examples("def broken(:", functions._DEFINITIONS)) == []


def module(*names: str) -> str:
    """Functions that differ in their names alone."""
    return "\n\n".join(f'def {name}(x):\n    """Return the same."""\n    return x\n' for name in names)


def test_the_summary_recipe_reads_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No function that is held out, though a package has a copy, and no sentence of the packages more than thrice."""
    modules = {False: module("learned"), True: module("held")}
    monkeypatch.setattr(functions, "source_files", lambda *, held_out: [("module.py", modules[held_out])])
    monkeypatch.setattr(functions.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr(functions, "PACKAGES", ("a_package", "no_package"))
    for path, text in {
        "test/test_one.py": module("tested"),
        "a_package/__init__.py": module("held", "one", "two", "three", "four"),
    }.items():
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    material = python_summary.Material.prepare()
    read = [
        material.tokenizer.batch_decode([source for source, _ in rows])
        for rows in (material.library, material.installed, material.held_out)
    ]
    assert read == [
        [f"def {name}(x):\n    return x\n" for name in names]
        for names in (["learned", "tested"], ["one", "two"], ["held"])
    ]


def test_what_is_held_out() -> None:
    """No such sentence is trained on, nor is the accent or the variant of the voice."""
    training = list(phrases.sentences(500, held_out=False))
    assert len({*training, *phrases.sentences(100, held_out=True)}) == 600
    assert training == list(phrases.sentences(500, held_out=False))
    accent, variant = synthesis.HELD_OUT_VOICE.split("+")
    voices = {line.voice for line in synthesis.read_by_many(["Hello."] * 300, seed=0)}
    assert len(voices) > 50
    assert not any(accent in voice or voice.endswith(f"+{variant}") for voice in voices)


@pytest.fixture(scope="module")
def material() -> speech.Material:
    """Clips of 1.2 seconds each that hold noise for speech."""
    processor = speech.make_processor()
    random = np.random.default_rng(0)
    texts = list(phrases.sentences(20, held_out=False))
    bounds = [(120 * i, 120 * (i + 1)) for i in range(20)]
    clips = synthesis.Clips(random.uniform(-5, 0, (2400, 80)).astype(np.float16), bounds, texts)
    noise = synthesis.noise_power(processor.feature_extractor, seconds=12)
    return speech.Material(processor, clips, clips, clips, noise)


def test_labels_of_windows(material: speech.Material) -> None:
    """Labels follow their inputs; timestamps never go back; only a sentence that is cut ends without its words."""
    tokenizer = material.processor.tokenizer
    zero = tokenizer.convert_tokens_to_ids("<|0.00|>")
    composer = material.windows(material.clips, speech.SHORT, seed=1)
    timed = cut = 0
    for _ in range(60):
        features, segments = composer.window()
        assert features.shape == (80, 300)
        ids, labels = composer.transcript(segments)
        begin = ids.index(tokenizer.convert_tokens_to_ids("<|startoftranscript|>"))
        pairs = zip(labels[begin + 1 : -1], ids[begin + 2 :], strict=True)
        assert all(asked in (windows.IGNORED, given) for asked, given in pairs)
        assert set(labels[:begin]) <= {windows.IGNORED}
        times = [i for i in ids if i >= zero]
        edges = [edge for s in segments for edge in ((s.begin, s.end) if s.whole else (s.begin,))]
        assert times in ([], [zero + edge // 2 for edge in edges])
        timed += bool(times)
        cut += any(not s.whole for s in segments)
        text = tokenizer.decode([i for i in ids if i < tokenizer.eos_token_id])
        assert text.endswith("".join(f" {s.text}" for s in segments if s.whole))
    assert timed > 10
    assert cut > 5


@pytest.mark.parametrize(
    ("size", "width"), [("base", 192), ("small", 320), ("large", 1024), ("1M", 64), ("300M", 1024), ("31800000", 320)]
)
def test_sizes_of_the_code_pair(size: str, width: int) -> None:
    """A name, or the width that comes nearest to a number of weights."""
    assert shapes.target_shape(size) == shapes.Shape(24, width)


@pytest.mark.parametrize("size", ["huge", "", "3T", "-1M", "0", "100k", "40B"])
def test_an_unknown_size(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The message says which there are. (0 weights made a model of 1.5 M, and 40 billion one of 4.8.)"""
    with pytest.raises(SystemExit):
        python_code.main(["out", f"--size={size}"])
    assert "--size must be one of base, small, medium, large or a number like 300M" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", [python_code, python_summary, speech])
def test_a_stage_before_its_time(recipe: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says which model is missing. (The folder was taken for a hub id, and asked for over the network.)"""
    for stage, role in (("draft", "target"), ("evaluate", "draft")):
        with pytest.raises(SystemExit):
            recipe.main([str(tmp_path), "--stage", stage])
        assert f"--stage {stage} needs a model in {tmp_path / role}" in capsys.readouterr().err
        (tmp_path / role).mkdir()
        (tmp_path / role / "config.json").write_text("{}")


@pytest.mark.slow
def test_a_pair_of_another_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of every stage."""
    modules = [(f"module{n}.py", f"def f{n}(x):\n    return x + {n}\n\n" * 300) for n in range(6)]
    monkeypatch.setattr(python_code, "source_files", lambda *, held_out: iter(modules[:2] if held_out else modules[2:]))
    monkeypatch.setattr(python_code, "held_out_prompts", lambda count: ["def f0(x):\n"])
    monkeypatch.setattr(python_code, "continuations", lambda target, stream, *_: stream)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(shapes, "TARGET_LAYERS", 6)
    monkeypatch.setattr(python_code, "SEEDLING_LAYERS", 2)
    monkeypatch.setattr(python_code, "DRAFT_LAYERS", (0, 5))
    monkeypatch.setattr(python_code, "LONG", 512)
    steps = {"seedling": 1, "target": 1, "draft": 2, "polish": 2}
    stages = [*(f"--{stage}-steps={count}" for stage, count in steps.items()), "--device=cpu"]
    for stage in ("target", "draft", "polish", "evaluate"):
        python_code.main([str(tmp_path), "--size", "1M", "--stage", stage, *stages])
    assert (tmp_path / "card.json").exists()
    target, draft = (AutoConfig.from_pretrained(tmp_path / role) for role in ("target", "draft"))
    assert (target.num_hidden_layers, draft.num_hidden_layers) == (6, 2)
    assert target.hidden_size == draft.hidden_size == 64


@pytest.mark.slow
def test_a_step_of_the_speech_recipe(
    material: speech.Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seedling, target and draft are trained and saved; the draft keeps the target's encoder."""
    monkeypatch.setattr(speech, "WINDOW", 4)
    for name, layers, seconds in (("SEEDLING", 2, speech.SHORT), ("TARGET", 4, 4), ("DRAFT", 1, 4)):
        monkeypatch.setattr(speech, name, speech.Shape(layers, seconds, encoder_layers=1))
    speech.train_target(tmp_path, material, seedling_steps=1, steps=1)
    speech.polish_target(tmp_path, material, steps=1)
    speech.train_draft(tmp_path, material, steps=1)
    load = speech.WhisperForConditionalGeneration.from_pretrained
    theirs, own = (load(tmp_path / role).model.encoder.state_dict() for role in ("target", "draft"))
    assert all(torch.equal(weight, theirs[name]) for name, weight in own.items())


@pytest.mark.slow
def test_a_step_of_the_summary_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seedling, target and draft are trained and saved, and a summary can be written."""
    monkeypatch.setattr(python_summary, "SEEDLING", python_summary.Shape(4, 1))
    monkeypatch.setattr(python_summary, "TARGET", python_summary.Shape(4, 2))
    tokenizer = python_summary.make_tokenizer()
    found = list(functions.examples(SOURCE, functions._DEFINITIONS))
    told = [e for e in found if e.sentence is not None]
    rows = python_summary.encode(tokenizer, told)
    assert all(summary[-1] == tokenizer.eos_token_id for _, summary in rows)
    material = python_summary.Material(tokenizer, rows * 5, rows * 2, rows)
    python_summary.train_target(tmp_path, material, seedling_steps=1, steps=1)
    python_summary.train_draft(tmp_path, material, steps=1)
    model = python_summary.PegasusForConditionalGeneration.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    assert len(python_summary.write(model, tokenizer, told)) == len(told)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "distill"])
def test_every_pair_has_a_recipe(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m recipes NAME --help` is its own, and so are its usage errors."""
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"python -m recipes {name}" in " ".join(out.split())
    assert "--stage" in out
    with pytest.raises(SystemExit) as ended:
        main([name, "--stage", "none"])
    assert ended.value.code == 2
