"""`distill`: drafts that learn from their target, serve as any other, and go on where they were left."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recipes import main
from recipes.distill.new_head import save_eagle
from recipes.distill.student import STEPS, Student
from recipes.distill.teacher import Example, ExampleCache, Teacher, divergence
from recipes.distill.texts import Texts
from recipes.distill.training import Length, distill
from specdec import SpecGenerator
from specdec.cli.commands import run_command
from specdec.errors import LoadError, OptionError, SpecdecError, UnsupportedError
from specdec.models import LanguageModel
from tests.folders import WIDTH, byte_tokenizer, saved
from tests.heads import THREE, Eagle
from tests.tiny import tiny

TEXT = "the cat sat on the mat, and the dog sat on the cat; " * 3
PROMPTS = ["the cat", "a dog sat", "on the mat", "and then"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file to learn from."""
    file = tmp_path_factory.mktemp("texts") / "text.txt"
    file.write_text(TEXT)
    return file


def target(seed: int = 0) -> Any:
    return tiny("llama", vocab=WIDTH, seed=seed, **THREE)


def train(out: Path, **options: Any) -> dict[str, Any]:
    return distill(target(), out, tokenizer=byte_tokenizer(), **options)


def batch(rows: int = 2, tokens: int = 24) -> torch.Tensor:
    return torch.randint(3, 60, (rows, tokens), generator=torch.Generator().manual_seed(0))


def test_a_draft_learns_and_serves(tmp_path: Path, text: Path) -> None:
    """The loss falls, held-out guesses come true more often than before, and the text stays the target's."""
    options_of_training = {"text": [text], "prompts": PROMPTS, "draft_vocabulary": 100}
    first, last = (train(tmp_path / str(n), **options_of_training, steps=n) for n in (1, 80))
    assert last["loss"] < 0.7 * first["loss"]
    assert last["acceptance_length"] > first["acceptance_length"]
    assert json.loads((tmp_path / "80" / "card.json").read_text()) == last
    model, tokenizer, options = target(), byte_tokenizer(), {"max_new_tokens": 24, "eos_token_id": []}
    plain = SpecGenerator(model, tokenizer=tokenizer).generate(["the cat", "sat on the mat"], **options)
    drafted = SpecGenerator(model, str(tmp_path / "80"), tokenizer=tokenizer)
    out = drafted.generate(["the cat", "sat on the mat"], **options, schedule="constant")
    assert out.new_tokens() == plain.new_tokens()
    assert out.stats is not None
    assert out.stats.num_accepted_draft_tokens > 0


def test_unrolled_steps_are_those_of_decoding(tmp_path: Path) -> None:
    """What a head guesses in training after s of its own features is what its formulas say in decoding."""
    model = tiny("llama", **THREE)
    language = LanguageModel(model)
    student = Student(language, torch.arange(0, 64, 2))
    save_eagle(student.stage, language, tmp_path, guesses=STEPS)
    reference, ids = Eagle(tmp_path), batch(1, 16)
    with torch.no_grad():
        states, logits = student.teacher.forward(ids)
        begins = torch.tensor([0, 4, 9])
        steps = list(student._unrolled(ids, states[:, :-1], begins))
    wanted, hits = logits[0].argmax(-1), student.hits(ids)
    assert hits.shape == (1, 16 - STEPS, STEPS)
    features = reference.features(states[0])
    for number, begin in enumerate(begins.tolist()):
        chain = features[: begin + 1]
        for step in range(STEPS):
            written = reference.written(ids[0, 1 : begin + step + 2].tolist(), chain)
            guess = reference.logits(written[-1])[::2]
            trained = steps[step][0, number if step else begin]
            torch.testing.assert_close(trained, guess, rtol=1e-4, atol=1e-4)
            assert hits[0, begin, step] == (2 * guess.argmax() == wanted[begin + 1 + step])
            chain = torch.cat([chain, written[-1:]])


def test_divergence_and_its_gradient() -> None:
    """Those of the whole distributions, where all tokens are choices, and of the renormalized likeliest ones."""
    target, guesses = torch.randn(2, 2, 3, 20, generator=torch.Generator().manual_seed(0)).unbind()
    guesses.requires_grad_()
    wanted = target.softmax(-1)
    for likeliest in (20, 5):
        chances, choices = wanted.topk(likeliest)
        chances = chances / chances.sum(-1, keepdim=True)
        values = divergence(choices, chances, guesses)
        logs = guesses.log_softmax(-1).gather(-1, choices)
        expected = (chances * (chances.log() - logs)).sum(-1)
        torch.testing.assert_close(values, expected)
        weight = torch.arange(6.0).view(2, 3)
        (gradient,), (slope,) = (torch.autograd.grad((one * weight).sum(), guesses) for one in (values, expected))
        torch.testing.assert_close(gradient, slope)


