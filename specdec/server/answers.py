"""Bodies and chunks of responses, in OpenAI's format."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from specdec.core.stats import Stats, total
from specdec.generator.tokenizers import Spelling
from specdec.server.calls import CallReader, whole_calls
from specdec.server.messages import without_nulls
from specdec.server.protocol import ChatRequest, Generate, StreamOptions
from specdec.server.text import Started, TextDelta, TokenScore, cached_tokens
from specdec.server.thinking import ThinkingForm, ThinkingReader
from specdec.server.tools import CallForm

_UNIT = 128  # bytes: padded events have a multiple of them
_FIGURES = (
    *("mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "accepted_by_source"),
    *("num_draft_rounds", "num_draft_tokens", "num_accepted_draft_tokens", "num_target_passes", "seconds"),
    *("draft_seconds", "verify_seconds"),
)


class Answer:
    """One request's answer, sent as one body (`whole`) or in chunks; `details`: usage counts the draft's tokens."""

    def __init__(
        self,
        request: Generate,
        model: str,
        *,
        id: str | None = None,
        created: int | None = None,
        calls: Sequence[CallForm] = (),
        thinking: ThinkingForm | None = None,
        details: bool = True,
    ) -> None:
        self.request, self._model, self._details = request, model, details
        self._stream_options = request.stream_options or StreamOptions()
        self._id = secrets.token_hex(12) if id is None else id
        self._created = int(time.time()) if created is None else created
        self._tokens = Counter[str]()
        self._stats: list[Stats] = []
        self._deltas = [list[TextDelta]() for _ in range(len(request.prompts) * request.n)]  # for each choice
        self._readers: list[CallReader] = []
        if calls:
            assert isinstance(request, ChatRequest)
            must, most = request.must_call, request.most_calls
            self._readers = [CallReader(calls, request.callable, must=must, most=most) for _ in self._deltas]
        self._thinking, self._thoughts = thinking, list[ThinkingReader]()  # one for each choice
        self._thought_tokens = 0
        self._with_chunk: set[int] = set()  # choices that have a chunk
        self._scored = Counter[int]()  # characters of each choice with logprobs

    @property
    def is_chat(self) -> bool:
        return isinstance(self.request, ChatRequest)

    @property
    def stats(self) -> Stats:
        """The sums over the prompts that are done."""
        return total(self._stats)

    @property
    def stopping_word(self) -> str:
        """The stop text that ended the first choice of a whole answer; empty without one."""
        return next((delta.stop for delta in self._deltas[0] if delta.stop), "")

    def take(self, prompt: int, update: Started | TextDelta | Stats) -> None:
        """Counts an update, and keeps the text of an answer that is one body."""
        if isinstance(update, Started):
            self._tokens["prompt"] += update.prompt_tokens
            if self._thinking is not None:
                self._thoughts = [ThinkingReader(self._thinking, thinks=update.thinks) for _ in range(self.request.n)]
        elif isinstance(update, TextDelta):
            self._tokens["new"] += update.tokens
            if not self.request.stream:
                self._deltas[prompt * self.request.n + update.row].append(update)
        else:
            self._tokens["cached"] += cached_tokens(update)
            self._stats.append(update)

    def whole(self) -> dict[str, Any]:
        message = {"role": "assistant", "refusal": None}
        choices = [self._choice(index, deltas, "message", message) for index, deltas in enumerate(self._deltas)]
        body = {**self._head(whole=True), "choices": choices}
        return {**body, "usage": self.usage(), **self._metrics()}

    def chunk(self, prompt: int, delta: TextDelta) -> dict[str, Any] | None:
        """The chunk of a delta; the first of a choice in a chat names the role. None where it would say nothing."""
        if not (delta.text or delta.finish or delta.scores):
            return None
        index = prompt * self.request.n + delta.row
        choice = self._choice(index, [delta], "delta", {} if index in self._with_chunk else {"role": "assistant"})
        if self.is_chat and index in self._with_chunk:
            choice["delta"] = without_nulls(choice["delta"])
            if not (choice["delta"] or delta.finish or delta.scores or delta.spans):
                return None
        self._with_chunk.add(index)
        options = self._stream_options
        usage = {"usage": self.usage() if options.continuous_usage_stats else None} if options.include_usage else {}
        return {**self._head(), "choices": [choice], **usage}

    def last_chunk(self) -> dict[str, Any] | None:
        """The chunk of usage and metrics after all choices; None where the request wants neither."""
        usage = {"usage": self.usage()} if self._stream_options.include_usage else {}
        fields = {**usage, **self._metrics()}
        return {**self._head(), "choices": [], **fields} if fields else None

    def event(self, content: dict[str, Any]) -> bytes:
        """A chunk as an event; with `include_obfuscation`, padded to a multiple of 128 bytes."""
        if self._stream_options.include_obfuscation:
            bare = len(encoded({**content, "obfuscation": ""}))
            content = {**content, "obfuscation": "-" * (-bare % _UNIT)}
        return event(content)

    def usage(self) -> dict[str, Any]:
        tokens = self._tokens
        stats = self.stats if self._details or self.request.prediction is not None else Stats()
        accepted = stats.num_accepted_draft_tokens
        return {
            "prompt_tokens": tokens["prompt"],
            "completion_tokens": tokens["new"],
            "total_tokens": tokens["prompt"] + tokens["new"],
            "prompt_tokens_details": {"cached_tokens": tokens["cached"]},
            "completion_tokens_details": {
                "reasoning_tokens": self._thought_tokens,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": stats.num_draft_tokens - accepted,
            },
        }

    def _head(self, *, whole: bool = False) -> dict[str, Any]:
        prefix, kind = ("chatcmpl", "chat.completion") if self.is_chat else ("cmpl", "text_completion")
        kind += ".chunk" if self.is_chat and not whole else ""
        return {"id": f"{prefix}-{self._id}", "object": kind, "created": self._created, "model": self._model}

    def _choice(self, index: int, deltas: Sequence[TextDelta], chat: str, extra: Mapping[str, Any]) -> dict[str, Any]:
        """A choice of these deltas; in a chat the field `chat` has the text and the `extra` fields."""
        text = "".join(delta.text for delta in deltas)
        finish = next((delta.finish for delta in deltas if delta.finish), None)
        fields: dict[str, Any] = {"content": text} if self.is_chat else {"text": text}
        if self._thoughts:
            thoughts, text = map("".join, zip(*(self._thought(index, delta) for delta in deltas), strict=True))
            fields = {"content": text or None, **({"reasoning_content": thoughts} if thoughts else {})}
        if self._readers:
            reader = self._readers[index]
            text, calls = reader.read(text, last=finish is not None)
            calls = whole_calls(calls) if chat == "message" else calls
            fields |= {"content": text or None, **({"tool_calls": calls} if calls else {})}
            finish = "tool_calls" if finish == "stop" and reader.are_whole else finish
        choice: dict[str, Any] = {"index": index, **({chat: {**extra, **fields}} if self.is_chat else fields)}
        choice["logprobs"] = self._logprobs(index, [score for delta in deltas for score in delta.scores])
        choice["finish_reason"] = finish
        if self.request.return_drafted:
            choice["drafted"] = [list(span) for delta in deltas for span in delta.spans]
            choice["tokens"] = sum(delta.tokens for delta in deltas)
        return choice

    def _thought(self, index: int, delta: TextDelta) -> tuple[str, str]:
        """The thoughts and the rest of a delta; its tokens count as thoughts if it begins with thoughts."""
        reader = self._thoughts[index]
        thought = reader.thinks
        parts = reader.read(delta.text, last=delta.finish is not None)
        self._thought_tokens += delta.tokens if thought or parts[0] else 0
        return parts

    def _logprobs(self, index: int, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        if self.request.top is None:
            return None
        if self.is_chat:
            return {"content": [_chat_score(score) for score in scores], "refusal": None}
        *offsets, self._scored[index] = accumulate((score.length for score in scores), initial=self._scored[index])
        return {
            "tokens": [score.spelling.text for score in scores],
            "token_logprobs": [score.log_prob for score in scores],
            "top_logprobs": [None if score.top is None else _by_text(score.top) for score in scores],
            "text_offset": offsets,
        }

    def _metrics(self) -> dict[str, Any]:
        """Figures about drafts, named as in vLLM, and seconds."""
        if not self.request.return_metrics:
            return {}
        stats = self.stats
        return {"metrics": {"speculative_decoding": {name: getattr(stats, name) for name in _FIGURES}}}


def _chat_score(score: TokenScore) -> dict[str, Any]:
    top = [{**_token_with_bytes(spelling), "logprob": value} for _, spelling, value in score.top or ()]
    return {**_token_with_bytes(score.spelling), "logprob": score.log_prob, "top_logprobs": top}


def _token_with_bytes(spelling: Spelling) -> dict[str, Any]:
    """A token with its bytes, which clients join to characters; None for one that is no text."""
    return {"token": spelling.text, "bytes": None if spelling.data is None else list(spelling.data)}


def _by_text(top: Sequence[tuple[int, Spelling, float]]) -> dict[str, float]:
    """Log-probabilities by the tokens' texts; where two tokens have one text, the less likely one by its id."""
    scores: dict[str, float] = {}
    for token, spelling, value in top:
        scores.setdefault(spelling.text if spelling.text not in scores else f"token_id:{token}", value)
    return scores


def encoded(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def event(content: Any) -> bytes:
    """JSON as an event of a stream."""
    return b"data: " + encoded(content) + b"\n\n"
