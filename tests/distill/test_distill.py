"""`distill`: drafts that learn from their target, serve as any other, and go on where they were left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file
from transformers import DynamicCache

from specdec import SpecGenerator
from specdec.cli.commands import run
from specdec.distill.distill import Length, distill
from specdec.distill.recordings import Labeller, find_sounds
from specdec.distill.students import STEPS, EagleStudent, LayersStudent, spread_layers
from specdec.distill.teacher import Example, ExampleCache, Teacher, divergence
from specdec.distill.texts import Texts
from specdec.errors import LoadError, OptionError, UnsupportedError
from specdec.models import LanguageModel
from specdec.models.hf.derived import with_layers
from specdec.pipelines import Transcriber
from tests.folders import WIDTH, byte_tokenizer, saved
from tests.heads import Eagle
from tests.speech import RATE, processor, speech, whisper
from tests.tiny import tiny

TEXT = "the cat sat on the mat, and the dog sat on the cat; " * 3
PROMPTS = ["the cat", "a dog sat", "on the mat", "and then"]
THREE = {"num_hidden_layers": 3}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file to learn from."""
    file = tmp_path_factory.mktemp("texts") / "text.txt"
    file.write_text(TEXT)
    return file


def target(seed: int = 0) -> Any:
    return tiny("llama", vocab=WIDTH, seed=seed, **THREE)


def train(out: Path, **given: Any) -> dict[str, Any]:
    return distill(target(), out, tokenizer=byte_tokenizer(), **given)


def batch(rows: int = 2, tokens: int = 24) -> torch.Tensor:
    return torch.randint(3, 60, (rows, tokens), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["eagle3", "layers"])
def test_a_draft_learns_and_serves(kind: str, tmp_path: Path, text: Path) -> None:
    """The loss falls, held-out guesses come true more often than before, and the text stays the target's."""
    given = {"text": [text], "prompts": PROMPTS, "kind": kind, "layers": 1, "draft_vocabulary": 100}
    first, last = (train(tmp_path / str(n), **given, steps=n) for n in (1, 80))
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
    student = EagleStudent(language, torch.arange(0, 64, 2))
    student.save(tmp_path)
    reference, ids = Eagle(tmp_path), batch(1, 16)
    with torch.no_grad():
        states, logits = student.teacher.forward(ids)
        begins = torch.tensor([0, 4, 9])
        steps = list(student._unrolled(ids, states[:, :-1], begins))
    wanted, hits = logits[0].argmax(-1), student.hits(ids)
    assert hits.shape == (1, 16 - STEPS, STEPS)
    features = reference.features(states[0])
    for number, begin in enumerate(begins.tolist()):
        own = features[: begin + 1]
        for step in range(STEPS):
            written = reference.written(ids[0, 1 : begin + step + 2].tolist(), own)
            guess = reference.logits(written[-1])[::2]
            found = steps[step][0, number if step else begin]
            torch.testing.assert_close(found, guess, rtol=1e-4, atol=1e-4)
            assert hits[0, begin, step] == (2 * guess.argmax() == wanted[begin + 1 + step])
            own = torch.cat([own, written[-1:]])


def test_divergence_and_its_gradient() -> None:
    """Those of the whole distributions, where all tokens are choices, and of the renormalized likeliest ones."""
    target, guesses = torch.randn(2, 2, 3, 20, generator=torch.Generator().manual_seed(0)).unbind()
    guesses.requires_grad_()
    wanted = target.softmax(-1)
    for likeliest in (20, 5):
        chances, choices = wanted.topk(likeliest)
        chances = chances / chances.sum(-1, keepdim=True)
        told = divergence(choices, chances, guesses)
        logs = guesses.log_softmax(-1).gather(-1, choices)
        expected = (chances * (chances.log() - logs)).sum(-1)
        torch.testing.assert_close(told, expected)
        weight = torch.arange(6.0).view(2, 3)
        (found,), (slope,) = (torch.autograd.grad((one * weight).sum(), guesses) for one in (told, expected))
        torch.testing.assert_close(found, slope)


def test_what_was_heard_is_kept(tmp_path: Path) -> None:
    """A cache gives the example that was made, without a pass of the target; what finds no room is made each time."""
    teacher, ids = Teacher(LanguageModel(tiny("llama", **THREE)), [0, 1, 2], torch.arange(40)), batch(2, 9)
    labelled_alone = [teacher.label(ids[row : row + 1]) for row in range(2)]
    labelled: list[int] = []

    def label(number: int, window: torch.Tensor) -> Example:
        labelled.append(number)
        return teacher.label(window)

    kept = [value[0].nbytes for name, value in vars(labelled_alone[0]).items() if name != "ids" and value is not None]
    record = sum(kept) + 1
    for limit, passes in ((record * 9, [4, 1]), (record * 4, [4, 1, 4]), (10, [4, 1, 4, 1])):
        labelled.clear()
        cache = ExampleCache(label, tmp_path / str(limit), 5, limit)
        for example in (cache.example([4, 1], ids), cache.example([4, 1], ids)):
            assert example.encoder_states is None
            for name in ("ids", "states", "choices", "chances", "weight"):
                assert torch.equal(getattr(example, name), torch.cat([getattr(one, name) for one in labelled_alone]))
        assert labelled == passes


