"""Text generation in the shapes of transformers' own pipeline, beside it, with every draft."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import pipeline

from specdec.errors import OptionError, UnsupportedError
from specdec.pipelines import Text
from tests.folders import WIDTH
from tests.pipelines.models import CHAT, model, tokenizer
from tests.tiny import tiny

TEXTS = ["def f(x):", "Ünï 版 \U0001f600", "a longer text than the others, which goes on"]
ASKED = [{"role": "user", "content": "Hello"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "Well,"}]
DRAFTS = [None, "suffix", tiny("llama", vocab=WIDTH, seed=1), ("suffix", tiny("llama", vocab=WIDTH, seed=1))]
INPUTS = [TEXTS[0], TEXTS, TEXTS[:1], ASKED, [ASKED, BEGUN], BEGUN]
FORMS: list[dict[str, Any]] = [
    {},
    {"return_full_text": False},
    {"return_tensors": True},
    {"continue_final_message": False},
    {"num_beams": 3, "num_return_sequences": 2},
    {"skip_special_tokens": False},
]


def parts() -> tuple[Any, Any]:
    """A model and its tokenizer."""
    words = tokenizer()
    words.chat_template = CHAT
    return tiny("llama", vocab=WIDTH), words


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_as_transformers(form: dict[str, Any]) -> None:
    """Texts, messages and lists of both: what comes back is equal, in shape and letter."""
    target, words = parts()
    theirs = pipeline("text-generation", model=target, tokenizer=words, device="cpu")
    options = {"max_new_tokens": 8, "do_sample": False, **form}
    expected = [theirs(inputs, **options) for inputs in INPUTS]
    for draft in DRAFTS:
        ours = Text(target, draft, tokenizer=words)
        assert [ours(inputs, **options) for inputs in INPUTS] == expected, draft


def test_stop_sequence() -> None:
    """The text ends with the first of them."""
    target, words = parts()
    ours = Text(target, "suffix", tokenizer=words)
    whole = ours(TEXTS[0], max_new_tokens=20, return_full_text=False)[0]["generated_text"]
    stop = next(c for c in whole[2:] if c.isascii())
    for asked in (stop, [stop, "no such text"]):
        cut = ours(TEXTS[0], max_new_tokens=20, return_full_text=False, stop_sequence=asked)[0]["generated_text"]
        assert cut == whole[: whole.index(stop) + 1]
    how = {"stop_sequence": stop, "include_stop_str_in_output": False}
    cut = ours(TEXTS[0], max_new_tokens=20, return_full_text=False, **how)[0]["generated_text"]
    assert cut == whole[: whole.index(stop)]


def test_an_empty_prompt_begins_with_bos() -> None:
    """As in transformers."""
    target, words = parts()
    ours = Text(target, tokenizer=words)
    found, named = (ours(text, max_new_tokens=8, return_tensors=True)[0]["generated_token_ids"] for text in ("", "<s>"))
    assert found == named
    assert found[0] == 1


@pytest.mark.parametrize("limit", [{"max_new_tokens": 8}, {"max_length": 60}])
def test_samples_do_not_depend_on_batches_or_drafts(limit: dict[str, int]) -> None:
    """One seed, any batch, any draft; lengths that count the prompt count no padding."""
    target, words = parts()
    options = {"do_sample": True, "seed": 3, "num_return_sequences": 2, **limit}
    found = Text(target, tokenizer=words)(TEXTS, **options)
    assert [len(rows) for rows in found] == [2, 2, 2]
    assert found == Text(target, DRAFTS[2], tokenizer=words)(TEXTS, batch_size=2, **options)
    assert found == Text(target, "suffix", tokenizer=words)(TEXTS, batch_size=1, **options)
    assert found[0] == Text(target, tokenizer=words)(TEXTS[0], **options)


def test_the_checkpoints_settings_for_the_task() -> None:
    """As GPT-2's config has them."""
    target, words = parts()
    target.config.task_specific_params = {"text-generation": {"max_length": 30}}
    assert len(Text(target, tokenizer=words)("abc", return_tensors=True)[0]["generated_token_ids"]) == 30
    target.config.task_specific_params = None


CALLS = [
    ("a", {"max_new_tokens": None}, "a text prompt needs a length limit"),
    (3, {}, "`inputs` must be text, messages, or a list of either, got 'int'"),
    (b"a", {}, "`inputs` must be text"),
    ({"role": "user"}, {}, "`inputs` must be text"),
    (["a", 3], {}, "`inputs` must be text"),
    ([{"role": "user"}], {}, "`inputs` must be messages like"),
    ([[], []], {}, "`inputs` must be messages like"),
    ("a", {"return_full_text": True, "return_tensors": True}, "`return_full_text` and `return_tensors` each say"),
    ("a", {"return_text": False}, "leaves nothing to return"),
    ("a", {"output_scores": True}, "has no place in a pipeline's result"),
    ("a", {"streamer": object()}, "`streamer` has no place"),
    ("a", {"batch_size": 0}, "`batch_size` must be"),
]


@pytest.mark.parametrize(("inputs", "options", "words"), CALLS)
def test_calls_that_make_no_sense(inputs: Any, options: dict[str, Any], words: str) -> None:
    """The error names the argument and the way out."""
    target, own = parts()
    with pytest.raises(OptionError, match=words):
        Text(target, tokenizer=own)(inputs, **{"max_new_tokens": 8, **options})


def test_targets_that_make_no_sense() -> None:
    """An encoder has no prompt to go on with, and messages need a template."""
    with pytest.raises(UnsupportedError, match="use Summarizer"):
        Text(model("t5"), tokenizer=tokenizer())
    with pytest.raises(OptionError, match="chat template refused the messages"):
        Text(parts()[0], tokenizer=tokenizer())(ASKED, max_new_tokens=8)
