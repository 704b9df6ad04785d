"""Tiny random models that see, one of each family, and the inputs that their processors would make."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    GraniteSpeechForConditionalGeneration,
    LlavaProcessor,
    Qwen2AudioForConditionalGeneration,
    VoxtralForConditionalGeneration,
)

from specdec.models.hf.tiny_models import WINDOW, shake
from tests.folders import WIDTH, byte_tokenizer
from tests.tiny import HEADS

VOCAB, IMAGE, VIDEO, BREAK, BEGIN, END = 64, 60, 61, 57, 58, 59
_IDS = {"bos_token_id": 1, "eos_token_id": 2}
_TEXT = {**HEADS, **_IDS, "vocab_size": VOCAB, "max_position_embeddings": 512, "pad_token_id": 0}
_EYES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_CLIP = {**_EYES, "image_size": 16, "patch_size": 8, "model_type": "clip_vision_model"}
_SIGLIP = {**_CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
_PIXTRAL = {**_EYES, "image_size": 32, "patch_size": 4, "head_dim": 8, "model_type": "pixtral"}
_GRID = {
    "depth": 2, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "in_channels": 3,
}  # fmt: skip
_TILES = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
_GRID_IDS = {"video_token_id": VIDEO, "vision_start_token_id": BEGIN, "vision_end_token_id": END}


def _text(kind: str, **options: Any) -> dict[str, Any]:
    return {**_TEXT, "model_type": kind, **options}


def _axes(kind: str) -> dict[str, Any]:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    return _text(kind, rope_parameters=rope)


# family -> options of its config; "model_type" where that is another family's
FAMILIES: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": _text("llama"), "vision_config": _CLIP, "vision_feature_layer": -2, "image_seq_length": 4,
        "vision_feature_select_strategy": "default",
    },
    "llava_next": {"text_config": _text("mistral", sliding_window=None), "vision_config": _CLIP, **_TILES},
    "llava_onevision": {"text_config": _text("qwen2"), "vision_config": _SIGLIP, **_TILES},
    "qwen2_vl": {
        "text_config": _axes("qwen2_vl_text"), **_GRID_IDS,
        "vision_config": {**_GRID, "hidden_size": 32, "embed_dim": 16, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        "text_config": _axes("qwen2_5_vl_text"), **_GRID_IDS,
        "vision_config": {
            **_GRID, "out_hidden_size": 32, "intermediate_size": 24, "window_size": 16, "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {
        "text_config": _axes("qwen3_vl_text"), **_GRID_IDS,
        "vision_config": {
            **_GRID, "out_hidden_size": 32, "intermediate_size": 24, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    "smolvlm": {"text_config": _text("llama"), "vision_config": {**_CLIP, "model_type": "smolvlm_vision"}},
    "idefics3": {"text_config": _text("llama"), "vision_config": {**_CLIP, "model_type": "idefics3_vision"}},
    "gemma3": {
        "text_config": _text(
            "gemma3_text", sliding_window=WINDOW, query_pre_attn_scalar=8,
            layer_types=["sliding_attention", "full_attention"],
        ),
        "vision_config": _SIGLIP, "boi_token_index": BEGIN, "eoi_token_index": END, "mm_tokens_per_image": 4,
    },
    "paligemma": {
        "text_config": _text("gemma"), "vision_config": {**_SIGLIP, "projection_dim": 32}, "projection_dim": 32,
    },
    "internvl": {
        "text_config": _text("qwen2"), "image_seq_length": 4,
        "vision_config": {**_EYES, "image_size": [16, 16], "patch_size": [4, 4], "model_type": "internvl_vision"},
    },
    "mistral3": {"text_config": _text("mistral", sliding_window=None), "vision_config": _PIXTRAL},
    "pixtral": {
        "model_type": "llava", "text_config": _text("mistral", sliding_window=None), "vision_config": _PIXTRAL,
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
    },
}  # fmt: skip
_PLACE = dict.fromkeys(("smolvlm", "idefics3", "gemma3", "internvl"), "image_token_id")
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}. {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_SHAPES = [(32, 32), (16, 32), (32, 16)]  # of the pictures of models that take several


def seeing(family: str, seed: int = 0, *, place: int = IMAGE, **options: Any) -> Any:
    """A tiny model of a family in float32, whose text no token ends; pictures are loud in it.

    `place`: the placeholder's token; `options` of the text model.
    """
    own = deepcopy(FAMILIES[family])
    kind = own.pop("model_type", family)
    name = _PLACE.get(family, "image_token_id" if kind.startswith("qwen") else "image_token_index")
    own["text_config"] |= options
    # tied weights would make the tiny models of some families repeat a token, whatever they see
    config = AutoConfig.for_model(kind, **own, **{name: place, "tie_word_embeddings": False})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        shake(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "projector" in name or "connector" in name or ".merger." in name:
                weight *= 4
    model.generation_config.update(pad_token_id=0, bos_token_id=1, eos_token_id=None)
    return model.eval()


def picture(family: str, seed: int) -> tuple[list[int], dict[str, Tensor]]:
    """A random picture: its tokens in the text, and the arguments of the model."""
    noise = torch.Generator().manual_seed(seed)
    height, width = _SHAPES[seed % 3]

    def values(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=noise) * 2 - 1

    if family.startswith("qwen"):
        grid = torch.tensor([[1, height // 4, width // 4]])
        tokens = [BEGIN, *[IMAGE] * int(grid.prod() // 4), END]
        return tokens, {"pixel_values": values(int(grid.prod()), 96), "image_grid_thw": grid}
    if family in ("mistral3", "pixtral"):
        side = 8 if family == "mistral3" else 4
        tokens = ([*[IMAGE] * (width // side), BREAK] * (height // side))[:-1]
        padded = torch.nn.functional.pad(values(1, 3, height, width), (0, 32 - width, 0, 32 - height))
        return [*tokens, END], {"pixel_values": padded, "image_sizes": torch.tensor([[height, width]])}
    if family in ("llava_next", "llava_onevision"):
        count = 4 + height // 8 * (width // 8 + 1)
        sizes = torch.tensor([[height, width]])
        return [IMAGE] * count, {"pixel_values": values(1, 5, 3, 16, 16), "image_sizes": sizes}
    if family in ("smolvlm", "idefics3"):
        return [BEGIN, IMAGE, END], {"pixel_values": values(1, 1, 3, 16, 16)}
    tokens = [BEGIN, *[IMAGE] * 4, END] if family in ("gemma3", "internvl") else [IMAGE] * 4
    return tokens, {"pixel_values": values(1, 3, 16, 16)}


def prompt(family: str, *parts: list[int] | int) -> dict[str, Tensor]:
    """A row's inputs: ids of text, and pictures by their seeds, in their order."""
    ids: list[int] = []
    found: list[dict[str, Tensor]] = []
    for part in parts:
        if isinstance(part, int):
            tokens, own = picture(family, part)
            ids, found = ids + tokens, [*found, own]
        else:
            ids = ids + part
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    for name in found[0] if found else ():
        dim = 1 if family in ("smolvlm", "idefics3") else 0
        inputs[name] = torch.cat([own[name] for own in found], dim)
    kinds = (inputs["input_ids"] == IMAGE).int()
    if family.startswith("qwen"):
        inputs["mm_token_type_ids"] = kinds
    if family == "gemma3":
        inputs["token_type_ids"] = kinds
    if family == "paligemma":
        inputs["token_type_ids"] = torch.zeros_like(kinds)
    return inputs