def test_every_window_is_read_once_before_any_is_read_again() -> None:
    """Of each stream, in another order each time."""
    texts = Texts([np.arange(65 * 6 + 1), np.arange(1000, 1065)], [], rows=2)
    assert (texts.window, [len(windows) for windows in texts.windows]) == (64, [6, 1])
    read = [texts.batch(step, seed=1) for step in range(12)]
    own = [number for numbers, _ in read[::2] for number in numbers]
    assert sorted(own[:6]) == sorted(own[6:]) == list(range(6))
    assert own[:6] != own[6:]
    assert all(numbers == [6, 6] for numbers, _ in read[1::2])
    assert all(ids[0, 0] == 64 * numbers[0] for numbers, ids in read[::2])


def test_a_training_goes_on_bit_for_bit(tmp_path: Path, text: Path) -> None:
    """Stopped after some steps and begun again: the weights of one that was never stopped. Whole batches of
    continuations are not written again.
    """
    given: dict[str, Any] = {"text": [text], "prompts": PROMPTS, "steps": 6}
    train(tmp_path / "whole", **given)
    continuations = tmp_path / "parts" / "training" / "continuations.jsonl"
    assert train(tmp_path / "parts", **given, **stopped_after(3))["steps"] == 3
    written = continuations.read_bytes()
    continuations.write_bytes(written + written[:40])  # a kill in the middle of a batch
    assert train(tmp_path / "parts", **given)["steps"] == 6
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert continuations.read_bytes() == written
    assert train(tmp_path / "parts", **{**given, "steps": 8})["steps"] == 8  # beyond its end


def test_layers_are_copies() -> None:
    """Of the chosen layers, in a model that shares no weights; all of them are the model itself."""
    model, ids = tiny("qwen3", **THREE), batch()
    assert spread_layers(1, 9) == [0]
    assert spread_layers(2, 9) == [0, 8]
    assert spread_layers(4, 10) == [0, 3, 6, 9]
    with torch.no_grad():
        assert torch.equal(with_layers(model, 3, [0, 1, 2]).eval()(ids).logits, model(ids).logits)
        small = with_layers(model, 3, [0, 2])
        assert small.config.num_hidden_layers == 2
        small.model.layers[1].mlp.up_proj.weight.zero_()
        assert model.model.layers[2].mlp.up_proj.weight.any()
        cache = DynamicCache()
        small(ids, past_key_values=cache)
        assert len(cache.layers) == 2
    language = LanguageModel(model)
    student = LayersStudent(language, [0, 1, 2], None)
    student.module.eval()
    example = student.teacher.label(ids)
    mass = model(ids).logits.softmax(-1).topk(example.choices.shape[-1]).values.sum(-1)
    assert student.loss(example, 0).item() == pytest.approx(-mass.log().mean().item(), abs=1e-5)
    assert student.hits(ids).all()


