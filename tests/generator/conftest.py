"""What tests of generators share: tokenizers without a library, and generators whose models must not run."""

from typing import Any

from specdec import SpecGenerator
from tests.tiny import silent, tiny


class Letters:
    """A tokenizer of letters, without a chat template."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [5 + ord(c) % 50 for c in text]}

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return "x" * len(ids)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("no template")


def idle(name: str, tokenizer: Any = None) -> SpecGenerator:
    """A generator whose model must not run."""
    generator = SpecGenerator(model := tiny(name), "suffix", tokenizer=tokenizer)
    silent(model)
    return generator
