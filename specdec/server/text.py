"""A text model of a server: decodes one prompt of a request into updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any

from specdec.core.drafts import Draft
from specdec.core.stats import Stats
from specdec.core.tree import Step
from specdec.decoding.processors.grammar import Grammar
from specdec.decoding.stopping import StopTexts
from specdec.errors import OptionError
from specdec.generator.drafts_by_name import copying_beside
from specdec.generator.generator import SpecGenerator
from specdec.generator.inputs.pictures import PIXELS, has_template
from specdec.generator.inputs.prompts import read_messages
from specdec.generator.job import Delta, Job
from specdec.generator.tokenizers import Detokenizer, Spelling, decode
from specdec.options.generate import Form, to_list
from specdec.options.resolve import refusing
from specdec.server.errors import ApiError
from specdec.server.infill import Infill
from specdec.server.messages import Message
from specdec.server.options import EVERYTHING, call_options, scoring
from specdec.server.protocol import ChatRequest, Generate, InfillRequest
from specdec.server.thinking import ThinkingBudget, ThinkingForm, thinking_of
from specdec.server.tools import CallForm, MarkedTokenizer, call_grammar, check_takes_tools, forms_of

LOG = logging.getLogger("specdec.server")
_TAIL = 32  # tokens at the end of a prompt, among which the opening of thoughts is


@dataclass(frozen=True)
class TokenScore:
    """One token: its spelling, its log-probability under the target, and the most likely tokens with theirs.

    A prompt's first token is not predicted, so both are None. `length`: how many characters the text gained by it.
    """

    spelling: Spelling
    length: int
    log_prob: float | None = None
    top: Sequence[tuple[int, Spelling, float]] | None = None


@dataclass(frozen=True)
class Started:
    """The request's options are valid, and its prompt is tokenized; `kv_budget` may still refuse it.

    `thinks`: the answer begins with thoughts, whose opening the prompt has.
    """

    prompt_tokens: int
    thinks: bool = False


@dataclass(frozen=True)
class TextDelta:
    """New text of choice `row`; the first is the prompt where the request has `echo`.

    `tokens` counts its new tokens, `spans` are parts of it and whether the draft proposed them, `finish` is the finish
    reason of the last delta, and `stop` the stop text that was cut off.
    """

    row: int
    text: str
    tokens: int
    finish: str | None = None
    spans: Sequence[tuple[str, bool]] = ()
    scores: Sequence[TokenScore] = ()
    stop: str | None = None


@dataclass(frozen=True)
class PromptRequest:
    """One prompt of a request: text, token ids, or None for the messages of a chat.

    `salt` separates clients in the prefix cache. With `chunk`, every delta has that many tokens, so that sizes do not
    reveal what the target accepted. `max_new_tokens` is the server's limit.
    """

    request: Generate
    content: str | list[int] | None = None
    salt: str | None = None
    chunk: int | None = None
    max_new_tokens: int | None = None


class TextModel:
    """A generator, and what requests must know about it.

    `context`: the most tokens of prompt and answer together (encoder-decoder: of each). `pixels`: the most pixels of a
    picture. Raises OptionError without a tokenizer.
    """

    task = "text"

    def __init__(
        self, name: str, generator: SpecGenerator, *, context: int | None = None, pixels: int = PIXELS
    ) -> None:
        if generator.tokenizer is None:
            raise OptionError(f"the model {name!r} has no tokenizer: a server reads and writes text")
        self.name, self.generator, self.tokenizer, self._pixels = name, generator, generator.tokenizer, pixels
        self.is_encoder_decoder, config = generator.target.is_encoder_decoder, generator.target.config
        lengths = (generator.target.max_positions, getattr(config, "max_position_embeddings", None), context)
        self.context = min((number for number in lengths if number), default=4096)
        if context is not None and context > self.context:
            LOG.warning("`context` %d of the model %r is more than it has: %d tokens", context, name, self.context)
        self.chats = has_template(self.tokenizer, self.generator.processor)
        defaults = generator.options()
        self._ends, self._stops, self._beams = defaults.eos_ids, to_list(defaults.stop_strings), defaults.num_beams
        self._drawing = {name: value for name, value in EVERYTHING.items() if name not in defaults.model_fields_set}

    def warm_up(self) -> None:
        """Decodes a token."""
        self.generator.generate([[0]], max_new_tokens=1, do_sample=False)

    def run(self, prompt: PromptRequest, notify: Callable[[], object]) -> Generator[Started | TextDelta | Stats | None]:
        """Decodes a prompt, at last into its statistics; yields None where nothing is new until `notify` is called.

        The first step tokenizes and checks, and may take long. Raises OptionError and ApiError for an invalid request.
        Closing it cancels the call.
        """
        request, inputs = prompt.request, self._inputs(prompt)
        ids, thinking = ids_in(inputs), self.thinking(request)
        with refusing():
            tokenizer = self._marking(request, thinking)
            end = "" if thinking is None else tokenizer.decode(ids[-_TAIL:]).rstrip()
            thinks = thinking is not None and end.endswith(thinking.opening)
            options = self._options(prompt, ids, tokenizer, thinking, thinks=thinks)
            job = self.generator.submit(inputs, **options)
        echo = (yield from self._echo(prompt, ids, notify)) if getattr(request, "echo", False) else None
        yield Started(len(ids), thinks)
        if echo is not None:
            yield from (replace(echo, row=row) for row in range(request.n))
        stops = [] if request.include_stop_str_in_output else [*request.stops, *self._stops]
        before = [] if echo is None or self.is_encoder_decoder else ids
        is_empty = request.most_tokens == 0  # the prompt is read, and scored
        rows = [_Row(tokenizer, prompt, row, stops, before) for row in range(request.n)]
        # The tokens of thoughts are counted round by round.
        stream = request.stream or request.return_drafted or request.top is not None or thinking is not None
        with closing(_polled(job, notify, stream=stream)) as rounds:
            for deltas in rounds:
                if deltas is None:
                    yield None
                for delta in () if is_empty else deltas or ():
                    for row in rows if options["num_return_sequences"] == 1 else [rows[delta.row]]:
                        yield from row.deltas(delta)
        if is_empty:
            yield from (TextDelta(row, "", 0, "length") for row in range(request.n))
        assert job.result is not None
        assert job.result.stats is not None
        yield job.result.stats

    def _inputs(self, prompt: PromptRequest) -> dict[str, Any]:
        """The model's inputs: an empty text becomes a token."""
        request, content = prompt.request, prompt.content
        if isinstance(request, ChatRequest):
            inputs = self.read(request.messages, **request.template_options)
        elif request.gap is not None:
            inputs = {"input_ids": [self._infill(request).prompt(*request.gap)]}
        else:
            ids = content if isinstance(content, list) else list(self.tokenizer(content, verbose=False)["input_ids"])
            inputs = {"input_ids": [ids]}
        if not len(inputs["input_ids"][0]):
            bos = self.generator.target.model.generation_config.bos_token_id
            return {"input_ids": [to_list(bos)[:1] or [0]]}
        return inputs

    @property
    def fills_gaps(self) -> bool:
        """Whether the tokenizer has tokens for a text before a suffix."""
        try:
            Infill(self.tokenizer, self.name)
        except ApiError:
            return False
        return True

    def _infill(self, request: Generate) -> Infill:
        param = "input_suffix" if isinstance(request, InfillRequest) else "suffix"
        return Infill(self.tokenizer, self.name, param)

    def read(self, messages: Sequence[Message], **how: Any) -> dict[str, Any]:
        """The model's inputs for a conversation; `how`: arguments of the chat template.

        Raises a 400 without a template, OptionError where it refuses the messages, and for pictures that cannot be
        read.
        """
        plain, processor = [message.plain for message in messages], self.generator.processor
        if any(message.pictures for message in messages):
            if not self.generator.target.reads_media or processor is None:
                raise ApiError(400, f"the model {self.name!r} reads no pictures: leave them out", param="messages")
        elif not self.chats:
            raise ApiError(400, f"the model {self.name!r} has no chat template: use /v1/completions", code="no_chat")
        elif any(message.role == "tool" or message.tool_calls for message in messages):
            check_takes_tools(self._template, self.name, "messages")
        return read_messages(plain, self.tokenizer, processor, pixels=self._pixels, **how)

    def _echo(
        self, prompt: PromptRequest, ids: list[int], notify: Callable[[], object]
    ) -> Generator[None, None, TextDelta]:
        """The prompt's text, and its tokens' scores with `logprobs`; raises a 400 for scores of an encoder's input."""
        # what a token of the answer may change of its end belongs to the answer
        text, top = Detokenizer(self.tokenizer).push(ids, last=self.is_encoder_decoder), prompt.request.top
        if top is None:
            return TextDelta(0, text, 0)
        if self.is_encoder_decoder:
            message = f"{self.name!r} is an encoder-decoder, whose prompts have no `logprobs`: leave out `echo`"
            raise ApiError(400, message, param="echo")
        scorer = Scorer(self.tokenizer)
        scores = [scorer.score(ids[0])]
        if len(ids) > 1:
            with closing(_polled(scoring(self.generator, ids, top, prompt.salt), notify)) as rounds:
                for deltas in rounds:
                    if deltas is None:
                        yield None
                    for step in (step for delta in deltas or () for step in delta.steps):
                        scores.append(scorer.score_of(step))
        return TextDelta(0, text, 0, scores=scores)

    def _options(
        self, prompt: PromptRequest, ids: list[int], tokenizer: Any, thinking: ThinkingForm | None, *, thinks: bool
    ) -> dict[str, Any]:
        """The options of the call; stop texts are looked for in what `tokenizer` decodes."""
        request = prompt.request
        begin = 1 if self.is_encoder_decoder else len(ids)
        options = call_options(request, self._drawing, self.generator.draft, num_beams=self._beams)
        options |= {"max_new_tokens": self._room(prompt, len(ids)), "cache_salt": prompt.salt}
        width, usual = self.generator.target.vocab_size, [] if request.ignore_eos else self._ends
        if max(request.stop_token_ids or (), default=0) >= width:
            message = f"`stop_token_ids` must be below {width}, which the model knows"
            raise ApiError(400, message, param="stop_token_ids")
        ends = [*usual, *(request.stop_token_ids or ())]
        if request.gap is not None and not request.ignore_eos:
            ends += self._infill(request).ends
        options["eos_token_id"] = ends
        if request.stops:
            options["stopping_criteria"] = [StopTexts(partial(decode, tokenizer), request.stops, lambda _: begin)]
        processors = list[Any]()
        marks = [] if thinking is None else [thinking.opening, thinking.closing]
        tokens = [self.tokenizer.encode(mark, add_special_tokens=False) for mark in marks]
        if (form := next(iter(request.forms), None) or self._form_of_calls(request)) is not None:
            processors.append(self._grammar(form, ends))
            processors[0].follows = tokens[1] if thinks else ()
        if isinstance(request, ChatRequest) and request.thinking_token_budget is not None and tokens:
            processors.append(ThinkingBudget(request.thinking_token_budget, begin, *tokens, thinks=thinks))
        if processors:
            options["logits_processor"] = processors
        if request.constraints:
            encode = partial(self.tokenizer.encode, add_special_tokens=False)
            options["force_words_ids"] = [
                encode(phrase) if isinstance(phrase, str) else [encode(text) for text in phrase]
                for phrase in request.constraints
            ]
        if request.top is not None:
            options["top_logprobs"] = request.top
        if request.prediction is not None and request.prediction.text:
            options["prediction"] = request.prediction.text
            if (draft := self._predictor) is not None:
                options["assistant_model"] = draft
        return options

    @cached_property
    def _predictor(self) -> Draft | None:
        """The draft for predictions; None where the model's own reads them."""
        draft = copying_beside(self.generator.draft)
        return None if draft is self.generator.draft else draft

    def calls(self, request: Generate) -> list[CallForm]:
        """How the answer writes calls; none without tools. Raises a 400 where this is not known of the model."""
        if not isinstance(request, ChatRequest) or not request.offered:
            return []
        return forms_of(self._template, self.name)

    def thinking(self, request: Generate) -> ThinkingForm | None:
        """How the answer writes thoughts; None for models that write none, and for completions."""
        return thinking_of(self._template) if isinstance(request, ChatRequest) else None

    def _marking(self, request: Generate, thinking: ThinkingForm | None) -> Any:
        """The tokenizer, which shows the marks of calls and thoughts also where they are special tokens."""
        text = "".join(form.text for form in self.calls(request)) + (thinking.text if thinking else "")
        marks = {token: name for name, token in self._marks.items() if name in text}
        return MarkedTokenizer(self.tokenizer, marks) if marks else self.tokenizer

    def _grammar(self, form: Form, ends: Sequence[int]) -> Grammar:
        """The grammar of a form; after a complete text one of the call's end tokens, `ends`, follows."""
        return self.generator.grammars.make(form, self.tokenizer, ends or [self.tokenizer.eos_token_id])

    def _form_of_calls(self, request: Generate) -> Form | None:
        """The form of calls; raises an OptionError that names a tool whose parameters are no schema."""
        if not isinstance(request, ChatRequest) or not (forms := self.calls(request)):
            return None
        for place, tool in enumerate(request.callable):
            self._grammar(Form("json", tool.parameters, f"tools.{place}.function.parameters"), self._ends)
        grammar = call_grammar(forms[0], request, self._marks, self._ends)
        return None if grammar is None else Form("grammar", grammar, "tools")

    @property
    def _template(self) -> str:
        """The chat template for messages with tools; empty without one."""
        if template := getattr(self.generator.processor, "chat_template", None):
            return str(template)
        return str(self.tokenizer.get_chat_template(tools=[{}])) if self.chats else ""

    @cached_property
    def _marks(self) -> dict[str, int]:
        """The tokens beside the vocabulary proper."""
        width = self.generator.target.vocab_size
        return {name: token for name, token in self.tokenizer.get_added_vocab().items() if token < width}

    def _room(self, prompt: PromptRequest, length: int) -> int:
        """The most new tokens after a prompt of `length` tokens, at least one; raises a 400 where none fits the
        context.
        """
        room = self.context - (1 if self.is_encoder_decoder else length)
        if length > self.context or room < 1:
            message = f"this model's context is {self.context} tokens, and the request has a prompt of {length} tokens"
            param = "messages" if isinstance(prompt.request, ChatRequest) else "prompt"
            raise ApiError(400, f"{message}: shorten it", param=param, code="context_length_exceeded")
        most = [number for number in (prompt.request.most_tokens, prompt.max_new_tokens) if number is not None]
        return max(min([room, *most]), 1)


