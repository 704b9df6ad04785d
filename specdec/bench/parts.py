"""What the entries of a suite may be: targets, drafts, modes, prompt sets, and how much to draft."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MARK = "[SYNTHETIC]"  # in every name of a draft that knows the text
Count = Annotated[int, Field(ge=1)]


def listed(value: Any) -> Any:
    """A value as a list of it, a list as it is."""
    return value if isinstance(value, list) else [value]


class Part(BaseModel):
    """A mapping of known keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Mode(Part):
    """How models are loaded: arguments of `SpecGenerator.from_pretrained` for the target, and a name.

    A draft model shares `dtype`, `device_map`, `backend` and `trust_remote_code`; `draft_options` are its own. `dtype`
    is the checkpoint's by default, float32 for the package's own pair.
    """

    name: str = ""
    dtype: str | None = None
    quantization: str | None = None
    gguf_file: str | None = None
    offload: str | None = None
    offload_folder: str | None = None
    max_memory: dict[str | int, str | int] | None = None
    device_map: str | dict[str, str | int] | None = None
    revision: str | None = None
    backend: str | None = None
    exactness: str | None = None
    trust_remote_code: bool | None = None
    draft_options: dict[str, Any] = {}

    @property
    def label(self) -> str:
        """Its name, or what it changes."""
        offload = self.offload and f"offload {self.offload}"
        parts = [self.dtype, self.quantization or self.gguf_file, offload, self.backend, self.exactness]
        return self.name or ", ".join(filter(None, parts)) or "as loaded"

    @property
    def loading(self) -> dict[str, Any]:
        """What the target is loaded with."""
        return {
            name: value
            for name, value in self.model_dump(exclude={"name", "draft_options"}).items()
            if value is not None
        }


class Prompts(Part):
    """Where prompts come from: a set of the package (`code`, `copy`, `text`) or a file.

    `count` of them are taken, spread over their categories. `chat` puts each through the tokenizer's chat template.
    """

    source: str
    count: Count = 8
    chat: bool = False

    @property
    def label(self) -> str:
        """The set's name, or the file's."""
        return Path(self.source).stem


class Drafting(Part):
    """How much to draft: options of `generate`."""

    schedule: str
    num_assistant_tokens: Count | None = None
    num_assistant_branches: Count | None = None
    assistant_confidence_threshold: float | None = None

    @property
    def label(self) -> str:
        """The schedule with its numbers."""
        numbers = [n for n in (self.num_assistant_tokens, self.assistant_confidence_threshold) if n is not None]
        branches = [] if self.num_assistant_branches is None else [f"branches {self.num_assistant_branches}"]
        return " ".join([self.schedule, *(f"{n:g}" for n in numbers), *branches])

    @property
    def options(self) -> dict[str, Any]:
        """What `generate` takes."""
        return self.model_dump(exclude_none=True)


class Synthetic(Part):
    """A SYNTHETIC draft: at every position its first guess is right with this chance, the second with the next, ….

    Its passes are those of the model `like`, by default the draft of the package's pair that is the target.
    """

    synthetic: Annotated[list[Annotated[float, Field(ge=0, le=1)]], BeforeValidator(listed), Field(min_length=1)]
    like: str = ""

    @property
    def label(self) -> str:
        """Its chances, and whose price it has."""
        return f"{', '.join(f'{rate:g}' for rate in self.synthetic)} at the price of {self.like}"


class Target(Part):
    """A target with drafts of its own."""

    target: str
    drafts: list[str | Synthetic]
