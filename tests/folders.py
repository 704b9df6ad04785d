"""Tiny models saved with a byte-level tokenizer, as `from_pretrained` reads them."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.tiny import copied, tiny

SPECIALS = ["<pad>", "<s>", "</s>"]
WIDTH = len(SPECIALS) + 256


def byte_tokenizer(*, backwards: bool = False) -> PreTrainedTokenizerFast:
    """One token per byte; `backwards` numbers the same bytes in the other direction."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=backwards)
    bpe = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*SPECIALS, *alphabet])}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def saved_model(folder: Path, seed: int = 0, *, backwards: bool = False) -> str:
    """A tiny Llama with a byte-level tokenizer, saved in `folder`."""
    _write(folder, _files_of_tokenizer(backwards))
    return saved("llama", folder, vocab=WIDTH, seed=seed)


def saved(name: str, folder: Path, **options: Any) -> str:
    """A tiny model without a tokenizer, saved in `folder`."""
    _write(folder, _files_of_model(name, **options))
    return str(folder)


@copied
def _files_of_model(name: str, **options: Any) -> dict[str, bytes]:
    return _files(tiny(name, **options))


@copied
def _files_of_tokenizer(backwards: bool) -> dict[str, bytes]:
    return _files(byte_tokenizer(backwards=backwards))


def _files(part: Any) -> dict[str, bytes]:
    """What `save_pretrained` writes, by the files' names."""
    with TemporaryDirectory() as folder:
        part.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def saved_gguf(
    path: Path,
    types: Sequence[str] = ("Q4_0", "Q4_1", "Q8_0"),
    *,
    tokens: bool = False,
    template: str = "",
    split: int = 0,
    **options: Any,
) -> str:
    """A tiny Llama in a GGUF file as llama.cpp would write it, its matrices in these types, one after the other.

    `tokens` puts a byte-level tokenizer with one merge into it, `template` a chat template; a matrix whose rows are no
    multiple of 32 is in F32.
    With `split` it is in parts of so many tensors.
    """
    from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants

    model = tiny("llama", **{"intermediate_size": 64, **options})
    writer = GGUFWriter(path, "llama", split_max_tensors=split)
    for key, value in _gguf_keys(model.config).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"llama.{key}", value)
    vocabulary = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    assert not tokens or len(vocabulary) == model.config.vocab_size
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary if tokens else [f"<{i}>" for i in range(model.config.vocab_size)])
    if tokens:
        writer.add_token_merges(["a b"])
    if template:
        writer.add_chat_template(template)
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    architecture = next(number for number, known in MODEL_ARCH_NAMES.items() if known == "llama")
    names, turn = get_tensor_name_map(architecture, model.config.num_hidden_layers), cycle(types)
    for full, weight in model.state_dict().items():
        base, dot, kind = full.rpartition(".") if full.endswith((".weight", ".bias")) else (full, "", "")
        if full == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        array = _as_llama_cpp_has_it(full, weight, model.config).numpy()
        matrix = array.ndim == 2 and array.shape[1] % 32 == 0
        wanted = next(turn) if matrix else "F32"
        if wanted.endswith("_K") and array.shape[1] % 256:
            wanted = "Q8_0"  # K-quants are made for rows of 256
        number = GGMLQuantizationType[wanted]
        data = some_q6_k(array.shape) if wanted == "Q6_K" else quants.quantize(array, number)
        writer.add_tensor(f"{names.get_name(base)}{dot}{kind}", data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _gguf_keys(config: Any) -> dict[str, int | float]:
    """What a file says of the shape of a model."""
    return {
        "block_count": config.num_hidden_layers, "embedding_length": config.hidden_size,
        "context_length": config.max_position_embeddings, "attention.head_count": config.num_attention_heads,
        "feed_forward_length": config.intermediate_size, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
    }  # fmt: skip


def some_q6_k(shape: tuple[int, ...]) -> Any:
    """Blocks of a K-quant, of small random weights: the package gguf reads them and writes none."""
    blocks = np.random.default_rng(0).integers(0, 256, (shape[0], shape[1] // 256, 210), dtype=np.uint8)
    blocks[:, :, -2:] = np.array([2e-5], np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def _as_llama_cpp_has_it(name: str, weight: Tensor, config: Any) -> Tensor:
    """A weight with the changes that llama.cpp makes while it converts a checkpoint."""
    if "q_proj" in name or "k_proj" in name:
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    return weight
