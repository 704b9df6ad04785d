"""Requests: OpenAI's fields, vLLM's, and specdec's own; every number has bounds.

null means that a field is absent. Unsupported fields are refused unless their value has no effect; hints, which change
no text, are dropped, and named once in the log.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from specdec.core.draft_schedules import SCHEDULES
from specdec.options.fields import SAMPLING
from specdec.server.errors import FieldError
from specdec.server.sent import Name, Sent, Text, without_nulls
from specdec.server.tool_fields import ToolCalls, ToolUse

LOG = logging.getLogger("specdec.server")
_FORMS = ("json", "regex", "grammar", "choice")
_LIMITS = ("max_tokens", "max_completion_tokens")
_ENTRIES = 1024  # of an object with any names
_LONGEST_STOP, _LONGEST_GRAMMAR = 256, 65_536


def _few(data: Any) -> Any:
    """An object's first entries, one more than allowed: each could be a fault."""
    present = without_nulls(data)
    return dict(islice(present.items(), _ENTRIES + 1)) if isinstance(present, dict) else present


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[TokenId], Field(min_length=1, max_length=2**20, fail_fast=True)]
Count = Annotated[int, Field(ge=1, le=2**20)]
Least = Annotated[int, Field(ge=0, le=2**20)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Stop = Annotated[Text, Field(min_length=1, max_length=_LONGEST_STOP)]
Grammar = Annotated[Text, Field(min_length=1, max_length=_LONGEST_GRAMMAR)]
Phrase = Annotated[Text, Field(min_length=1, max_length=_LONGEST_STOP)]
Json = dict[str, Any] | Grammar
Choices = Annotated[list[Phrase], Field(min_length=1, max_length=1024)]
Biases = Annotated[dict[Annotated[str, Field(max_length=12)], Bias], Field(max_length=_ENTRIES), BeforeValidator(_few)]
Alternatives = Annotated[list[Phrase], Field(min_length=1, max_length=64)]
Constraints = Annotated[list[Phrase | Alternatives], Field(min_length=1, max_length=16)]
TemplateOptions = Annotated[dict[Literal["enable_thinking"], bool], BeforeValidator(_few)]

# Field -> its values without effect, and the message about any other.
_TOOLS = "chats have tools, with `tools`"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), _TOOLS),
    "tool_choice": (("none", "auto"), _TOOLS),
    "functions": (([],), "pass `tools`"),
    "function_call": (("none", "auto"), "pass `tool_choice`"),
    "parallel_tool_calls": ((True, False), _TOOLS),
    "modalities": ((["text"],), "only text is written: leave it out"),
    "audio": ((), "only text is written: leave it out"),
    "web_search_options": ((), "nothing is searched: leave it out"),
    "suffix": (("",), "text cannot be filled in before a suffix: leave it out"),
    "best_of": ((1,), "use `num_samples` and `n`, the best of samples by their log-probability"),
    "chat_template": ((), "templates of clients are not run: leave it out"),
    "prompt_embeds": ((), "embeddings are not read: pass text or token ids"),
}
HINTS = (
    *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "store", "metadata", "service_tier"),
    *("reasoning_effort", "verbosity"),
)
_NAMED = set[str]()  # hints that the log has named
# Fields of messages: clients send answers back, with all fields that a message can have.
REFUSED_OF_MESSAGES = {
    "function_call": "pass `tool_calls`",
    "audio": "only text is read: leave it out",
    "refusal": "pass its text as `content`",
}


