"""What an encoder reads and returns reaches the decoder: masks, pictures, boxes, fields of its own output class."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.git import GitConfig, GitForCausalLM

from specdec import LanguageModel, OptionError, SpecGenerator, UnsupportedError
from tests.families import prompts
from tests.matrix import in_pairs, in_turn
from tests.models.encoders import IDS, MADE, loud
from tests.oracle import oracle
from tests.shrink import class_named, tiny_of
from tests.tiny import tiny, tiny_inputs

COMMON: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
SEARCHES: list[dict[str, Any]] = [{}, {"num_beams": 3, "num_return_sequences": 2}]
made = cache(lambda name: MADE[name]())


def own_text(model: Any, inputs: dict[str, torch.Tensor], **how: Any) -> list[list[int]]:
    return model.generate(**inputs, **COMMON, **how).tolist()


@in_turn(name=[*MADE], backend=["eager", "packed"])
def test_batches_of_two_lengths(name: str, backend: str, built: None) -> None:
    """Greedy and with beams, alone and with drafts that are right, half right and wrong: the model's own text.

    (Moonshine, Pix2Struct, Florence-2 and the two with experts raised, LED's and UDOP's inputs were refused, and rows
    of Speech2Text saw the padding of longer ones: another text.)
    """
    model, inputs = made(name)
    for how, kinds in (({}, ("perfect", "wrong")), ({"num_beams": 3}, (None, "half"))):
        expected = own_text(model, inputs, **how)
        for kind in kinds:
            draft = kind and oracle(kind, expected, 64)
            out = SpecGenerator(model, draft, backend=backend).generate(**inputs, **COMMON, **how)
            assert out.sequences.tolist() == expected


@pytest.mark.parametrize("name", MADE)
def test_rows_that_come_again(name: str) -> None:
    """A second call continues what the first has read, samples fork it, and rows alone are as in their batch."""
    model, inputs = made(name)
    generator = SpecGenerator(model, "suffix", prefix_cache=True)
    expected = own_text(model, inputs)
    for _ in range(2):
        assert generator.generate(**inputs, **COMMON).sequences.tolist() == expected
    repeated = {key: value.repeat_interleave(2, 0) for key, value in inputs.items()}
    assert generator.generate(**repeated, **COMMON).sequences[::2].tolist() == expected
    for row in range(2):
        alone = {key: value[row : row + 1] for key, value in inputs.items()}
        text = generator.generate(**alone, **COMMON).sequences[0].tolist()
        assert text == expected[row][: len(text)]


def test_inputs_of_a_composite_may_be_sound() -> None:
    """As transformers' first argument, by either name. (They were taken for ids.)"""
    model, inputs = made("speech_composite")
    named = {"input_values": inputs["inputs"], "attention_mask": inputs["attention_mask"]}
    generator = SpecGenerator(model)
    assert generator.generate(**named, **COMMON).sequences.tolist() == own_text(model, inputs)
    out = generator.generate(inputs["inputs"], attention_mask=inputs["attention_mask"], **COMMON)
    assert out.sequences.tolist() == own_text(model, inputs)


def test_the_encoders_own_output_is_taken() -> None:
    """With the mask of its frames in it."""
    model, inputs = made("moonshine")
    with torch.no_grad():
        heard = model.get_encoder()(inputs["input_values"], attention_mask=inputs["attention_mask"])
    out = SpecGenerator(model).generate(encoder_outputs=heard, **COMMON)
    assert out.sequences.tolist() == own_text(model, inputs)


def test_a_plain_output_has_all_fields() -> None:
    """Hidden states in transformers' plain class. (Moonshine and SwitchTransformers ended in an AttributeError.)"""
    for name, asked in (("moonshine", "input_values"), ("switch_transformers", "input_ids")):
        model, inputs = made(name)
        row = {asked: inputs[asked][:1]}
        with torch.no_grad():
            plain = BaseModelOutput(model.get_encoder()(**row)[0])
        out = SpecGenerator(model, "suffix").generate(encoder_outputs=plain, **COMMON)
        assert out.sequences.tolist() == own_text(model, row)


