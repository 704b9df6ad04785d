"""Requests: OpenAI's fields, vLLM's, and specdec's own; every number has bounds.

null means that a field is absent. Unsupported fields are refused unless their value has no effect; hints are dropped,
and named once in the log.
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from specdec.core.draft_schedules import SCHEDULES
from specdec.errors import closest_name
from specdec.options.fields import SAMPLING
from specdec.options.generate import Form
from specdec.server.errors import FieldError
from specdec.server.messages import Messages, Name, Sent, Text, TextParts, Tool, Tools, content_text, without_nulls

LOG = logging.getLogger("specdec.server")
_FORMS = ("json", "regex", "grammar", "choice")
LENGTHS = ("max_output_tokens", "max_completion_tokens", "max_tokens", "n_predict")  # the first sent counts
_ENTRIES = 1024  # an object with any names has so many at most
_MOST_CALLS = 16  # one answer has so many at most
_LONGEST_PHRASE, _LONGEST_GRAMMAR = 256, 65_536


def _cap(data: Any) -> Any:
    """An object's first entries, one more than allowed: each could be a fault."""
    present = without_nulls(data)
    return dict(islice(present.items(), _ENTRIES + 1)) if isinstance(present, dict) else present


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[TokenId], Field(min_length=1, max_length=2**20, fail_fast=True)]
Least = Annotated[int, Field(ge=0, lt=2**31)]
Length = Annotated[int, Field(ge=-1, lt=2**31)]  # -1: the rest of the context, as in llama.cpp
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Phrase = Annotated[Text, Field(min_length=1, max_length=_LONGEST_PHRASE)]
Grammar = Annotated[Text, Field(min_length=1, max_length=_LONGEST_GRAMMAR)]
Json = dict[str, Any] | Grammar
Gap = tuple[str, str, list[tuple[str, str]]]
Choices = Annotated[list[Phrase], Field(min_length=1, max_length=1024)]
Biases = Annotated[dict[Annotated[str, Field(max_length=12)], Bias], Field(max_length=_ENTRIES), BeforeValidator(_cap)]
Alternatives = Annotated[list[Phrase], Field(min_length=1, max_length=64)]
Constraints = Annotated[list[Phrase | Alternatives], Field(min_length=1, max_length=16)]
TemplateOptions = Annotated[dict[Literal["enable_thinking"], bool], BeforeValidator(_cap)]

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
    "suffix": (("",), "completions have it"),
    "best_of": ((1,), "use `num_samples` and `n`, the best of samples by their log-probability"),
    "chat_template": ((), "templates of clients are not run: leave it out"),
    "prompt_embeds": ((), "embeddings are not read: pass text or token ids"),
    # llama.cpp's
    "mirostat": ((0,), "set `temperature`, `top_p` or `min_p`"),
    "repeat_penalty": ((1, 1.0), "`repetition_penalty` penalizes the tokens of the whole text"),
    # Ollama's
    "num_predict": ((), "did you mean `max_tokens`?"),
    "num_ctx": ((), "the server's flag `--context` sets the context: leave it out"),
    "options": (({},), "set its fields beside `model`, by OpenAI's names"),
}
HINTS = (
    *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "store", "metadata", "service_tier"),
    *("reasoning_effort", "verbosity", "truncation", "include"),
    # llama.cpp's
    *("cache_prompt", "id_slot", "n_keep", "n_cache_reuse", "n_indent", "samplers", "t_max_prompt_ms"),
    *("t_max_predict_ms", "timings_per_token", "return_progress", "return_tokens", "response_fields"),
    *("mirostat_tau", "mirostat_eta"),
)
_COMPARED = 10  # unknown fields that are compared with the fields
_NAMED = set[str]()  # hints that the log has named


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
        return content_text(self.content)


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

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, data: Any) -> Any:
        """In llama.cpp's form, the schema stands beside either type."""
        if not isinstance(data, dict) or data.get("schema") is None or data.get("json_schema") is not None:
            return data
        kind = "json_schema" if data.get("type") == "json_object" else data.get("type")
        return {**data, "type": kind, "json_schema": {"schema": data["schema"]}, "schema": None}

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