def processor() -> Any:
    """LLaVA's processor for the tiny model: a byte is a token, and a picture of 16 x 16 pixels is four."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    eyes = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    how = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(eyes, tokenizer, chat_template=_TEMPLATE, image_token="<image>", **how)


def batch(family: str, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The inputs of several rows, padded on the left, as a processor stacks them."""
    width = max(row["input_ids"].shape[1] for row in rows)
    inputs: dict[str, Tensor] = {}
    for name in sorted({name for row in rows for name in row}):
        given = [row[name] for row in rows if name in row]
        if given[0].dim() == 2 and name.endswith(("_ids", "_mask")):
            given = [torch.nn.functional.pad(one, (width - one.shape[1], 0)) for one in given]
        elif family in ("smolvlm", "idefics3"):  # one entry per row, filled with empty pictures
            most = max(one.shape[1] for one in given)
            given = [row[name] if name in row else torch.zeros(1, 0, 3, 16, 16) for row in rows]
            given = [torch.cat([one, one.new_zeros(1, most - one.shape[1], 3, 16, 16)], 1) for one in given]
        inputs[name] = torch.cat(given)
    return inputs


def with_processor() -> tuple[Any, Any]:
    made = processor()
    place = made.tokenizer.convert_tokens_to_ids("<image>")
    return seeing("llava", place=place, vocab_size=WIDTH + 1), made


def hearing(family: str) -> tuple[Any, dict[str, Tensor]]:
    """A tiny model that hears, Qwen2-Audio, Voxtral or Granite Speech, and a prompt with a recording."""
    beside: dict[str, Tensor] = {}
    if family == "qwen2_audio":
        ears = {
            "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24,
            "num_mel_bins": 8, "max_source_positions": 16, "model_type": "qwen2_audio_encoder",
        }  # fmt: skip
        config = AutoConfig.for_model(family, text_config=_text("qwen2"), audio_config=ears, audio_token_index=IMAGE)
        kind, places, shape = Qwen2AudioForConditionalGeneration, 8, (1, 8, 32)
        beside = {"feature_attention_mask": torch.ones(1, 32).long()}
    elif family == "voxtral":
        ears = {**_EYES, "intermediate_size": 64, "num_hidden_layers": 1, "num_mel_bins": 8, "max_source_positions": 16}
        config = AutoConfig.for_model(family, text_config=_text("llama"), audio_config=ears, audio_token_id=IMAGE)
        kind, places, shape = VoxtralForConditionalGeneration, 4, (1, 8, 32)
    else:
        ears = {
            "input_dim": 8, "num_layers": 1, "hidden_dim": 16, "num_heads": 2, "dim_head": 8, "output_dim": 6,
            "context_size": 20, "max_pos_emb": 32, "conv_kernel_size": 3, "model_type": "granite_speech_encoder",
        }  # fmt: skip
        windows = {**_EYES, "num_hidden_layers": 1, "encoder_hidden_size": 16, "cross_attention_frequency": 1}
        joint = {**windows, "model_type": "blip_2_qformer", "vocab_size": 8}
        parts = {"text_config": _text("granite"), "encoder_config": ears, "projector_config": joint}
        config = AutoConfig.for_model(family, **parts, audio_token_index=IMAGE, has_lora_adapter=False)
        kind, places, shape = GraniteSpeechForConditionalGeneration, 6, (1, 30, 8)
        beside = {"input_features_mask": torch.ones(1, 6).bool()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config).float()
        shake(model)
        sound = torch.rand(shape)
    model.generation_config.update(pad_token_id=0, bos_token_id=1, eos_token_id=None)
    ids = torch.tensor([[1, 5, 6, *[IMAGE] * places, 9, 10, 11]])
    return model.eval(), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "input_features": sound, **beside}