@pytest.mark.parametrize("backend", ["eager", "packed"])
def test_the_mask_of_an_encoders_output(backend: str, built: None) -> None:
    """A list is a mask, and one that does not fit is named. (Lists, texts and, packed, masks of another length were
    left out without a word, and rows saw padding; one of another number of rows ended in an IndexError.)
    """
    model, inputs = tiny("t5"), tiny_inputs("t5", rows=2)
    expected, mask = own_text(model, inputs), inputs["attention_mask"]
    with torch.no_grad():
        read = model.get_encoder()(**inputs)
    generator = SpecGenerator(model, backend=backend)
    for given in (mask, mask.tolist(), mask.bool()):
        out = generator.generate(encoder_outputs=read, attention_mask=given, **COMMON)
        assert out.sequences.tolist() == expected
    for wrong in (mask[:, :5], mask[:1], mask[0], "mask"):
        with pytest.raises(OptionError, match="`attention_mask` must be"):
            generator.generate(encoder_outputs=read, attention_mask=wrong, **COMMON)


@pytest.mark.parametrize("name", ["PPFormulaNet", "T5Gemma2"])
def test_outputs_of_other_forms(name: str) -> None:
    """PPFormulaNet's is a map, of which the decoder reads the pooled form; T5Gemma2's has its width in a part of the
    config. (The one was refused as no hidden states, the other ended in an AttributeError about `hidden_size`.)
    """
    model = tiny_of(class_named(f"{name}ForConditionalGeneration"))
    row = next(rows for rows in prompts(model) if model.main_input_name in rows[0])[0]
    with torch.no_grad():
        read = model.get_encoder()(**row)
    out = SpecGenerator(model, "suffix").generate(encoder_outputs=read, **COMMON)
    assert out.sequences.tolist() == own_text(model, row)


@in_pairs(name=["t5", "bart", "marian", "mbart"], draft=[None, "suffix", "perfect", "early_exit:1"], how=SEARCHES)
def test_embeddings_in_place_of_ids(name: str, draft: str | None, how: dict[str, Any]) -> None:
    """The encoder reads them, each row with its mask. (They were refused.)"""
    model, inputs = tiny(name), tiny_inputs(name, rows=2)
    with torch.no_grad():
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    expected = own_text(model, inputs, **how)
    guess = oracle(draft, expected, 64) if draft == "perfect" else draft
    generator = SpecGenerator(model, guess, prefix_cache=True)
    for _ in range(2):
        assert generator.generate(**inputs, **COMMON, **how).sequences.tolist() == expected


def test_embeddings_that_do_not_fit() -> None:
    """Given beside ids, to an encoder of sound, of another width, and to a draft with other embeddings."""
    model, inputs = tiny("t5"), tiny_inputs("t5")
    generator, embeds = SpecGenerator(model), {"inputs_embeds": torch.zeros(1, 9, 32)}
    with pytest.raises(OptionError, match=r"given 2 times \(input_ids, inputs_embeds\)"):
        generator.generate(**inputs, **embeds, **COMMON)
    with pytest.raises(OptionError, match=r"the encoder of T5\w+ cannot read `inputs_embeds` \[1, 9, 8\]"):
        generator.generate(inputs_embeds=torch.zeros(1, 9, 8), **COMMON)
    with pytest.raises(UnsupportedError, match=r"the encoder of Whisper\w+ does not read `inputs_embeds`"):
        SpecGenerator(tiny("whisper")).generate(**embeds, **COMMON)
    with pytest.raises(UnsupportedError, match="embeddings are the target's: use a decoder-only draft"):
        SpecGenerator(model, tiny("t5", seed=1)).generate(**embeds, **COMMON)


@pytest.mark.parametrize("draft", [None, "suffix", "perfect"])
def test_a_decoder_may_change_what_it_reads(draft: str | None) -> None:
    """MoonshineStreaming's adds positions to its encoder's output in place. (Each pass added them again.)"""
    model = tiny_of(class_named("MoonshineStreamingForConditionalGeneration"))
    inputs = {"input_values": torch.rand(1, 400, generator=torch.Generator().manual_seed(0))}
    expected = own_text(model, inputs)
    guess = oracle("perfect", expected, 64) if draft == "perfect" else draft
    generator = SpecGenerator(model, guess, prefix_cache=True)
    for _ in range(2):
        assert generator.generate(**inputs, **COMMON).sequences.tolist() == expected
    assert LanguageModel(model).capability.cache_kind != "none"


