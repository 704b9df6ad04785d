"""A model that writes text, as a server has it: requests are prepared, followed and told piece by piece, in threads."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from specdec.core.stats import Stats
from specdec.core.tree import Step
from specdec.errors import OptionError
from specdec.generator.call import Delta
from specdec.generator.generator import SpecGenerator
from specdec.generator.output import Detokenizer, before_stop, decode
from specdec.options.checks import refusing
from specdec.options.generate import listed
from specdec.server.cancellation import Cancel
from specdec.server.errors import ApiError
from specdec.server.grammar import Form, Grammar
from specdec.server.options import call_options
from specdec.server.protocol import ChatRequest, Generate
from specdec.server.scoring import scored
from specdec.server.stops import StopTexts

_REASONS = {"eos": "stop", "stop": "stop", "criteria": "stop", "length": "length", "time": "length"}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")


@dataclass(frozen=True)
class TokenScore:
    """One token's text, its log-probability under the target, and the likeliest tokens with theirs.

    The first token of a prompt follows nothing, and has neither.
    """

    text: str
    log_prob: float | None = None
    top: Sequence[tuple[str, float]] | None = None


@dataclass(frozen=True)
class TextDelta:
    """New text of choice `row`: how many tokens it took, which parts came `drafted`, and why it ended, if it did."""

    row: int
    text: str
    tokens: int
    finish: str | None = None
    spans: Sequence[tuple[str, bool]] = ()
    scores: Sequence[TokenScore] = ()


@dataclass(frozen=True)
class Echo:
    """A prompt that is told before its answer, with the scores of its tokens where the answer's are told."""

    text: str = ""
    scores: Sequence[TokenScore] = ()


@dataclass(frozen=True)
class Started:
    """The prompt is read by the tokenizer, and the request is sound."""

    prompt_tokens: int
    echo: Echo | None = None


@dataclass(frozen=True)
class Finished:
    """The request is over."""

    stats: Stats


@dataclass(frozen=True)
class PromptRequest:
    """One prompt of a request, as a thread is handed it.

    `salt` keeps clients' texts apart; `chunk` is how many tokens a piece has, where rounds shall not show; `most` are
    the new tokens that the server allows.
    """

    request: Generate
    content: str | list[int] | None = None
    salt: str | None = None
    chunk: int | None = None
    most: int | None = None


