"""Tokens that end a text: by ids in the file, and by their text."""

from pathlib import Path
from typing import Any

import pytest

from specdec import SpecGenerator
from specdec.models import load_model
from specdec.models.gguf.end_tokens import special_ids
from tests.models.gguf.files import byte_vocabulary, reader
from tests.models.gguf.models import KINDS, model_of, saved

pytest.importorskip("gguf")
BYTES = byte_vocabulary([], 256)


def ends(path: Path, texts: list[str], **keys: Any) -> list[str | int]:
    """Texts of the tokens that end a text, ids for those of the bytes."""
    every = BYTES | {"tokenizer.ggml.tokens": [*BYTES["tokenizer.ggml.tokens"], *texts]}
    every["tokenizer.ggml.token_type"] = [*BYTES["tokenizer.ggml.token_type"], *[3] * len(texts)]
    every |= {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    found = special_ids(reader(path / "a.gguf", "llama", every)).ends
    return [number if number < 256 else texts[number - 256] for number in found]


def test_by_their_ids(tmp_path: Path) -> None:
    """eos first; ids beyond the vocabulary are none."""
    assert ends(tmp_path, [], eos_token_id=7, eot_token_id=5, eom_token_id=6) == [7, 5, 6]
    assert ends(tmp_path, [], eos_token_id=7, eot_token_id=7, eom_token_id=900) == [7]
    assert ends(tmp_path, []) == []


def test_by_their_text(tmp_path: Path) -> None:
    """Chat models end a turn by other tokens than the one that the file names."""
    texts = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|endoftext|>", "<other>", "<eos>"]
    assert ends(tmp_path, texts, eos_token_id=7) == [7, *texts[1:5], "<eos>"]


def test_a_turn_of_several_parts(tmp_path: Path) -> None:
    """gpt-oss ends a part by <|end|>, and an answer by <|return|> or <|call|>."""
    assert ends(tmp_path, ["<|end|>", "<|return|>", "<|call|>"]) == ["<|return|>", "<|call|>"]
    assert ends(tmp_path, ["<|end|>", "<|return|>"]) == ["<|end|>", "<|return|>"]


def test_a_text_ends_there(tmp_path: Path) -> None:
    """A chat model's file wrote on to the length limit."""
    kind = KINDS["llama"]
    model = model_of(kind)
    prompt = [[5, 9, 12, 7]]
    written = SpecGenerator(model).generate(prompt, max_new_tokens=20, eos_token_id=None).sequences[0].tolist()[4:]
    turn = next(token for token in written[3:] if token not in written[:3])
    texts = [f"<{number}>" for number in range(model.config.vocab_size)]
    texts[turn] = "<|im_end|>"
    path = saved(tmp_path / "a.gguf", kind, model, {"tokenizer.ggml.tokens": texts})
    generator = SpecGenerator(path)
    assert generator.target.model.generation_config.eos_token_id == [2, turn]
    result = generator.generate(prompt, max_new_tokens=20)
    assert result.sequences[0].tolist()[4:] == written[: written.index(turn) + 1]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {}),
        (
            {"temp": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "penalty_repeat": 1.05},
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.05}
            | {"do_sample": True},
        ),
        ({"top_k": 7}, {"top_k": 7, "do_sample": True}),
        ({"temp": 0.0, "top_k": 7}, {"do_sample": False}),
        ({"penalty_repeat": 1.5}, {"repetition_penalty": 1.5}),
        ({"mirostat": 2, "xtc_probability": 0.5}, {}),
    ],
)
def test_sampling(keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path, caplog: Any) -> None:
    """What llama.cpp takes from a file as its defaults are the defaults of a call. (They were passed over.)"""
    caplog.set_level("INFO", "specdec")
    kind = KINDS["llama"]
    path = saved(tmp_path / "a.gguf", kind, model_of(kind), {f"general.sampling.{key}": keys[key] for key in keys})
    config = load_model(path).model.generation_config
    fields = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample")
    assert {name: getattr(config, name) for name in fields if getattr(config, name) is not None} == expected
    unread = "has general.sampling.mirostat, general.sampling.xtc_probability, which is not followed"
    assert (unread in caplog.text) == ("mirostat" in keys)


def test_a_generation_config_beside_the_file(tmp_path: Path) -> None:
    """It counts, and so do the file's end tokens; so do those that the file forbids."""
    kind = KINDS["llama"]
    model = model_of(kind)
    model.generation_config.eos_token_id = 9
    model.generation_config.update(do_sample=True, top_k=7)
    model.generation_config.save_pretrained(tmp_path)
    keys = {"tokenizer.ggml.suppress_tokens": [11, 13], "general.sampling.top_k": 9}
    path = saved(tmp_path / "a.gguf", kind, model, keys)
    found = load_model(path).model.generation_config
    assert (found.eos_token_id, found.top_k, found.suppress_tokens) == ([9, 2], 7, [11, 13])