def test_what_was_heard_is_kept(tmp_path: Path) -> None:
    """A cache gives the example that was made, without a pass of the target; what finds no room is made each time."""
    teacher, ids = Teacher(LanguageModel(tiny("llama", **THREE)), [0, 1, 2], torch.arange(40)), batch(2, 9)
    windows = ids.split(1)
    examples = [teacher.label(window) for window in windows]
    labelled: list[torch.Tensor] = []

    def label(window: torch.Tensor) -> Example:
        labelled.append(window)
        return teacher.label(window)

    record = sum(value.nbytes for name, value in vars(examples[0]).items() if name != "ids")
    for limit, passes in ((record * 9, [0, 1]), (record, [0, 1, 1]), (10, [0, 1, 0, 1])):
        labelled.clear()
        cache = ExampleCache(label, tmp_path / str(limit), limit)
        for row, number in ((0, 4), (1, 1)) * 2:
            example = cache.example(number, windows[row])
            for name in ("ids", "states", "choices", "chances", "weight"):
                assert torch.equal(getattr(example, name), getattr(examples[row], name))
        assert all(torch.equal(window, windows[row]) for window, row in zip(labelled, passes, strict=True))
        ExampleCache(label, tmp_path / str(limit), limit)  # of another training, whose windows are others
        assert not any(tmp_path.iterdir())


def test_every_window_is_read_once_before_any_is_read_again() -> None:
    """Of each stream, in another order each time."""
    texts = Texts([np.arange(65 * 6 + 1), np.arange(1000, 1065)], [])
    assert (texts.window, [len(windows) for windows in texts.windows]) == (64, [6, 1])
    read = [texts.chosen(step, seed=1) for step in range(24)]
    numbers = [number for number, _ in read[::2]]
    assert sorted(numbers[:6]) == sorted(numbers[6:]) == list(range(6))
    assert numbers[:6] != numbers[6:]
    assert all(number == 6 for number, _ in read[1::2])
    assert all(ids.shape == (1, 65) and ids[0, 0] == 64 * number for number, ids in read[::2])


def test_a_training_goes_on_bit_for_bit(tmp_path: Path, text: Path) -> None:
    """Stopped after some steps and begun again: the weights of one that was never stopped. Whole batches of
    continuations are not written again.
    """
    options: dict[str, Any] = {"text": [text], "prompts": PROMPTS, "steps": 6}
    train(tmp_path / "whole", **options)
    continuations = tmp_path / "parts" / "training" / "continuations.jsonl"
    assert train(tmp_path / "parts", **options, **stopped_after(3))["steps"] == 3
    written = continuations.read_bytes()
    continuations.write_bytes(written + written[:40])  # a kill in the middle of a batch
    assert train(tmp_path / "parts", **options)["steps"] == 6
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert continuations.read_bytes() == written
    assert train(tmp_path / "parts", **{**options, "steps": 8})["steps"] == 8  # beyond its end
    continuations.write_bytes(b"{" + written)
    with pytest.raises(SpecdecError, match=r"continuations.jsonl is damaged \(.*\): delete it"):
        train(tmp_path / "parts", **{**options, "steps": 9})


def test_a_target_that_writes_nothing_is_no_teacher(tmp_path: Path) -> None:
    """It is refused before the training. (The first save failed, and lost what was learned.)"""
    silent = target()
    silent.generation_config.eos_token_id = list(range(silent.config.vocab_size))
    with pytest.raises(OptionError, match="the target ends all held-out texts within"):
        distill(silent, tmp_path, tokenizer=byte_tokenizer(), prompts=PROMPTS, steps=3)


def stopped_after(steps: int) -> dict[str, Any]:
    """Options that end a training after so many steps."""
    steps_done: list[float] = []

    def notify(done: float, total: float, doing: str) -> None:
        if "step" in doing:
            steps_done.append(done)

    return {"notify": notify, "is_stopped": lambda: len(steps_done) == steps}