def test_layers_guess_tokens_of_their_vocabulary(tmp_path: Path) -> None:
    """They learn on the head's rows of these; the checkpoint has all rows, and as a draft guesses no other token."""
    model, ids, vocabulary = target(), batch(), torch.arange(1, WIDTH, 3)
    language = LanguageModel(model)
    whole, student = (LayersStudent(language, [0], None, some) for some in (None, vocabulary))
    example = student.teacher.label(ids)
    own = student.module(ids).logits
    torch.testing.assert_close(own, whole.module(ids).logits[..., vocabulary])
    assert torch.equal(example.choices[..., 0], model(ids).logits[..., vocabulary].argmax(-1))
    hits = vocabulary[own.argmax(-1)] == model(ids).logits.argmax(-1)
    assert torch.equal(student.hits(ids), hits[:, 1:].unfold(1, STEPS, 1))
    student.save(tmp_path)
    assert student.module.get_output_embeddings().out_features == len(vocabulary)  # it learns on
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].shape[0] == WIDTH
    drafted = SpecGenerator(model, str(tmp_path))
    assert drafted.draft is not None
    guessed = drafted.draft.models[0].model(ids).logits[0, -1]
    assert guessed.isfinite().nonzero()[:, 0].tolist() == vocabulary.tolist()
    expected = SpecGenerator(model).generate(ids[:1], max_new_tokens=12).new_tokens()
    assert drafted.generate(ids[:1], max_new_tokens=12, schedule="constant").new_tokens() == expected


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sound files of a second and more."""
    folder = tmp_path_factory.mktemp("sounds")
    for number, seconds in enumerate((0.9, 2.5, 0.8)):
        soundfile.write(folder / f"{number}.wav", speech(seconds, seed=number), RATE)
    return folder


def listener() -> Any:
    """A speech model of random weights whose texts come to an end."""
    model = whisper(1)
    with torch.no_grad():
        model.get_output_embeddings().weight[processor().tokenizer.eos_token_id] *= 8
    return model


def hear(out: Path, recordings: Path, model: Any = None, **given: Any) -> dict[str, Any]:
    parts = processor()
    options = {"kind": "layers", "layers": 1, "feature_extractor": parts.feature_extractor, **given}
    return distill(model or listener(), out, tokenizer=parts.tokenizer, audio=[recordings], **options)


def stopped_after(steps: int) -> dict[str, Any]:
    """Options that end a training after so many steps."""
    told: list[float] = []

    def notify(done: float, total: float, doing: str) -> None:
        if "step" in doing:
            told.append(done)

    return {"notify": notify, "is_stopped": lambda: len(told) == steps}


@pytest.mark.slow
def test_a_draft_of_a_speech_model(tmp_path: Path, recordings: Path) -> None:
    """One decoder layer on the target's encoder learns, goes on bit for bit, and writes the same text."""
    first, last = (hear(tmp_path / str(steps), recordings, steps=steps) for steps in (1, 100))
    assert last["loss"] < 0.7 * first["loss"]
    hear(tmp_path / "parts", recordings, steps=12, is_stopped=lambda: True)
    assert hear(tmp_path / "parts", recordings, steps=12, **stopped_after(5))["steps"] == 5
    hear(tmp_path / "parts", recordings, steps=12)
    hear(tmp_path / "whole", recordings, steps=12)
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    model = listener()
    own = model.get_encoder().state_dict()
    assert all(torch.equal(whole[f"model.encoder.{name}"], weight) for name, weight in own.items())
    plain, helped = (Transcriber(model, draft, processor=processor()) for draft in (None, str(tmp_path / "100")))
    sound = speech(2.2, seed=7)
    assert helped(sound)["text"] == plain(sound)["text"]
    draft = helped.generator.draft
    assert draft is not None
    assert draft.models[0].num_layers == 1


def test_where_sounds_are_found(tmp_path: Path, recordings: Path) -> None:
    """In folders, by name, and in lists beside which they lie."""
    names = [recordings / f"{number}.wav" for number in range(3)]
    listed = recordings / "some.txt"
    listed.write_text("2.wav\n\n0.wav\n")
    assert find_sounds([recordings]) == names
    assert find_sounds([listed, names[1]]) == [names[2], names[0], names[1]]
    for wrong in (tmp_path, tmp_path / "no.wav"):
        with pytest.raises(OptionError, match="`audio` must be sound files, folders of"):
            find_sounds([wrong])
    listed.unlink()


