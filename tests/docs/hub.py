"""The models that the documents name, as tiny random ones in a cache of the hub: what loads them runs as printed."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.folders import WIDTH, byte_tokenizer, saved_gguf
from tests.heads import eagle_folder
from tests.pictures import with_processor
from tests.pipelines.models import CHAT, model
from tests.pipelines.models import tokenizer as sentence_tokenizer
from tests.speech import processor, whisper
from tests.tiny import tiny

COMMIT = "0" * 40


def chat_tokenizer(*, backwards: bool = False) -> PreTrainedTokenizerBase:
    """Bytes, with a chat template."""
    made = byte_tokenizer(backwards=backwards)
    made.chat_template = CHAT
    return made


def _saved(texts: Callable[[], Any], make: Callable[[], PreTrainedModel]) -> Callable[[Path], None]:
    """Writes a model and what makes its inputs into a folder."""

    def save(folder: Path) -> None:
        texts().save_pretrained(folder)
        make().save_pretrained(folder)

    return save


def _llama(seed: int, *, backwards: bool = False, **sizes: Any) -> Callable[[Path], None]:
    tokenizer = partial(chat_tokenizer, backwards=backwards)
    return _saved(tokenizer, partial(tiny, "llama", vocab=WIDTH, seed=seed, **sizes))


def _llava(folder: Path) -> None:
    model, made = with_processor()
    made.save_pretrained(folder)
    model.save_pretrained(folder)


def _head(folder: Path) -> None:
    eagle_folder(folder, vocab_size=WIDTH, draft_vocab_size=WIDTH)


def _gguf(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({}))
    saved_gguf(folder / "SmolLM2-1.7B-Instruct-Q4_0.gguf", vocab=WIDTH + 1, tokens=True)


_sentences = partial(sentence_tokenizer, ends=True, most=100)
MODELS: dict[str, Callable[[Path], None]] = {
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": _llama(0),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _llama(1),
    "Qwen/Qwen2.5-0.5B-Instruct": _llama(2, backwards=True),
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": _llama(4),
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": _llama(5),
    "Qwen/Qwen3-8B": _llama(3, num_hidden_layers=3),
    "RedHatAI/Qwen3-8B-speculator.eagle3": _head,
    "openai/whisper-small.en": _saved(processor, whisper),
    "distil-whisper/distil-small.en": _saved(processor, partial(whisper, 1)),
    "facebook/bart-large-cnn": _saved(_sentences, partial(model, "bart", 0)),
    "sshleifer/distilbart-cnn-6-6": _saved(_sentences, partial(model, "bart", 1)),
    "llava-hf/llava-1.5-7b-hf": _llava,
    "bartowski/SmolLM2-1.7B-Instruct-GGUF": _gguf,
}


def write_files(folder: Path, text: str) -> None:
    """Puts the GGUF file that a text names, if it names one, into a folder of the reader's."""
    if (name := "target.Q4_K_M.gguf") in text:
        saved_gguf(folder / name, tokens=True, template=CHAT, vocab=WIDTH + 1)


def fill(cache: Path, text: str) -> None:
    """Puts those of the models that a text names into the cache, where they are not yet."""
    for name, save in MODELS.items():
        home = cache / f"models--{name.replace('/', '--')}"
        if name in text and not home.exists():
            (home / "refs").mkdir(parents=True)
            (home / "refs" / "main").write_text(COMMIT)
            save(home / "snapshots" / COMMIT)