def test_inputs_that_do_not_fit() -> None:
    """An argument that the encoder lacks, and one with another number of rows."""
    model, inputs = made("led")
    generator = SpecGenerator(model)
    with pytest.raises(OptionError, match="`global_attention_mask` must be one entry for each of 2 rows"):
        generator.generate(**{**inputs, "global_attention_mask": inputs["attention_mask"][:1]}, **COMMON)
    with pytest.raises(UnsupportedError, match="LEDForConditionalGeneration does not read `pixel_values`"):
        generator.generate(**inputs, pixel_values=torch.zeros(2, 3, 4, 4), **COMMON)
    with pytest.raises(OptionError, match="`bbox` is not an option of generate"):
        generator.generate(**inputs, bbox=torch.zeros(2, 12, 4), **COMMON)


def git(frames: int | None, seed: int = 0) -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    eyes = {**sizes, "image_size": 16, "patch_size": 8}
    ids = {name: number for name, number in IDS.items() if name != "decoder_start_token_id"}
    config = GitConfig(vocab_size=64, vision_config=eyes, num_image_with_embedding=frames, **sizes, **ids)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return loud(GitForCausalLM, config)


@in_pairs(draft=[None, "suffix", "same", "other"], frames=[None, 3], how=SEARCHES)
def test_pictures_before_the_text(draft: str | None, frames: int | None, how: dict[str, Any]) -> None:
    """GIT reads a picture, or a video's frames, in columns without tokens. (Both were refused.)"""
    model = git(frames)
    generator = SpecGenerator(
        model, {"same": model, "other": git(frames, 1)}.get(draft or "", draft), prefix_cache=True
    )
    shape, ids = [*([frames] if frames else []), 3, 16, 16], torch.tensor([[5, 6, 7], [8, 9, 4]])
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    calls: list[dict[str, Any]] = [
        {"input_ids": ids[:1], "pixel_values": 3 * torch.randn(1, *shape)},
        {"input_ids": ids, "pixel_values": 3 * torch.randn(2, *shape)},
        {"input_ids": ids * mask, "attention_mask": mask, "pixel_values": 3 * torch.randn(2, *shape)},
        {"pixel_values": 3 * torch.randn(1, *shape)},
        {"input_ids": ids[:1]},
    ]
    for call in [*calls, calls[1]]:
        expected = model.generate(**call, **how, **COMMON)
        assert generator.generate(**call, **how, **COMMON).sequences.tolist() == expected.tolist()
    traced = {"output_hidden_states": True, "return_dict_in_generate": True}
    expected = model.generate(**calls[0], **traced, **COMMON)
    states = generator.generate(**calls[0], **traced, **COMMON).hidden_states
    assert [one[-1].shape for one in states] == [one[-1].shape for one in expected.hidden_states]
    torch.testing.assert_close(states[0][-1], expected.hidden_states[0][-1], rtol=1e-4, atol=1e-4)


def test_pictures_and_recordings_that_do_not_fit() -> None:
    """Pictures of another number, and a recording for which a model has no token. (It was taken for GIT's pictures.)"""
    ids, voxtral = torch.tensor([[5, 6, 7]]), tiny_of(class_named("VoxtralForConditionalGeneration"))
    with pytest.raises(OptionError, match=r"`pixel_values` must be one picture a row, of shape \[1, 3, 3, 16, 16\]"):
        SpecGenerator(git(3)).generate(ids, pixel_values=torch.randn(1, 2, 3, 16, 16), **COMMON)
    with pytest.raises(OptionError, match="`input_features` holds a recording without a place in the text"):
        SpecGenerator(voxtral).generate(ids, input_features=torch.randn(1, 8, 40), **COMMON)