class TextModel:
    """A generator, and what requests need to know of it.

    `context` is how many tokens prompt and answer may have together (an encoder's input: the prompt alone). `options`
    are the generator's defaults, of which requests must know how they sample.
    """

    task = "text"

    def __init__(
        self,
        name: str,
        generator: SpecGenerator,
        *,
        context: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if generator.tokenizer is None:
            raise OptionError(f"the model {name!r} has no tokenizer: a server reads and writes text")
        self.name, self.generator, self.tokenizer = name, generator, generator.tokenizer
        self.context = _context(generator, context)
        self.drafts = generator.drafter is not None
        self.predicts = generator.drafter is not None and generator.drafter.reads_predictions
        self.chats = bool(getattr(self.tokenizer, "chat_template", None))
        own = generator.target.model.generation_config.to_diff_dict() | dict(options or {})
        self._sampling = {name: own[name] for name in _SAMPLING if own.get(name) is not None}
        self._lock = threading.Lock()

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether a prompt is read by an encoder."""
        return self.generator.target.is_encoder_decoder

    def run(self, prompt: PromptRequest, cancel: Cancel) -> Generator[Started | TextDelta | Finished]:
        """What comes of a request, in order; raises OptionError and ApiError for what is wrong with it."""
        request = prompt.request
        ids = self.encode(prompt.content, request if isinstance(request, ChatRequest) else None)
        with refusing():
            job = self.generator.submit([ids], **self._options(prompt, ids))
        cancel.tell(job.cancel)
        yield Started(len(ids), self._echo(prompt, ids, cancel) if getattr(request, "echo", False) else None)
        stops = [] if request.include_stop_str_in_output else request.stops
        rows = [_Row(self, prompt, row, stops) for row in range(request.n)]
        follow = job.follow(stream=request.stream or request.return_drafted or request.top is not None)
        try:
            while True:
                try:
                    deltas = next(follow)
                except StopIteration as end:
                    out = end.value
                    break
                for delta in deltas:
                    yield from rows[delta.row].pieces(delta)
        finally:
            follow.close()
        if not any(row.told for row in rows):
            reasons = [_REASONS.get(reason, "stop") for reason in out.stats.finish_reasons]
            for row, new in enumerate(out.new_tokens()):
                text = before_stop(decode(self.tokenizer, new), stops)
                yield TextDelta(row, text, len(new), reasons[min(row, len(reasons) - 1)])
        yield Finished(out.stats)

    def encode(self, prompt: str | list[int] | None, chat: ChatRequest | None) -> list[int]:
        """The ids of a prompt or a conversation."""
        if isinstance(prompt, list):
            return prompt
        if prompt is not None:
            ids = list(self.tokenizer(prompt, verbose=False)["input_ids"])
        else:
            assert chat is not None
            ids = self._chat_ids(chat)
        return ids or listed(self.generator.target.model.generation_config.bos_token_id)[:1] or [0]

    def _echo(self, prompt: PromptRequest, ids: list[int], cancel: Cancel) -> Echo:
        """The prompt; raises a 400 where an encoder reads it and its tokens are to be scored."""
        text, top = decode(self.tokenizer, ids), prompt.request.top
        if top is None:
            return Echo(text)
        if self.is_encoder_decoder:
            message = (
                f"an encoder reads the prompts of {self.name!r}, and scores none of their tokens: leave out `echo`"
            )
            raise ApiError(400, message, param="echo")
        first = TokenScore(self.tokenizer.decode(ids[:1]))
        steps = scored(self.generator, ids, top, prompt.salt, cancel)
        return Echo(text, [first, *(score_of(self.tokenizer, step) for step in steps)])

    def _chat_ids(self, chat: ChatRequest) -> list[int]:
        how: dict[str, Any] = {"continue_final_message": chat.continue_final_message, "return_dict": True}
        how["add_generation_prompt"] = chat.add_generation_prompt is not False and not chat.continue_final_message
        return self.template([message.plain for message in chat.messages], **how, **(chat.chat_template_kwargs or {}))

    def template(self, messages: Sequence[dict[str, str]], **how: Any) -> list[int]:
        """The ids of a conversation; raises a 400 where the model has no chat template, or that refuses it."""
        if not self.chats:
            raise ApiError(400, f"the model {self.name!r} has no chat template: use /v1/completions", code="no_chat")
        try:
            return list(self.tokenizer.apply_chat_template(list(messages), **how)["input_ids"])
        except Exception as error:  # whatever a template raises
            raise ApiError(400, f"the model's chat template refused the messages: {error}", param="messages") from error

    def _options(self, prompt: PromptRequest, ids: list[int]) -> dict[str, Any]:
        request = prompt.request
        begin = 1 if self.is_encoder_decoder else len(ids)
        options = call_options(request, self._sampling, self.generator.drafter)
        options |= {"max_new_tokens": self._room(prompt, len(ids)), "cache_salt": prompt.salt}
        if request.stops:
            options["stopping_criteria"] = [StopTexts(self.tokenizer, request.stops, begin)]
        if (form := Form.of(request)) is not None:
            rows = request.n * request.num_beams
            options["logits_processor"] = [Grammar(form, self._grammars, begin, max(rows, request.num_samples or 1))]
        if request.constraints:
            options["force_words_ids"] = [self._phrases(phrase) for phrase in request.constraints]
        if request.top is not None:
            options["top_logprobs"] = request.top
        if request.prediction is not None and request.prediction.text:
            options["prediction"] = request.prediction.text
        return options

    def _room(self, prompt: PromptRequest, length: int) -> int:
        """The most new tokens; a prompt that is too long for what is asked is a 400."""
        used = 1 if self.is_encoder_decoder else length
        room, asked, most = self.context - used, prompt.request.most_tokens, prompt.most or self.context
        asked = None if asked is None else min(asked, most)
        if length > self.context or room < 1 or (asked or 0) > room:
            wanted = f"{length} tokens and {asked or 'at least one'} new"
            message = f"this model's context is {self.context} tokens, and the request has a prompt of {wanted}"
            param = "messages" if isinstance(prompt.request, ChatRequest) else "prompt"
            raise ApiError(400, f"{message}: shorten one of them", param=param, code="context_length_exceeded")
        return min(room, most) if asked is None else asked

    def _phrases(self, phrase: str | list[str]) -> Any:
        if isinstance(phrase, str):
            return self.tokenizer.encode(phrase, add_special_tokens=False)
        return [self.tokenizer.encode(one, add_special_tokens=False) for one in phrase]

    @property
    def _grammars(self) -> Any:
        with self._lock:
            return self._grammar_tokenizer

    @cached_property
    def _grammar_tokenizer(self) -> Any:
        """The tokenizer as llguidance reads it, which takes seconds to make for a large vocabulary."""
        from llguidance.hf import from_tokenizer

        ends = listed(self.generator.target.model.generation_config.eos_token_id) or [self.tokenizer.eos_token_id]
        width = self.generator.target.vocab_size
        return from_tokenizer(self.tokenizer, n_vocab=width, eos_token=[end for end in ends if end < width])


class _Row:
    """One choice on its way."""

    def __init__(self, model: TextModel, prompt: PromptRequest, row: int, stops: Sequence[str]) -> None:
        self._tokenizer, self._row = model.tokenizer, row
        self._text = Detokenizer(model.tokenizer, stops)
        self._drafted, self._top = prompt.request.return_drafted, prompt.request.top
        self._chunk = prompt.chunk
        self._pending: list[tuple[Step, bool]] = []  # with whether the draft guessed it
        self.told = False

    def pieces(self, delta: Delta) -> Iterator[TextDelta]:
        """What a round brought, or as much of it as makes whole chunks."""
        self.told = True
        self._pending += [(step, place < delta.accepted) for place, step in enumerate(delta.steps)]
        size = self._chunk or len(self._pending)
        while len(self._pending) >= size or (self._pending and delta.finish is not None):
            group, self._pending = self._pending[:size], self._pending[size:]
            last = delta.finish is not None and not self._pending
            yield self._piece(group, _REASONS.get(delta.finish or "", "stop") if last else None)

    def _piece(self, group: Sequence[tuple[Step, bool]], finish: str | None) -> TextDelta:
        runs = [(list(run), drafted) for drafted, run in groupby(group, lambda one: self._drafted and one[1])]
        spans = []
        for place, (run, drafted) in enumerate(runs, 1):
            ids = [step.token for step, _ in run]
            spans.append((self._text.push(ids, last=finish is not None and place == len(runs)), drafted))
        text = "".join(text for text, _ in spans)
        scores = [score_of(self._tokenizer, step) for step, _ in group] if self._top is not None else []
        told = [span for span in spans if span[0]] if self._drafted else []
        return TextDelta(self._row, text, len(group), finish, told, scores)


def score_of(tokenizer: Any, step: Step) -> TokenScore:
    """A step as it is told."""
    assert step.top is not None
    told = [(tokenizer.decode([token]), _finite(value)) for token, value in zip(*step.top, strict=True)]
    return TokenScore(tokenizer.decode([step.token]), _finite(step.log_prob), told)


def _finite(value: float | None) -> float:
    """JSON has no infinities."""
    return max(-9999.0, min(value if value is not None else 0.0, 0.0))


def _context(generator: SpecGenerator, wanted: int | None) -> int:
    """How many tokens the model takes: the least of its positions, what it was made for, and what is wanted."""
    config = generator.target.model.config
    known = [generator.target.max_positions, getattr(config, "max_position_embeddings", None), wanted]
    return min((number for number in known if number), default=4096)