class Message(Sent):
    """A message of a conversation: text, and pictures for models that see."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Parts | None = None
    name: Name | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("role") == "function":
            raise FieldError("`role` 'function' is not supported: pass the role 'tool'")
        for name, why in REFUSED_OF_MESSAGES.items():
            if data.get(name):
                raise FieldError(f"`{name}` is not supported: {why}")
        parts = data.get("content")
        for part in parts if isinstance(parts, list) else []:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in ("text", "image_url"):
                why = "only text and pictures (image_url) are read"
                raise FieldError(f"`content` of type {json.dumps(kind[:40])} is not supported: {why}")
        return {name: value for name, value in data.items() if name not in (*REFUSED_OF_MESSAGES, "annotations")}

    @model_validator(mode="after")
    def _of_its_role(self) -> Message:
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise FieldError("`tool_call_id` and the role 'tool' go together: pass both")
        if self.tool_calls and self.role != "assistant":
            raise FieldError("`tool_calls` are the assistant's: leave them out of messages of other roles")
        return self

    @property
    def text(self) -> str:
        """Its text alone."""
        return _joined(self.content or "")

    @property
    def characters(self) -> int:
        """The length of its text and of the arguments of its calls."""
        return len(self.text) + sum(len(call.function.arguments) for call in self.tool_calls or ())

    @property
    def pictures(self) -> list[str]:
        """The data URLs of its pictures."""
        return [part.image_url.url for part in self._parts if part.image_url is not None]

    @property
    def _parts(self) -> list[Part]:
        return self.content if isinstance(self.content, list) else []

    @property
    def plain(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        content = [part.plain for part in self._parts] if self.pictures else self.text
        plain = {"role": "system" if self.role == "developer" else self.role, "content": content}
        calls = [call.plain for call in self.tool_calls or ()] or None
        plain |= without_nulls({"tool_call_id": self.tool_call_id, "tool_calls": calls})
        return plain if self.name is None else {**plain, "name": self.name}


class TextPart(Sent):
    """A part of a text."""

    type: Literal["text"]
    text: Text


class PictureUrl(Sent):
    """A picture in a data URL; `detail` is a hint."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None

    @field_validator("url")
    @classmethod
    def _is_data(cls, url: str) -> str:
        if not url.startswith("data:image/"):
            raise FieldError("only data URLs are read (data:image/png;base64,…), and nothing is fetched")
        return url


class Part(Sent):
    """A part of a message: a text, or a picture."""

    type: Literal["text", "image_url"]
    text: Text | None = None
    image_url: PictureUrl | None = None

    @model_validator(mode="after")
    def _has_its_own(self) -> Part:
        if getattr(self, self.type) is None or None not in (self.text, self.image_url):
            raise FieldError(f"a part of type '{self.type}' has a field `{self.type}`, and no other")
        return self

    @property
    def plain(self) -> dict[str, Any]:
        """The part as chat templates take it."""
        if self.image_url is None:
            return {"type": "text", "text": self.text}
        return {"type": "image", "image": self.image_url.url}


TextParts = Annotated[list[TextPart], Field(fail_fast=True)]
Parts = Annotated[list[Part], Field(fail_fast=True)]
Message.model_rebuild()


