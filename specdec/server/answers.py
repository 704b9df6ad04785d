"""What clients are sent: bodies and chunks in OpenAI's shapes."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from specdec.core.stats import Stats
from specdec.server.protocol import ChatRequest, Generate
from specdec.server.text import Echo, TextDelta, TokenScore

_UNIT = 128  # bytes; events that are filled up have a multiple of them


@dataclass
class Tally:
    """What one prompt of a request came to."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    stats: Stats | None = None


@dataclass
class Answer:
    """One request's answer in the making, as a whole or in chunks."""

    request: Generate
    model: str
    tallies: list[Tally]
    pads: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        """Whether a conversation is answered."""
        return isinstance(self.request, ChatRequest)

    def whole(self, choices: Sequence[Sequence[TextDelta]], echoes: Sequence[Echo | None]) -> dict[str, Any]:
        """The body: a choice for each list of pieces."""
        made = [self._choice(index, pieces, echoes[index // self.request.n]) for index, pieces in enumerate(choices)]
        body = {**self._head("chat.completion" if self.is_chat else "text_completion"), "choices": made}
        return {**body, "usage": self.usage(), **self._metrics()}

    def chunk(self, index: int, piece: TextDelta, *, first: bool, echo: Echo | None = None) -> dict[str, Any]:
        """A chunk of choice `index`, after the prompt where that is told."""
        echo = echo or Echo()
        if self.is_chat:
            delta = {"role": "assistant", "content": piece.text} if first else {"content": piece.text}
            choice: dict[str, Any] = {"index": index, "delta": delta}
        else:
            choice = {"index": index, "text": echo.text + piece.text}
        choice |= {"logprobs": self._logprobs([*echo.scores, *piece.scores]), "finish_reason": piece.finish}
        if self.request.return_drafted:
            choice |= {"drafted": [list(span) for span in piece.spans], "tokens": piece.tokens}
        usage = {"usage": self.usage() if self._keeps_telling else None} if self._tells_usage else {}
        return {**self._head(self._chunks), "choices": [choice], **usage}

    def last_chunk(self) -> dict[str, Any] | None:
        """What follows all choices, if anything was asked for."""
        metrics = self._metrics()
        if not (self._tells_usage or metrics):
            return None
        usage = {"usage": self.usage()} if self._tells_usage else {}
        return {**self._head(self._chunks), "choices": [], **usage, **metrics}

    def event(self, content: dict[str, Any]) -> bytes:
        """A chunk as an event; where sizes must not tell anything, of a multiple of a few bytes."""
        options = self.request.stream_options
        if self.pads or (options is not None and options.include_obfuscation):
            bare = len(encoded({**content, "obfuscation": ""}))
            content = {**content, "obfuscation": "-" * (-bare % _UNIT)}
        return event(content)

    def usage(self) -> dict[str, Any]:
        """Counts of tokens, over all prompts."""
        prompt, new = (sum(getattr(t, name) for t in self.tallies) for name in ("prompt_tokens", "new_tokens"))
        stats = [tally.stats for tally in self.tallies if tally.stats is not None]
        predicted = self.request.prediction is not None
        accepted = sum(s.num_accepted_draft_tokens for s in stats) if predicted else 0
        drafted = sum(s.num_draft_tokens for s in stats) if predicted else 0
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(s.cached_prompt_tokens for s in stats)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    @property
    def _chunks(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    @property
    def _tells_usage(self) -> bool:
        options = self.request.stream_options
        return options is not None and options.include_usage

    @property
    def _keeps_telling(self) -> bool:
        options = self.request.stream_options
        return options is not None and options.continuous_usage_stats

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _choice(self, index: int, pieces: Sequence[TextDelta], echo: Echo | None) -> dict[str, Any]:
        echo = echo or Echo()
        text = "".join(piece.text for piece in pieces)
        finish = next((piece.finish for piece in pieces if piece.finish), None)
        scores = [score for piece in pieces for score in piece.scores]
        choice: dict[str, Any] = {"index": index, "finish_reason": finish}
        choice["logprobs"] = self._logprobs([*echo.scores, *scores])
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = echo.text + text
        if self.request.return_drafted:
            choice["drafted"] = [list(span) for piece in pieces for span in piece.spans]
        return choice

    def _logprobs(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        if self.request.top is None:
            return None
        if self.is_chat:
            return {"content": [_told(score) for score in scores], "refusal": None}
        return {
            "tokens": [score.text for score in scores],
            "token_logprobs": [score.log_prob for score in scores],
            "top_logprobs": [None if score.top is None else dict(score.top) for score in scores],
            "text_offset": list(accumulate((len(score.text) for score in scores[:-1]), initial=0)) if scores else [],
        }

    def _metrics(self) -> dict[str, Any]:
        if not self.request.return_metrics:
            return {}
        stats = [tally.stats for tally in self.tallies if tally.stats is not None]
        return {"metrics": {"speculative_decoding": speculation(stats)}}


def _told(score: TokenScore) -> dict[str, Any]:
    own = {"token": score.text, "logprob": score.log_prob, "bytes": _bytes(score.text)}
    top = [{"token": text, "logprob": value, "bytes": _bytes(text)} for text, value in score.top or ()]
    return {**own, "top_logprobs": top}


def _bytes(text: str) -> list[int] | None:
    """The bytes of a token; None for a part of a character, whose text does not tell."""
    return None if "\ufffd" in text else list(text.encode())


def speculation(stats: Iterable[Stats]) -> dict[str, Any]:
    """What drafts did, in vLLM's words, and where the seconds went."""
    found = list(stats)
    accepted = [n for one in found for n in one.per_step_accepted]
    drafted = sum(one.num_draft_tokens for one in found)
    histogram = [0] * (max(accepted, default=-1) + 1)
    for n in accepted:
        histogram[n] += 1
    return {
        "mean_acceptance_length": 1 + sum(accepted) / len(accepted) if accepted else 1.0,
        "draft_acceptance_rate": sum(accepted) / drafted if drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": len(accepted),
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": sum(accepted),
        "num_target_passes": sum(one.num_target_passes for one in found),
        **{name: sum(getattr(one, name) for one in found) for name in ("seconds", "draft_seconds", "verify_seconds")},
    }


def encoded(content: Any) -> bytes:
    """JSON in UTF-8."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def event(content: Any) -> bytes:
    """JSON as an event of a stream."""
    return b"data: " + encoded(content) + b"\n\n"