class _Row:
    """One choice: turns a sequence's tokens into text, which continues the tokens `before`."""

    def __init__(
        self, tokenizer: Any, prompt: PromptRequest, row: int, cut_before: Sequence[str], before: Sequence[int]
    ) -> None:
        request, self._row = prompt.request, row
        self._text, self._scorer = Detokenizer(tokenizer, cut_before, before), Scorer(tokenizer, before)
        self._drafted, self._top, self._chunk = request.return_drafted, request.top, prompt.chunk
        self._pending: list[tuple[Step, bool]] = []  # and whether the draft proposed it

    def deltas(self, delta: Delta) -> Iterator[TextDelta]:
        """The deltas of a round: its tokens, or with `chunk` the whole groups of that many tokens that are pending.

        The last round's rest follows, in whatever size.
        """
        self._pending += [(step, place < delta.accepted) for place, step in enumerate(delta.steps)]
        size = self._chunk or len(self._pending)
        while len(self._pending) >= size or (self._pending and delta.finish is not None):
            group, self._pending = self._pending[:size], self._pending[size:]
            yield self._delta(group, None if self._pending else delta.finish)

    def _delta(self, group: Sequence[tuple[Step, bool]], finish: str | None) -> TextDelta:
        runs = [(list(run), drafted) for drafted, run in groupby(group, lambda pair: self._drafted and pair[1])]
        spans = []
        for place, (run, drafted) in enumerate(runs, 1):
            ids = [step.token for step, _ in run]
            spans.append((self._text.push(ids, last=finish is not None and place == len(runs)), drafted))
        scores = [self._scorer.score_of(step) for step, _ in group] if self._top is not None else []
        text = "".join(text for text, _ in spans)
        spans = [span for span in spans if span[0]] if self._drafted else []
        reason = None if finish is None else "length" if finish in ("length", "time") else "stop"  # OpenAI's words
        return TextDelta(self._row, text, len(group), reason, spans, scores, self._text.stop)