def _joined(content: str | Sequence[TextPart | Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text or "" for part in content)


class StreamOptions(Sent):
    """Options of a stream: usage at its end, usage in every event, padding of events."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Prediction(Sent):
    """A draft of the answer."""

    type: Literal["content"]
    content: Text | TextParts

    @property
    def text(self) -> str:
        return _joined(self.content)


class JsonSchema(Sent):
    """A named schema; answers always follow it, whatever `strict` is."""

    name: Name = "schema"
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Sent):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise FieldError("`json_schema` and the type 'json_schema' go together: pass both")
        return self


class StructuredOutputs(Sent):
    """vLLM's field for the form of an answer; the same as `guided_json`, `guided_regex` and so on."""

    json_: Json | None = Field(default=None, alias="json", description="A JSON schema that the answer fits.")
    regex: Grammar | None = Field(default=None, description="A regular expression that the whole answer matches.")
    grammar: Grammar | None = Field(default=None, description="A grammar of the answer, in Lark's notation.")
    choice: Choices | None = Field(default=None, description="Texts, one of which is the answer.")

    @property
    def forms(self) -> dict[str, Any]:
        return {"json": self.json_, "regex": self.regex, "grammar": self.grammar, "choice": self.choice}


class Generate(Sent):
    """Fields of all requests for text."""

    model: Name | None = None
    max_tokens: Count | None = None
    min_tokens: Least = 0
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    # sampling
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**20)] | None = None
    min_p: Share | None = None
    typical_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Positive = 1.0
    no_repeat_ngram_size: Annotated[int, Field(ge=0, le=1024)] = 0
    logit_bias: Biases | None = None
    # structured output
    response_format: ResponseFormat | None = None
    guided_json: Json | None = None
    guided_regex: Grammar | None = None
    guided_grammar: Grammar | None = None
    guided_choice: Choices | None = None
    structured_outputs: StructuredOutputs | None = None
    # specdec's strategies and drafts
    num_beams: Annotated[int, Field(ge=1, le=1024)] = 1
    num_beam_groups: Annotated[int, Field(ge=1, le=1024)] = 1
    diversity_penalty: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    length_penalty: Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)] | None = None
    early_stopping: bool | Literal["never", "exhaustive"] | None = None
    constraints: Constraints | None = None
    num_samples: Annotated[int, Field(ge=1, le=1024)] | None = None
    ranking: Literal["mean", "sum"] | None = None
    penalty_alpha: Share | None = None
    sampling: Literal[tuple(SAMPLING)] | None = None  # type: ignore[valid-type]
    speculate: bool = True
    schedule: Literal[tuple(SCHEDULES)] | None = None  # type: ignore[valid-type]
    num_assistant_tokens: Annotated[int, Field(ge=1, le=256)] | None = None
    num_assistant_branches: Annotated[int, Field(ge=1, le=64)] | None = None
    assistant_confidence_threshold: Share | None = None
    prediction: Prediction | None = None
    return_metrics: bool = False
    return_drafted: bool = False

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, (neutral, why) in REFUSED.items():
            if name in cls.model_fields:
                continue
            if name in data and data[name] is not None and not any(_same(data[name], value) for value in neutral):
                raise FieldError(f"`{name}` is not supported: {why}")
        _name_hints({name for name in HINTS if data.get(name) is not None})
        return {name: data[name] for name in data if name not in {*REFUSED, *HINTS} - {*cls.model_fields}}

    @model_validator(mode="after")
    def _together(self) -> Generate:
        if self.stream_options is not None and not self.stream:
            raise FieldError("`stream_options` need `stream`: set it, or leave them out")
        named = [field for field, _, _ in self.forms]
        if len(named) > 1:
            raise FieldError(f"`{named[0]}` and `{named[1]}` each set the form of the answer: pass one of them")
        if (most := self.most_tokens) is not None and self.min_tokens > most:
            limit = next((name for name in _LIMITS if getattr(self, name, None) is not None), None)
            known = f"`{limit}`={most}" if limit else f"{most}, which is the most without `max_tokens`"
            raise FieldError(f"`min_tokens`={self.min_tokens} is more than {known}: lower the one or raise the other")
        return self

    @property
    def forms(self) -> list[tuple[str, str, Any]]:
        """The forms that the request sets: the field, the kind (json, regex, …), and the source."""
        found = [(f"guided_{kind}", kind, getattr(self, f"guided_{kind}")) for kind in _FORMS]
        nested = self.structured_outputs.forms if self.structured_outputs is not None else {}
        found += [(f"structured_outputs.{kind}", kind, value) for kind, value in nested.items()]
        if self.response_format is not None and self.response_format.type != "text":
            schema = self.response_format.json_schema
            own = schema.schema_ if schema is not None else None
            found.append(("response_format", "json", {"type": "object"} if own is None else own))
        return [form for form in found if form[2] is not None]

    @property
    def top(self) -> int | None:
        """How many most likely tokens are returned with each token; None without log-probabilities."""
        raise NotImplementedError

    @property
    def most_tokens(self) -> int | None:
        """The length limit; None for the rest of the context."""
        raise NotImplementedError

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


def _name_hints(names: set[str]) -> None:
    """Logs the names that the log has not named yet."""
    for name in sorted(names - _NAMED):
        _NAMED.add(name)
        LOG.info("requests have `%s`, which changes no text: it is ignored", name)


def _same(value: Any, neutral: Any) -> bool:
    return type(value) is type(neutral) and bool(value == neutral)


class CompletionRequest(Generate):
    """Continues one text or several."""

    prompt: Text | Tokens | Annotated[list[Text | Tokens], Field(min_length=1, max_length=1024, fail_fast=True)]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def most_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default


class ChatRequest(ToolUse, Generate):
    """Answers a conversation."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateOptions | None = None

    @model_validator(mode="after")
    def _agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("`top_logprobs` needs `logprobs`: set it to true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise FieldError("`max_tokens` and `max_completion_tokens` are the same: pass one of them")
        if self.continue_final_message and self.add_generation_prompt:
            raise FieldError("`continue_final_message` and `add_generation_prompt` contradict: pass one of them")
        if self.offered and self.forms:
            raise FieldError(f"`{self.forms[0][0]}` sets the form of the answer, and `tools` too: pass one of them")
        return self

    @property
    def template_options(self) -> dict[str, Any]:
        """The arguments of the chat template."""
        goes_on = self.continue_final_message
        how = {
            "continue_final_message": goes_on,
            "add_generation_prompt": self.add_generation_prompt is not False and not goes_on,
            **(self.chat_template_kwargs or {}),
        }
        return how | ({"tools": [tool.plain for tool in self.offered]} if self.offered else {})

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(Sent):
    """Text or a conversation to tokenize."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("pass `prompt` or `messages`")
        return self


class DetokenizeRequest(Sent):
    """Token ids to decode."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(max_length=2**20, fail_fast=True)]
