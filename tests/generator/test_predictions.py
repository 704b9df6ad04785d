"""Texts that the output may resemble: they change how many passes it takes, never the text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from specdec import OptionError, SpecGenerator
from specdec.core.budget import Budget
from specdec.core.draft_schedules.pause import Pause
from specdec.core.drafts import SequenceView
from specdec.core.tree import EMPTY, Tree
from specdec.generator.extras import Extras
from specdec.generator.inputs.prompts import read_prompts
from specdec.models import LanguageModel
from specdec.options.resolve import resolve
from tests.folders import byte_tokenizer, saved_model
from tests.matrix import endless, some
from tests.proposers.fakes import OwnProposer
from tests.tiny import tiny, tiny_inputs

IDS = [[5, 6, 7], [9, 8, 4, 3]]
RUN = endless(24)


@pytest.mark.parametrize(
    "draft", ["suffix", "ngram", ("suffix", tiny("llama", seed=1))], ids=["suffix", "ngram", "hybrid"]
)
def test_the_text_stays_and_passes_become_few(draft: Any) -> None:
    """A right prediction is found from its first token on, one with a mistake again after it; a wrong one is idle."""
    generator, plain = SpecGenerator(tiny("llama"), draft), SpecGenerator(tiny("llama"))
    [text] = plain.generate(IDS[:1], **RUN).new_tokens()
    edited = [*text[:8], 60, *text[9:]]
    passes = {}
    for name, prediction in {"none": None, "right": text, "edited": edited, "wrong": [60, 61, 62, 63]}.items():
        out = generator.generate(IDS[:1], **RUN, prediction=prediction, schedule="constant", num_assistant_tokens=11)
        assert out.new_tokens() == [text]
        passes[name] = round(out.stats.target_passes_per_token * len(text))
    assert passes["right"] <= 4
    assert passes["edited"] <= 6
    assert passes["none"] > 2 * passes["right"]


def test_drafting_that_lost_elsewhere_takes_one() -> None:
    """(A server's texts had lost, and the next edit of a file had no draft for 67 tokens.)"""
    generator = SpecGenerator(tiny("llama"), "suffix", schedule="cost")
    [text] = generator.generate(IDS[:1], **RUN).new_tokens()
    [(_, pacing)] = generator._scheduled._last.values()
    pacing.schedule = pacing.schedule._with(pause=Pause(length=512.0, lost=9.0))
    assert generator.generate(IDS[:1], **RUN).stats.num_draft_tokens == 0
    out = generator.generate(IDS[:1], **RUN, prediction=text)
    assert out.new_tokens() == [text]
    assert out.stats.num_draft_tokens > 0


@pytest.mark.parametrize("how", some("coupled", "beams", "ranked").values(), ids=str)
def test_every_strategy_takes_one(how: dict[str, Any]) -> None:
    """Samples, beams and ranked samples stay what they are; for single texts, a prediction of them saves passes."""
    plain = SpecGenerator(tiny("llama")).generate(IDS[:1], **RUN, **how)
    generator = SpecGenerator(tiny("llama"), "suffix")
    for prediction in (plain.new_tokens()[0], [60, 61]):
        out = generator.generate(IDS[:1], **RUN, **how, prediction=prediction)
        assert out.new_tokens() == plain.new_tokens()
    helped = generator.generate(IDS[:1], **RUN, **how, prediction=plain.new_tokens()[0])
    assert helped.stats.num_accepted_draft_tokens > 0 or "num_beams" in how


def test_every_prompt_has_its_own() -> None:
    """A batch takes one per prompt, or None; rows of an encoder-decoder likewise."""
    plain = SpecGenerator(tiny("llama")).generate(IDS, **RUN)
    texts = plain.new_tokens()
    generator = SpecGenerator(tiny("llama"), "suffix")
    passes = []
    for prediction in ([None, None], [texts[0], None], texts, texts[::-1]):
        out = generator.generate(IDS, **RUN, prediction=prediction)
        assert out.new_tokens() == texts
        passes.append(out.stats.num_accepted_draft_tokens)
    assert passes[0] < passes[1] < passes[2]
    assert passes[3] < passes[2]
    model, inputs = tiny("t5"), tiny_inputs("t5", rows=2)
    texts = SpecGenerator(model).generate(**inputs, **RUN).new_tokens()
    out = SpecGenerator(model, "suffix").generate(**inputs, **RUN, prediction=texts)
    assert out.new_tokens() == texts
    assert out.stats.target_passes_per_token < 0.5


def test_text_is_encoded_without_special_tokens(tmp_path: Path) -> None:
    """A text does what its ids do."""
    generator = SpecGenerator(saved_model(tmp_path / "target"), "suffix")
    letters = {*byte_tokenizer().encode("abcdefghijklmnopqrstuvwxyz", add_special_tokens=False)}
    how = {**RUN, "suppress_tokens": [i for i in range(generator.target.vocab_size) if i not in letters]}
    out = generator.generate("ab", **how)
    helped = generator.generate("ab", **how, prediction=out.texts[0])
    assert helped.texts == out.texts
    assert helped.stats.num_target_passes < out.stats.num_target_passes
    assert helped.stats.draft_acceptance_rate == 1
    events = list(generator.stream("ab", **how, prediction=out.texts[0]))
    assert "".join(event.text for event in events) == out.texts[0]
    with pytest.raises(OptionError, match="empty text"):
        generator.generate("ab", **how, prediction="")


@pytest.mark.parametrize(
    ("draft", "prediction", "words"),
    [
        (None, [4, 5], "drafts that copy"),
        ("early_exit:1", [4, 5], "drafts that copy"),
        (lambda tokens, k: [], [4, 5], "drafts that copy"),
        ("suffix", [[4], [5]], "each of 1 prompts, got 2"),
        ("suffix", [], "`prediction`"),
        ("suffix", [[]], "row 0 of `prediction` is empty"),
        ("suffix", [4, 999], "holds token 999"),
        ("suffix", 3.5, "`prediction` must be text, or token ids"),
        ("suffix", "text", "needs a tokenizer"),
        ("suffix", torch.zeros(1, 2), "`prediction` must be text, or token ids"),
    ],
)
def test_what_is_none_raises(draft: Any, prediction: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        SpecGenerator(tiny("llama"), draft).generate(IDS[:1], **RUN, prediction=prediction)


def test_a_draft_that_says_nothing_of_itself() -> None:
    """Predictions and trees are refused, not ignored, until it says that it uses them."""

    class Silent(OwnProposer):
        def propose(self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Tree]:
            return [EMPTY] * len(seqs)

    generator = SpecGenerator(tiny("llama"), Silent())
    with pytest.raises(OptionError, match="`prediction` is for drafts that copy"):
        generator.generate(IDS[:1], **RUN, prediction=[1, 2])
    with pytest.raises(OptionError, match="`num_assistant_branches`=2 asks for trees"):
        generator.generate(IDS[:1], **RUN, num_assistant_branches=2)


class TwoSided(PreTrainedTokenizerFast):
    """A tokenizer with words of its own for answers, as Marian's."""

    def __call__(self, text: Any = None, text_target: Any = None, **_: Any) -> Any:
        return {"input_ids": [5, 6, 7] if text_target is None else [8, 9]}


def test_a_prediction_is_text_of_the_answers_side() -> None:
    """It was encoded as a source, whose vocabulary may be another one."""
    extras = Extras(tokenizer=TwoSided(tokenizer_object=byte_tokenizer().backend_tokenizer), prediction="x")
    target, options = LanguageModel(tiny("bart")), resolve({"decoder_start_token_id": 1})
    assert read_prompts([[5, 6]], None, {}, options, target, extras).rows[0].prediction == [8, 9]