def _polled(job: Job, notify: Callable[[], object], *, stream: bool = True) -> Generator[list[Delta] | None]:
    """The deltas of a job, and None where there are none until `notify` is called; closing it cancels the job."""
    job.start(notify, stream=stream)
    try:
        while job.result is None:
            yield None
            yield from job.take()
    finally:
        job.cancel()


class Scorer:
    """Spells the tokens of one text, each after the tokens before it."""

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()) -> None:
        self._text = Detokenizer(tokenizer, before=before)

    def score(self, token: int, **scores: Any) -> TokenScore:
        """The score of the next token."""
        spelling = self._text.spell(token)
        return TokenScore(spelling, len(self._text.push([token])), **scores)

    def score_of(self, step: Step) -> TokenScore:
        """The score of a step's token."""
        assert step.top is not None
        top = [(token, self._text.spell(token), _finite(value)) for token, value in zip(*step.top, strict=True)]
        return self.score(step.token, log_prob=_finite(step.log_prob), top=top)


def _finite(value: float | None) -> float:
    """A log-probability within [-9999, 0]: JSON has no infinities."""
    return max(-9999.0, min(value if value is not None else 0.0, 0.0))


def cached_tokens(stats: Stats) -> int:
    """Tokens of a prompt that no choice read again: choices read the prompt together."""
    return min((row.cached_prompt_tokens for row in stats.per_row), default=0)


def ids_in(inputs: Mapping[str, Any]) -> list[int]:
    """The prompt's token ids among a model's inputs."""
    ids = inputs["input_ids"]
    return list(ids[0] if isinstance(ids, list) else ids[0].tolist())
