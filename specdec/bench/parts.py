"""The entries of a suite: targets, drafts, modes, prompt sets, draft schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specdec.errors import OptionError
from specdec.models import check_source
from specdec.options.load import NAMES, Loading

Count = Annotated[int, Field(ge=1)]


def as_list(value: Any) -> Any:
    """A list of the value; a list as it is."""
    return value if isinstance(value, list) else [value]


class SuitePart(BaseModel):
    """A mapping that allows known keys alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Mode(SuitePart):
    """How models are loaded: fields of `Loading` for the target, and a name.

    A draft shares `dtype`, `device_map`, `backend` and `trust_remote_code`; `draft_options` hold for it alone, and
    `memory` for words of drafts that copy.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = ""
    draft_options: dict[str, Any] = {}
    memory: bool | str | list[str] = False

    @model_validator(mode="after")
    def _is_checked(self) -> Mode:
        loading, others = Loading.split(self.loading)
        if others:
            raise OptionError(f"`{next(iter(others))}` is no option of loading: pass one of {', '.join(NAMES)}")
        loading.of_draft(self.draft_options)
        return self

    @property
    def label(self) -> str:
        """The name, or the arguments that are set."""
        how = self.loading
        offload, rows = (how.get(name) for name in ("offload", "activations"))
        parts = [how.get("dtype"), how.get("quantization") or how.get("gguf_file"), offload and f"offload {offload}"]
        parts += [how.get("backend"), how.get("exactness"), rows and f"{rows} activations"]
        return self.name or ", ".join(filter(None, parts)) or "as loaded"

    @property
    def loading(self) -> dict[str, Any]:
        return {name: value for name, value in (self.model_extra or {}).items() if value is not None}

    def check(self, target: str, draft: str | None) -> None:
        """Raises OptionError for a target or draft that names no model, and LoadError where the hub cannot say."""
        how = Loading.split(self.loading)[0]
        check_source(target, how, "target")
        if draft is not None:
            check_source(draft, how.of_draft(self.draft_options), "draft")


class PromptSet(SuitePart):
    """`count` prompts of a set (`code`, `copy`, `text`) or a file, spread over its categories.

    `chat` applies the tokenizer's chat template.
    """

    source: str
    count: Count = 8
    chat: bool = False

    @property
    def label(self) -> str:
        return Path(self.source).stem


class Drafting(SuitePart):
    """Options of `generate` that say how much to draft."""

    schedule: str
    num_assistant_tokens: Count | None = None
    num_assistant_branches: Count | None = None
    assistant_confidence_threshold: float | None = None

    @property
    def label(self) -> str:
        numbers = [n for n in (self.num_assistant_tokens, self.assistant_confidence_threshold) if n is not None]
        branches = [] if self.num_assistant_branches is None else [f"branches {self.num_assistant_branches}"]
        return " ".join([self.schedule, *(f"{n:g}" for n in numbers), *branches])

    @property
    def options(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class Target(SuitePart):
    """A target and its drafts, by default the suite's."""

    target: str
    drafts: list[str] | None = None