class Generate(Sent):
    """Fields of all requests for text."""

    usual_length: ClassVar[int | None] = None  # the length limit of requests without one

    model: Name | None = None
    max_tokens: Length | None = None
    n_predict: Length | None = None  # llama.cpp's `max_tokens`
    min_tokens: Least = 0
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    stop: Phrase | Annotated[list[Phrase], Field(max_length=64)] | None = None
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
        data = dict(data)
        if isinstance(stop := data.get("stop"), str | list):  # without texts that are empty
            data["stop"] = stop or None if isinstance(stop, str) else [text for text in stop if text != ""]
        for name, (neutral, why) in REFUSED.items():
            value = None if name in cls.model_fields else data.get(name)
            if value is not None and not any(type(value) is type(allowed) and value == allowed for allowed in neutral):
                raise FieldError(f"`{name}` is not supported: {why}")
        names = {*cls.model_fields, *REFUSED, *HINTS}
        for name in [name for name in without_nulls(data) if name not in names][:_COMPARED]:
            if name.isascii() and (near := closest_name(name[:_LONGEST_PHRASE], cls.model_fields)):
                raise FieldError(f"`{name}` is not known here: leave it out (did you mean `{near}`?)")
        for name in HINTS:
            if data.get(name) is not None and name not in _NAMED:
                _NAMED.add(name)
                LOG.info("requests have `%s`, which is ignored here", name)
        return {name: data[name] for name in data if name not in {*REFUSED, *HINTS} - {*cls.model_fields}}

    @model_validator(mode="after")
    def _together(self) -> Generate:
        if self.stream_options is not None and not self.stream:
            raise FieldError("`stream_options` need `stream`: set it, or leave them out")
        fields = [form.field for form in self.forms]
        if len(fields) > 1:
            raise FieldError(f"`{fields[0]}` and `{fields[1]}` each set the form of the answer: pass one of them")
        if fields and self.ignore_eos and not self.stop_token_ids:
            raise FieldError(f"`ignore_eos` lets no answer in the form of `{fields[0]}` end: leave one of them out")
        limit, most = self._limit
        if most is not None and self.min_tokens > most:
            way_out = "lower the one or raise the other"
            raise FieldError(f"`min_tokens`={self.min_tokens} is more than `{limit}`={most}: {way_out}")
        return self

    @property
    def forms(self) -> list[Form]:
        """The forms that the request sets."""
        forms = [Form(kind, getattr(self, f"guided_{kind}"), f"guided_{kind}") for kind in _FORMS]
        nested = {} if self.structured_outputs is None else self.structured_outputs.model_dump(by_alias=True)
        forms += [Form(kind, nested.get(kind), f"structured_outputs.{kind}") for kind in _FORMS]
        if self.response_format is not None and self.response_format.type != "text":
            schema = self.response_format.json_schema
            source = schema.schema_ if schema is not None else None
            forms.append(Form("json", {"type": "object"} if source is None else source, "response_format"))
        return [form for form in forms if form.source is not None]

    @property
    def top(self) -> int | None:
        """How many most likely tokens are returned with each token; None without log-probabilities."""
        raise NotImplementedError

    @property
    def prompts(self) -> list[Any]:
        """What is continued, texts or token ids; None for a conversation."""
        return [None]

    @property
    def gap(self) -> Gap | None:
        """The texts around a gap that the answer fills, and the names and texts of other files; None without a gap."""
        return None

    @property
    def most_tokens(self) -> int | None:
        """The length limit; None for the rest of the context."""
        return self._limit[1]

    @property
    def _limit(self) -> tuple[str, int | None]:
        limits = ((name, most) for name in LENGTHS if (most := getattr(self, name, None)) is not None)
        name, most = next(limits, ("max_tokens", self.usual_length))
        return name, None if most == -1 else most

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class CompletionRequest(Generate):
    """Continues one text or several."""

    usual_length: ClassVar[int | None] = 16  # OpenAI's

    prompt: Text | Tokens | Annotated[list[Text | Tokens], Field(min_length=1, max_length=1024, fail_fast=True)]
    suffix: Text | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _fills(self) -> CompletionRequest:
        if self.suffix and not isinstance(self.prompt, str):
            raise FieldError("`suffix` needs a `prompt` that is one text: pass one, or leave it out")
        if self.suffix and self.echo:
            raise FieldError("`suffix` and `echo` contradict: leave one of them out")
        return self

    @property
    def gap(self) -> Gap | None:
        return (str(self.prompt), self.suffix, []) if self.suffix else None

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


