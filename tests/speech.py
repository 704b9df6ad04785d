"""A tiny Whisper with windows of one second, its tokenizer and feature extractor, and sounds for it."""

from typing import Any

import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import GenerationConfig, PreTrainedModel, WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer

from tests.tiny import tiny

RATE = 16_000
WINDOW = 1  # seconds
SPECIALS = [
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"),
    *("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
]
STAMPS = [f"<|{i * 0.02:.2f}|>" for i in range(50 * WINDOW + 1)]


def processor() -> WhisperProcessor:
    """One token per byte, then Whisper's special tokens, then timestamps; 8 mels."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [a + b for a in "Ġabcdefgh" for b in "aeioustn"]  # some tokens of two letters
    pieces = [*letters, *words]
    merges = [(word[0], word[1]) for word in words]
    tokenizer = WhisperTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS[1:]})
    tokenizer.add_tokens(STAMPS)
    tokenizer.pad_token = SPECIALS[0]
    return WhisperProcessor(WhisperFeatureExtractor(feature_size=8, chunk_length=WINDOW), tokenizer)


def settings(tokenizer: WhisperTokenizer, **more: Any) -> GenerationConfig:
    """What a multilingual checkpoint's generation config holds."""
    word = tokenizer.convert_tokens_to_ids
    end = word(SPECIALS[0])
    common = {
        "bos_token_id": end, "eos_token_id": end, "pad_token_id": end,
        "decoder_start_token_id": word("<|startoftranscript|>"), "prev_sot_token_id": word("<|startofprev|>"),
        "no_timestamps_token_id": word("<|notimestamps|>"), "is_multilingual": True,
        "lang_to_id": {token: word(token) for token in ("<|en|>", "<|de|>")},
        "task_to_id": {task: word(f"<|{task}|>") for task in ("transcribe", "translate")},
        "suppress_tokens": [5, 6, word("<|startoflm|>"), word("<|nospeech|>")], "begin_suppress_tokens": [end],
        "alignment_heads": [[0, 1], [1, 0], [1, 3]], "return_timestamps": False, "max_initial_timestamp_index": 25,
        "max_length": 32,
    }  # fmt: skip
    return GenerationConfig(**{**common, **more})


def whisper(seed: int = 0, *, stamps: float = 0.0, end: float = 0.0, **options: Any) -> PreTrainedModel:
    """Random weights; `stamps` and `end` make timestamps and the end of the text likelier."""
    tokenizer = processor().tokenizer
    sizes = {"max_source_positions": 50 * WINDOW, "max_target_positions": 32, "median_filter_width": 7}
    model = tiny("whisper", vocab=len(tokenizer), seed=seed, **{**sizes, **options})
    model.generation_config = settings(tokenizer)
    bias = torch.zeros(len(tokenizer))
    bias[tokenizer.convert_tokens_to_ids(STAMPS[0]) :] = stamps
    bias[tokenizer.eos_token_id] = end
    model.proj_out.register_forward_hook(lambda module, args, output: output + bias)
    return model


def speech(seconds: float, seed: int = 0, rate: int = RATE) -> np.ndarray:
    """Tones that come and go, different in every second."""
    generator = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate)) / rate
    sound = np.zeros_like(time)
    for begin in np.arange(0, seconds, 0.25):
        here = (time >= begin) & (time < begin + 0.2)
        sound[here] += generator.uniform(0.05, 0.4) * np.sin(2 * np.pi * generator.uniform(150, 3000) * time[here])
    return (sound + 0.001 * generator.standard_normal(len(time))).astype(np.float32)
