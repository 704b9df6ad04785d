"""Pictures in prompts: what a generator refuses, and that one bad picture ends its own request alone."""

import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import GenerationMixin

from recipes.distill.texts import encode_prompts
from specdec import OptionError, SpecGenerator, UnsupportedError
from specdec.pipelines import Summarizer
from tests.engine.test_threads import is_clean, together
from tests.generator.conftest import idle
from tests.matrix import endless
from tests.pictures import IMAGE, prompt, seeing, with_processor
from tests.tiny import silent

COMMON = endless(8)
SMALL = Image.new("RGB", (20, 30), "teal")
TEXT = [5, 6, 7]


def changed(family: str, **changes: Any) -> dict[str, Any]:
    """The inputs of a row with one picture, with changes; None leaves one out."""
    row: dict[str, Any] = {**prompt(family, TEXT, 0, TEXT), **changes}
    return {name: value for name, value in row.items() if value is not None}


WRONG: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("llava", {"input_ids": torch.tensor([TEXT * 2]), "attention_mask": None}, OptionError, "without a place"),
    ("llava", {"pixel_values": None}, OptionError, "4 places for a picture, and none was given"),
    ("llava", {"pixel_values": torch.zeros(3, 3, 16, 16)}, OptionError, "holds 3 pictures of 4 tokens each"),
    ("llava", {"pixel_values": torch.zeros(1, 3, 20, 20)}, OptionError, r"shape \[3, 16, 16\]"),
    ("llava", {"pixel_values": torch.zeros(0, 3, 16, 16)}, OptionError, "at least one picture"),
    ("llava", {"pixel_values": "cat.png"}, OptionError, "`pixel_values` must be a tensor"),
    ("llava", {"image_grid_thw": torch.tensor([[1, 2, 2]])}, UnsupportedError, "does not read `image_grid_thw`"),
    ("llava", {"inputs_embeds": torch.zeros(1, 10, 32)}, OptionError, "inputs_embeds"),
    ("qwen2_vl", {"image_grid_thw": torch.tensor([[1, 4, 4]])}, OptionError, "16 patches"),
    ("qwen2_vl", {"image_grid_thw": torch.tensor([[1, 3, 3]])}, OptionError, "multiples of 2"),
    ("qwen2_vl", {"image_grid_thw": torch.tensor([[1.0, 8.0, 8.0]])}, OptionError, "multiples of 2"),
    ("qwen2_vl", {"image_grid_thw": torch.zeros(0, 3).long()}, OptionError, "multiples of 2"),
    ("qwen2_vl", {"image_grid_thw": torch.tensor([[1, 8, 4], [1, 4, 8]])}, OptionError, "fit their places"),
    ("qwen2_vl", {"pixel_values": torch.zeros(64, 95)}, OptionError, "64 patches of 96 values"),
    ("llava", {"pixel_values": torch.tensor(1.0)}, OptionError, "a tensor, as a processor"),
    ("llava_next", {"image_sizes": torch.tensor([[0, 0]])}, OptionError, "height and width of each picture"),
    ("llava_next", {"pixel_values": torch.zeros(1, 2, 3, 16, 16)}, OptionError, "5 or more"),
    ("llava_next", {"pixel_values": torch.zeros(1, 3, 16, 16)}, OptionError, "5 or more"),
    ("qwen2_vl", {"image_grid_thw": None}, OptionError, "image_grid_thw"),
    (
        "qwen2_vl",
        {"pixel_values": torch.zeros(32, 96), "image_grid_thw": torch.tensor([[1, 4, 8]])},
        OptionError,
        "of 8 tokens each, and the rows have \\[16\\] places",
    ),
    ("gemma3", {"token_type_ids": torch.tensor([[0, 1]])}, OptionError, "like the ids"),
    ("smolvlm", {"pixel_values": torch.zeros(2, 1, 3, 16, 16) + 1}, OptionError, r"shape \[1, pictures"),
    ("mistral3", {"image_sizes": torch.tensor([[16, 16]])}, OptionError, "1 pictures of 4 tokens"),
    ("mistral3", {"image_sizes": None}, OptionError, "image_sizes"),
]


@pytest.mark.parametrize(("family", "changes", "kind", "words"), WRONG)
def test_wrong_pictures(family: str, changes: dict[str, Any], kind: type[Exception], words: str) -> None:
    generator = SpecGenerator(model := seeing(family), "suffix")
    silent(model)
    with pytest.raises(kind, match=words):
        generator.generate(**changed(family, **changes), **COMMON)


@pytest.mark.parametrize("name", ["pixel_values", "image_grid_thw", "token_type_ids"])
def test_a_model_of_text_alone(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"`{name}` is for models"):
        idle("llama").generate([TEXT], **{name: torch.ones(1, 3)}, **COMMON)


