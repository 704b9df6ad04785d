"""Tiny models whose encoders read more than ids, or return more than hidden states, with inputs of two lengths."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import BertConfig, Wav2Vec2Config
from transformers.models.florence2 import Florence2Config, Florence2ForConditionalGeneration
from transformers.models.led import LEDConfig, LEDForConditionalGeneration
from transformers.models.moonshine import MoonshineConfig, MoonshineForConditionalGeneration
from transformers.models.nllb_moe import NllbMoeConfig, NllbMoeForConditionalGeneration
from transformers.models.pix2struct import Pix2StructConfig, Pix2StructForConditionalGeneration
from transformers.models.speech_encoder_decoder import SpeechEncoderDecoderConfig, SpeechEncoderDecoderModel
from transformers.models.speech_to_text import Speech2TextConfig, Speech2TextForConditionalGeneration
from transformers.models.switch_transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration
from transformers.models.udop import UdopConfig, UdopForConditionalGeneration

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
SIDES = {
    "d_model": 32,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
Made = tuple[Any, dict[str, torch.Tensor]]


def loud(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model


def masked(length: int, second: int) -> torch.Tensor:
    """The mask of two rows, the second of which is shorter."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, second:] = 0
    return mask


def text(length: int = 12, second: int = 9) -> dict[str, torch.Tensor]:
    mask = masked(length, second)
    return {"input_ids": torch.randint(3, 59, mask.shape) * mask, "attention_mask": mask}


def moonshine() -> Made:
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in
             (("num_hidden_layers", 2), ("num_attention_heads", 4))}  # fmt: skip
    config = MoonshineConfig(vocab_size=64, hidden_size=32, intermediate_size=48, **sides, **IDS)
    mask = masked(4000, 2500)
    model = loud(MoonshineForConditionalGeneration, config)
    return model, {"input_values": torch.randn(2, 4000) * mask, "attention_mask": mask}


def speech_to_text() -> Made:
    sizes = {"input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 200, "max_target_positions": 99}
    model = loud(Speech2TextForConditionalGeneration, Speech2TextConfig(vocab_size=64, **SIDES, **sizes, **IDS))
    mask = masked(60, 40)
    return model, {"input_features": torch.randn(2, 60, 8) * mask[..., None], "attention_mask": mask}


def speech_composite() -> Made:
    layers = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    heard = {"conv_dim": (16, 16), "conv_kernel": (10, 4), "conv_stride": (5, 4), "num_feat_extract_layers": 2}
    heard |= {"num_conv_pos_embedding_groups": 2, "num_conv_pos_embeddings": 8}
    config = SpeechEncoderDecoderConfig.from_encoder_decoder_configs(
        Wav2Vec2Config(vocab_size=32, **layers, **heard),
        BertConfig(vocab_size=64, **layers, is_decoder=True, add_cross_attention=True),
    )
    model = loud(SpeechEncoderDecoderModel, config)
    for name, number in IDS.items():
        setattr(model.generation_config, name, number)
    mask = masked(900, 600)
    return model, {"inputs": torch.randn(2, 900) * mask, "attention_mask": mask}


def led() -> Made:
    lengths = {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64, "attention_window": 4}
    model = loud(LEDForConditionalGeneration, LEDConfig(vocab_size=64, **SIDES, **lengths, **IDS))
    inputs = text()
    everywhere = torch.zeros_like(inputs["input_ids"])
    everywhere[:, 0] = everywhere[0, 5] = 1
    return model, {**inputs, "global_attention_mask": everywhere}


def pix2struct() -> Made:
    of_text = {"hidden_size": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    ids = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1}
    eyes = {"hidden_size": 32, "patch_embed_hidden_size": 12, "d_ff": 48, "d_kv": 8, "num_hidden_layers": 2}
    config = Pix2StructConfig(
        text_config={**of_text, **ids}, vision_config={**eyes, "num_attention_heads": 4, "seq_len": 16}
    )
    model, mask = loud(Pix2StructForConditionalGeneration, config), masked(10, 7)
    patches = torch.randn(2, 10, 14)
    patches[..., 0], patches[..., 1] = torch.arange(1, 11) % 4 + 1.0, torch.arange(1, 11) % 3 + 1.0
    return model, {"flattened_patches": patches * mask[..., None], "attention_mask": mask.float()}


def florence2() -> Made:
    of_text = {"model_type": "bart", "vocab_size": 64, **SIDES, "max_position_embeddings": 64, **IDS}
    eyes = {"model_type": "florence_vision", "embed_dim": [8, 8, 8, 16], "depths": [1] * 4, "num_heads": [1, 1, 1, 2]}
    eyes |= {"num_groups": [1, 1, 1, 2], "projection_dim": 32, "window_size": 4}
    eyes |= {"patch_size": [7, 3, 3, 3], "patch_stride": [4, 2, 2, 2]}
    model = loud(
        Florence2ForConditionalGeneration,
        Florence2Config(text_config=of_text, vision_config=eyes, image_token_id=60, **IDS),
    )
    pictures = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        places = torch.full((2, model.get_image_features(pictures).pooler_output.shape[1]), 60)
    inputs = text(7, 5)
    return model, {
        "input_ids": torch.cat([places, inputs["input_ids"]], dim=1),
        "attention_mask": torch.cat([torch.ones_like(places), inputs["attention_mask"]], dim=1),
        "pixel_values": pictures,
    }


def udop() -> Made:
    eyes = {"image_size": 32, "patch_size": 8, "num_channels": 3, "max_2d_position_embeddings": 64}
    ids = {name: number for name, number in IDS.items() if name != "bos_token_id"}
    model, inputs = loud(UdopForConditionalGeneration, UdopConfig(vocab_size=64, **T5, **eyes, **ids)), text(7, 5)
    return model, {**inputs, "bbox": torch.rand(2, 7, 4).sort(-1).values, "pixel_values": torch.randn(2, 3, 32, 32)}


def switch_transformers() -> Made:
    experts = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 64}
    config = SwitchTransformersConfig(
        vocab_size=64, **T5, num_decoder_layers=2, **experts, pad_token_id=0, decoder_start_token_id=1
    )
    return loud(SwitchTransformersForConditionalGeneration, config), text()


def nllb_moe() -> Made:
    experts = {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 64}
    config = NllbMoeConfig(vocab_size=64, **SIDES, **experts, max_position_embeddings=64, **IDS)
    return loud(NllbMoeForConditionalGeneration, config), text()


MADE: dict[str, Callable[[], Made]] = {
    "moonshine": moonshine, "speech_to_text": speech_to_text, "speech_composite": speech_composite, "led": led,
    "pix2struct": pix2struct, "florence2": florence2, "udop": udop, "switch_transformers": switch_transformers,
    "nllb_moe": nllb_moe,
}  # fmt: skip