class InfillFile(Sent):
    """Another file, whose text helps to fill in a gap; llama.vim adds the `time` at which it was read."""

    filename: Name = "file"
    text: Text
    time: Any = None


class InfillRequest(CompletionRequest):
    """llama.cpp's request for the text between `input_prefix` with `prompt`, and `input_suffix`."""

    usual_length: ClassVar[int | None] = None

    prompt: Text = ""
    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: Annotated[list[InfillFile], Field(max_length=256, fail_fast=True)] = Field(default_factory=list)

    @model_validator(mode="after")
    def _is_one(self) -> InfillRequest:
        names = ("stream", "echo", "suffix", "include_stop_str_in_output")
        if name := next((name for name in names if getattr(self, name)), None):
            raise FieldError(f"`{name}` is not supported here: use /v1/completions")
        return self

    @property
    def gap(self) -> Gap:
        files = [(file.filename, file.text) for file in self.input_extra]
        return self.input_prefix + self.prompt, self.input_suffix, files


class ChatRequest(Generate):
    """Answers a conversation."""

    messages: Messages
    max_completion_tokens: Length | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateOptions | None = None
    thinking_token_budget: Least | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _agree(self) -> ChatRequest:
        names, choice = [tool.function.name for tool in self.tools or ()], self.tool_choice
        if len({*names}) < len(names):
            raise FieldError("`tools` have two functions of one name: give each its own")
        if not names and choice not in (None, "none", "auto"):
            raise FieldError("`tool_choice` needs `tools`: pass them, or leave it out")
        if isinstance(choice, Tool) and choice.function.name not in names:
            raise FieldError("`tool_choice` names none of the functions in `tools`: pass it there, too")
        if self.offered and self.forms:
            raise FieldError(f"`{self.forms[0].field}` sets the form of the answer, and `tools` too: pass one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("`top_logprobs` needs `logprobs`: set it to true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise FieldError("`max_tokens` and `max_completion_tokens` are the same: pass one of them")
        if self.continue_final_message and self.add_generation_prompt:
            raise FieldError("`continue_final_message` and `add_generation_prompt` contradict: pass one of them")
        return self

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model reads of: none where `tool_choice` is 'none'."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def callable(self) -> list[Tool]:
        """The tools that the answer may call."""
        name = self.tool_choice.function.name if isinstance(self.tool_choice, Tool) else None
        return [tool for tool in self.offered if name in (None, tool.function.name)]

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, Tool)

    @property
    def most_calls(self) -> int:
        return _MOST_CALLS if self.parallel_tool_calls and not isinstance(self.tool_choice, Tool) else 1

    @property
    def template_options(self) -> dict[str, Any]:
        """The arguments of the chat template."""
        how: dict[str, Any] = {str(name): value for name, value in (self.chat_template_kwargs or {}).items()}
        how["continue_final_message"] = self.continue_final_message
        how["add_generation_prompt"] = self.add_generation_prompt is not False and not self.continue_final_message
        if self.offered:
            how["tools"] = [tool.plain for tool in self.offered]
        return how

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Sent):
    """Text or a conversation to tokenize."""

    model: Name | None = None
    prompt: Text | None = Field(default=None, validation_alias=AliasChoices("prompt", "content"))  # llama.cpp's
    messages: Messages | None = None
    add_special_tokens: bool = Field(default=True, validation_alias=AliasChoices("add_special_tokens", "add_special"))
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _has_one_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("pass `prompt` or `messages`")
        return self


class DetokenizeRequest(Sent):
    """Token ids to decode."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(max_length=2**20, fail_fast=True)]