def test_a_picture_that_cannot_be_read_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on, and the generator stays usable."""
    generator = SpecGenerator(model := seeing("llava"), "suffix")
    rows = [prompt("llava", TEXT, seed, [*TEXT, *range(8, 20)]) for seed in (0, 3)]
    alone = [generator.generate(**row, **COMMON).sequences for row in rows]
    generator = SpecGenerator(model, "suffix")
    bad, see = rows[1]["pixel_values"], model.model.vision_tower.forward

    def forward(pixel_values: Tensor, *given: Any, **options: Any) -> Any:
        if torch.equal(pixel_values, bad):
            raise RuntimeError("a broken picture")
        return see(pixel_values, *given, **options)

    monkeypatch.setattr(model.model.vision_tower, "forward", forward)

    def run(row: dict[str, Tensor]) -> Any:
        try:
            return generator.generate(**row, **COMMON).sequences.tolist()
        except RuntimeError as error:
            return str(error)

    found = together(*(lambda row=row: run(row) for row in (rows[0], rows[1], prompt("llava", TEXT), rows[0])))
    assert found[0] == found[3] == alone[0].tolist()
    assert found[1] == "a broken picture"
    assert IMAGE not in found[2][0]
    assert is_clean(generator)


def asked(image: Any, text: str = "What is it?") -> list[dict[str, Any]]:
    """A conversation about a picture."""
    parts = [{"type": "image", "image": image}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def data_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return in_base64(buffer.getvalue())


def in_base64(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def claimed(width: int, height: int) -> str:
    """The data URL of a small file whose header promises a picture of this size."""
    data = base64.b64decode(data_url(SMALL).partition(",")[2])
    header = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return in_base64(data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:])


def test_messages_with_pictures(tmp_path: Path) -> None:
    """A path, an image and a data URL are the same picture, to `generate`, `stream` and `submit`; folders bring their
    processor.
    """
    model, processor = with_processor()
    made = processor(text="user: <image>What is it?. assistant:", images=SMALL, return_tensors="pt")
    expected = GenerationMixin.generate(model, **made, max_new_tokens=8, do_sample=False).tolist()
    SMALL.save(file := tmp_path / "teal.png")
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    for generator in (SpecGenerator(model, "suffix", tokenizer=processor), SpecGenerator(str(tmp_path / "model"))):
        for image in (str(file), file, SMALL, data_url(SMALL)):
            assert generator.generate(messages=asked(image), **COMMON).sequences.tolist() == expected
        several = generator.generate(messages=[asked(SMALL), asked(SMALL, "Is it teal or is it blue?")], **COMMON)
        assert several.sequences[0, -8:].tolist() == expected[0][-8:]
        tokens = [token for event in generator.stream(messages=asked(SMALL), **COMMON) for token in event.token_ids]
        assert tokens == expected[0][-8:]
        assert generator.generate(**made, **COMMON).sequences.tolist() == expected
        assert generator.generate(made, **COMMON).sequences.tolist() == expected
        chats = [[{"role": "user", "content": text}] for text in ("Hello", "Hello again")]
        for plain in (generator.generate(messages=chats, **COMMON), generator.generate(messages=chats[1], **COMMON)):
            text = processor.tokenizer.decode(plain.sequences[-1, :-8])
            assert text.endswith("user: Hello again. assistant:")


def test_pipelines_and_training_keep_texts_of_a_template_in_parts() -> None:
    """The processor's template prints parts alone: the message of a text prompt becomes one."""
    target, processor = with_processor()
    generator = SpecGenerator(target, tokenizer=processor)
    with pytest.raises(OptionError, match="a text or `messages` needs a length limit"):
        generator.generate(messages=[{"role": "user", "content": "Hello"}])
    ids = encode_prompts(processor.tokenizer, ["Hello"], processor)
    ids += Summarizer(generator, template="{text}")._ids(["Hello"], 8)
    for one in ids:
        assert "user: Hello. assistant:" in processor.tokenizer.decode(one)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("missing.png", "missing.png.* cannot be opened"),
        ("https://example.org/cat.png", "fetch_pictures=True"),
        ("data:image/png;base64,%%%", "no base64"),
        ("data:image/png,abc", "must be base64"),
        ("data:image/png;base64,iVBORw0KGgo=", "cannot be opened"),
        (in_base64(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"), "of no such format"),
        (claimed(60_000, 60_000), "cannot be opened .* exceeds limit"),
        (claimed(9_000, 9_000), "has 9000 x 9000 pixels"),
        (data_url(SMALL)[:-60] + "AAAA", "cannot be opened"),
        (3, "a path, a PIL image or a data URL"),
        ({}, "a path, a PIL image or a data URL"),
        (Image.new("1", (2**14, 2**13)), "has 16384 x 8192 pixels"),
    ],
)
def test_broken_pictures(image: Any, words: str) -> None:
    model, processor = with_processor()
    generator = SpecGenerator(model, "suffix", tokenizer=processor)
    silent(model)
    with pytest.raises(OptionError, match=words):
        generator.generate(messages=asked(image), **COMMON)


def test_pictures_without_a_processor() -> None:
    """A tokenizer alone cannot read them."""
    model, processor = with_processor()
    generator = SpecGenerator(model, tokenizer=processor.tokenizer)
    silent(model)
    with pytest.raises(OptionError, match="need the model's processor"):
        generator.generate(messages=asked(SMALL), **COMMON)
