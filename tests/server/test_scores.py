"""The tokens of log-probabilities: their texts, bytes and places in the answer."""

from typing import Any

import pytest

from specdec.core.tree import Step, TopTokens
from specdec.generator.tokenizers import decode
from specdec.server.answers import Answer
from specdec.server.protocol import ChatRequest, CompletionRequest
from specdec.server.text import Scorer, TextDelta
from tests.generator.test_tokenizers import KINDS, kinds


def answered(tokenizer: Any, ids: list[int], kind: Any, **request: Any) -> Any:
    """The log-probabilities of an answer with these ids, each with itself, an end token and 5 as the likeliest."""
    answer, scorer = Answer(kind(**request), "model"), Scorer(tokenizer)
    for token in ids:
        likeliest = TopTokens([token, tokenizer.eos_token_id, 5], [-0.5, -1.0, -2.0])
        scores = [scorer.score_of(Step(token, log_prob=-0.5, top=likeliest))]
        answer.take(0, TextDelta(0, "", 1, "stop" if token == ids[-1] else None, scores=scores))
    return answer.whole()["choices"][0]["logprobs"]


@pytest.mark.parametrize("kind", KINDS)
def test_clients_join_bytes(kind: str) -> None:
    """Bytes are the vocabulary's. (Those of a character in two tokens were null.)"""
    tokenizer = kinds()[kind]
    ids = tokenizer("the 日本 fox กข", add_special_tokens=False)["input_ids"]
    messages = [{"role": "user", "content": "?"}]
    scores = answered(tokenizer, ids, ChatRequest, model="model", messages=messages, logprobs=True, top_logprobs=3)
    joined = b"".join(bytes(score["bytes"] or ()) for score in scores["content"])
    assert joined.decode() == decode(tokenizer, ids)
    for score in scores["content"]:
        assert score["top_logprobs"][0]["token"] == score["token"]
        assert score["top_logprobs"][1]["bytes"] is None  # the end token is no text
        text, data = score["token"], score["bytes"]
        assert data is None or text.startswith("bytes:") or text.encode() == bytes(data)


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_index_into_the_answer(kind: str) -> None:
    """Each token's text stands at its offset; a part of a character has the offset of the character."""
    tokenizer = kinds()[kind]
    ids = tokenizer("the 日本 fox กข a", add_special_tokens=False)["input_ids"]
    scores = answered(tokenizer, ids, CompletionRequest, model="model", prompt="?", logprobs=3)
    whole = decode(tokenizer, ids)
    for text, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        assert text.startswith("bytes:") or whole[offset:].startswith(text)
        assert 0 <= offset <= len(whole)
    assert scores["text_offset"] == sorted(scores["text_offset"])


def test_tokens_of_one_text_have_keys_of_their_own() -> None:
    """The less likely one has its number. (It replaced the likelier one.)"""
    tokenizer, scorer = kinds()["prefix"], Scorer(kinds()["prefix"])
    answer = Answer(CompletionRequest(model="model", prompt="?", logprobs=3), "model")
    word, also = tokenizer.convert_tokens_to_ids(["a", "\u2581a"])
    scores = [scorer.score_of(Step(word, log_prob=-0.5, top=TopTokens([also, word], [-0.25, -0.5])))]
    answer.take(0, TextDelta(0, "a", 1, "stop", scores=scores))
    [top] = answer.whole()["choices"][0]["logprobs"]["top_logprobs"]
    assert top == {"a": -0.25, f"token_id:{word}": -0.5}