def test_windows_are_encoded_and_transcribed_once(
    tmp_path: Path, recordings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other few of them with timestamps; their examples are about the same sound, and have the weight of the
    tokens that the target wrote.
    """
    monkeypatch.setattr("specdec.distill.recordings._BATCH", 2)
    parts, encoded, encode = processor(), [], LanguageModel.encode
    generator = SpecGenerator(listener(), tokenizer=parts.tokenizer)
    monkeypatch.setattr(LanguageModel, "encode", lambda self, given: encoded.append(1) or encode(self, given))
    files, notes = find_sounds([recordings]), tmp_path / "transcripts.jsonl"
    labeller = Labeller(generator, parts.feature_extractor, notes, files, 1 << 20)
    sounds, _ = labeller.write(lambda *_: True)
    assert [labelled.number for labelled in sounds.learned] == [1, 2, 3, 4]
    assert len(sounds.evaluations) == 1
    without = generator.target.model.generation_config.no_timestamps_token_id
    assert [without in labelled.ids for labelled in sounds.learned] == [True, False, False, True]
    numbers, ids = replace(sounds, rows=4).batch(0, seed=0)
    assert sorted(numbers) == [0, 1, 2, 3]
    for row, number in enumerate(numbers):
        labelled = sounds.learned[number]
        example = sounds.label(Teacher(generator.target, (), None), number, ids[row : row + 1])
        assert example.choices.shape[:2] == example.chances.shape[:2] == example.states.shape[:2] == (1, ids.shape[1])
        asked = example.weight[0].nonzero()[:, 0].tolist()
        assert asked == list(range(labelled.first - 1, len(labelled.ids) - 1))
        assert ids[row, : len(labelled.ids)].tolist() == labelled.ids
    encoder_states = sounds.encoder_states([0, 1, 2, 3])
    again, _ = replace(labeller).write(lambda *_: True)  # after a kill
    assert again.learned == sounds.learned
    assert torch.equal(again.encoder_states([0, 1, 2, 3]), encoder_states)
    assert len(encoded) == 5
    sounds.close()
    assert torch.equal(sounds.encoder_states([0, 1, 2, 3]), encoder_states)
    assert len(encoded) == 9


def test_windows_without_an_end_are_left_out(tmp_path: Path, recordings: Path) -> None:
    """Of those a target goes round in circles about, nothing is learned; where it is all of them, an error says so."""
    with pytest.raises(OptionError, match=r"windows of sound whose transcript ends.*got '0 of 5 windows'"):
        hear(tmp_path, recordings, model=whisper(0), steps=1)


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
        ({"kind": "medusa"}, "`kind` must be one of eagle3, layers"),
        ({"hours": 1, "steps": 5}, "`hours` and `steps`"),
        ({"hours": 0}, "`hours` must be a number above 0"),
        ({"cache_gib": float("inf")}, "`cache_gib` must be a number of at least 0"),
        ({"cache_gib": -1}, "`cache_gib` must be a number of at least 0"),
        ({"steps": 0}, "`steps` must be a whole number"),
        ({"layers": 0}, "`layers` must be a whole number"),
        ({"kind": "layers", "layers": 4}, "`layers` must be at most the 3 of the target"),
        ({"draft_vocabulary": WIDTH + 1}, f"`draft_vocabulary` must be at most the {WIDTH} tokens"),
        ({"text": ["nowhere.txt"]}, "`text` must be readable files in UTF-8, got 'nowhere.txt'"),
        ({"text": "text.txt"}, "pass a list"),
        ({"text": []}, "nothing to learn from"),
        ({"text": [], "prompts": ["one"]}, "`prompts` must be two at least"),
        ({"audio": ["a.wav"]}, "`audio` trains kind 'layers'"),
        ({"text": [], "audio": "a.wav", "kind": "layers"}, "pass a list"),
        ({"text": [], "audio": ["a.wav"], "kind": "layers"}, "`audio` must be sound files"),
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
    with pytest.raises(OptionError, match="another `kind`, 'eagle3'"):
        train(tmp_path / "out", text=[text], steps=1, kind="layers")
    with pytest.raises(OptionError, match="another `prompts`"):
        train(tmp_path / "out", text=[text], steps=1, prompts=PROMPTS)
    other = tmp_path / "other.txt"
    other.write_text(TEXT.upper())
    with pytest.raises(OptionError, match="another `text`"):
        train(tmp_path / "out", text=[other], steps=1)
    (tmp_path / "out" / "training" / "state.pt").write_bytes(b"no")
    with pytest.raises(LoadError, match="remove it to begin anew"):
        train(tmp_path / "out", text=[text], steps=1)
    with pytest.raises(OptionError, match="a new or empty folder"):
        train(text.parent, text=[text], steps=1)
    with pytest.raises(UnsupportedError, match="has an encoder"):
        distill(tiny("bart"), tmp_path / "bart", tokenizer=byte_tokenizer(), text=[text], steps=1)
    short = tmp_path / "short.txt"
    short.write_text("short")
    with pytest.raises(OptionError, match="some hundred tokens at least"):
        train(tmp_path / "short", text=[short], steps=1)


def test_the_command(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It reads prompts and text, reports on stdout, and its folder is a draft for `generate`."""
    model, prompts, out = saved("llama", tmp_path / "t", vocab=WIDTH, **THREE), tmp_path / "p.jsonl", tmp_path / "o"
    byte_tokenizer().save_pretrained(model)
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    asked = ["distill", model, "-o", str(out), "--text", str(text), "--prompts", str(prompts), "--steps", "2"]
    capsys.readouterr()
    assert run([*asked, "--quiet"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    names = ["steps", "loss", "agreement by position", "acceptance length", "ms per token"]
    assert [line.split("  ")[0] for line in said.out.splitlines()] == names
    assert run(["generate", model, "--draft-model", str(out), "-p", "the", "--max-new-tokens", "4", "--quiet"]) == 0
    assert run(["distill", model, "-o", str(tmp_path / "no"), "--steps", "2"]) == 2
    assert "nothing to learn from" in capsys.readouterr().err
