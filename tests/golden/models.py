"""Four tiny models that are the same under every transformers version."""

import hashlib
import random
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB = 48
IDS: dict[str, dict[str, int]] = {
    "gpt2": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "llama": {"pad_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},  # padding with EOS is common for decoders
    "t5": {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
    "bart": {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2},
}
NAMES: tuple[str, ...] = tuple(IDS)
SEED = {"gpt2": 3, "llama": 7, "t5": 11, "bart": 21}
EMBEDDING = {"gpt2": 0.4, "llama": 0.6, "t5": 0.6, "bart": 0.6}
LOUD = {"gpt2": 1.6, "llama": 1.6, "t5": 2.4, "bart": 1.6}


def build(name: str) -> PreTrainedModel:
    """The model `name` in float32 and eval mode; its generation config holds the special ids and nothing else."""
    model = _blank(name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():  # tied weights come once, under the name registered first
            parameter.copy_(_values(name, key, parameter.shape))
        for key, buffer in model.named_buffers():
            if key == "final_logits_bias":
                buffer.zero_()
    model.tie_weights()
    model.generation_config = GenerationConfig(**IDS[name])
    return model.eval()


def inputs(case: dict[str, Any]) -> dict[str, Tensor]:
    """The arguments of a golden case: ids, and where it has them a mask and the decoder's ids."""
    names = {"prompt": "input_ids", "attention_mask": "attention_mask", "decoder_prompt": "decoder_input_ids"}
    return {name: torch.tensor(case[key]) for key, name in names.items() if key in case}


def check(model: PreTrainedModel, case: dict[str, Any]) -> list[float]:
    """The first eight logits at the last position; encoder-decoders see only their start token."""
    given = inputs(case)
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = torch.tensor([[model.config.decoder_start_token_id]])
    with torch.no_grad():
        logits = model(**given).logits
    return [round(value, 6) for value in logits[0, -1, :8].tolist()]


def _blank(name: str) -> PreTrainedModel:
    ids: dict[str, Any] = {"vocab_size": VOCAB, **IDS[name]}
    if name == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=4, **ids))
    if name == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        return LlamaForCausalLM(
            LlamaConfig(num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, **sizes, **ids)
        )
    if name == "t5":
        return T5ForConditionalGeneration(
            T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4, **ids)
        )
    if name == "bart":
        sides = {f"{side}_{part}": n for side in ("encoder", "decoder")
                 for part, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
        return BartForConditionalGeneration(
            BartConfig(d_model=32, max_position_embeddings=64, forced_eos_token_id=None, **sides, **ids)
        )
    raise ValueError(f"name must be one of {NAMES}, got {name!r}")


def _values(name: str, key: str, shape: torch.Size) -> Tensor:
    """Loud weights: attention and feed-forward weigh as much as the token itself, so texts depend on their past."""
    noise = _noise(f"{SEED[name]}.{name}.{key}", shape)
    if len(shape) == 1:
        if not key.endswith("weight"):
            return 0.1 * noise
        return (4 if key == "decoder.final_layer_norm.weight" else 1) * (1 + 0.1 * noise)  # T5 shrinks its logits
    if any(word in key for word in ("wte", "shared", "embed_tokens", "lm_head")):
        return EMBEDDING[name] * noise
    if any(word in key for word in ("wpe", "embed_positions", "relative_attention_bias")):
        return noise
    quiet = any(word in key for word in ("encoder_attn.out_proj", "EncDecAttention.o"))  # the same at every step
    return noise * (0.3 if quiet else LOUD[name]) / 32**0.5


def _noise(key: str, shape: torch.Size) -> Tensor:
    """From Python's generator, not torch's: its numbers do not depend on the build."""
    gauss = random.Random(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")).gauss
    return torch.tensor([gauss(0, 1) for _ in range(shape.numel())]).view(shape)