def test_the_target_is_not_changed(tmp_path: Path, text: Path) -> None:
    """Neither its weights, nor whether they could learn."""
    model = target()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    distill(model, tmp_path, tokenizer=byte_tokenizer(), text=[text], steps=2)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hours": 1, "steps": 5}, "`hours` and `steps`"),
        ({"hours": 0}, "`hours` must be a number above 0"),
        ({"cache_gib": float("inf")}, "`cache_gib` must be a number of at least 0"),
        ({"cache_gib": -1}, "`cache_gib` must be a number of at least 0"),
        ({"steps": 0}, "`steps` must be a whole number"),
        ({"layers": 0}, "`layers` must be a whole number"),
        ({"draft_vocabulary": WIDTH + 1}, f"`draft_vocabulary` must be at most the {WIDTH} tokens"),
        ({"text": ["nowhere.txt"]}, "`text` must be readable files in UTF-8, got 'nowhere.txt'"),
        ({"text": "text.txt"}, "pass a list"),
        ({"text": []}, "nothing to learn from"),
        ({"text": [], "prompts": ["one"]}, "`prompts` must be two at least"),
    ],
)
def test_wrong_options(given: dict[str, Any], words: str, tmp_path: Path, text: Path) -> None:
    """Each is named, with what was expected."""
    with pytest.raises(OptionError) as caught:
        train(tmp_path / "out", **{"text": [text], **({} if "hours" in given else {"steps": 1}), **given})
    assert words in str(caught.value)


def test_how_much_is_learned() -> None:
    """What came before the first step is none of the course, which sets the learning rate."""
    hour = Length(hours=1)
    assert [hour.done(9, seconds, 1200) for seconds in (1200, 1800, 3600)] == [0.0, 0.25, 1.0]
    assert hour.done(9, 1800) == 0.5
    assert hour.done(0, 4000, 4000) == 1.0
    assert Length(steps=10).done(5, 3000, 1200) == 0.5


def test_folders_that_hold_something_else(tmp_path: Path, text: Path) -> None:
    """Another draft's training, anything else, a broken state; targets that cannot be distilled; too little text."""
    train(tmp_path / "out", text=[text], steps=1)
    with pytest.raises(OptionError, match="another `layers`, 1"):
        train(tmp_path / "out", text=[text], steps=1, layers=2)
    with pytest.raises(OptionError, match="another `prompts`"):
        train(tmp_path / "out", text=[text], steps=1, prompts=PROMPTS)
    other = tmp_path / "other.txt"
    other.write_text(TEXT.upper())
    with pytest.raises(OptionError, match="another `text`"):
        train(tmp_path / "out", text=[other], steps=1)
    for broken in (b"no", b"junk"):
        (tmp_path / "out" / "training" / "state.pt").write_bytes(broken)
        with pytest.raises(LoadError, match="remove it to begin anew"):
            train(tmp_path / "out", text=[text], steps=1)
    (tmp_path / "out" / "training" / "settings.json").write_text("")
    with pytest.raises(LoadError, match=r"settings.json is broken: remove the folder"):
        train(tmp_path / "out", text=[text], steps=1)
    with pytest.raises(OptionError, match="a new or empty folder"):
        train(text.parent, text=[text], steps=1)
    with pytest.raises(UnsupportedError, match="has an encoder"):
        distill(tiny("bart"), tmp_path / "bart", tokenizer=byte_tokenizer(), text=[text], steps=1)
    short = tmp_path / "short.txt"
    short.write_text("short")
    with pytest.raises(OptionError, match="some hundred tokens at least"):
        train(tmp_path / "short", text=[short], steps=1)
    train(tmp_path / "short", text=[text], steps=1)  # where nothing was trained, nothing is in the way


def test_the_command(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It reads prompts and text, reports on stdout, and its folder is a draft for `generate`."""
    model, prompts, out = saved("llama", tmp_path / "t", vocab=WIDTH, **THREE), tmp_path / "p.jsonl", tmp_path / "o"
    byte_tokenizer().save_pretrained(model)
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    capsys.readouterr()
    main(["distill", model, str(out), "--text", str(text), "--prompts", str(prompts), "--steps", "2"])
    lines = capsys.readouterr().out.splitlines()
    names = ["steps", "loss", "agreement by position", "acceptance length", "to measure it"]
    assert [line.split("  ")[0] for line in lines] == names
    assert lines[-1].endswith(f" specdec bench {model} --draft {out}")
    assert run_command(["generate", model, "--draft", str(out), "-p", "the", "--max-new-tokens", "4", "--quiet"]) == 0
    with pytest.raises(SystemExit):
        main(["distill", model, str(tmp_path / "no"), "--steps", "2"])
    assert "nothing to learn from" in capsys.readouterr().err
