"""Every way to stop holds inside an accepted block, so that assisted text ends where plain text ends."""

import time
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, PreTrainedTokenizerFast

from specdec import SpecGenerator
from tests.generator.test_tokenizers import word_piece
from tests.matrix import endless
from tests.oracle import oracle
from tests.test_exact import noisy
from tests.tiny import tiny

PROMPT = [[5, 9, 12, 7]]
LENGTH = 40


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


@pytest.fixture(scope="module")
def answer(model: Any) -> list[int]:
    return SpecGenerator(model).generate(PROMPT, **endless(LENGTH)).sequences[0].tolist()


def letters() -> PreTrainedTokenizerFast:
    """One character per id."""
    alphabet = [chr(ord("A") + i) for i in range(64)]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(alphabet)}, unk_token="A"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="A")


def both(model: Any, answer: list[int], **options: Any) -> tuple[Any, Any]:
    """The plain result, and one whose draft offers the whole text at once."""
    options = endless(LENGTH, **options)
    plain = SpecGenerator(model).generate(PROMPT, **options)
    draft = oracle("perfect", [answer], 64)
    assisted = SpecGenerator(model, draft, schedule="constant", num_assistant_tokens=32).generate(PROMPT, **options)
    assert assisted.sequences.tolist() == plain.sequences.tolist()
    assert assisted.stats.finish_reasons == plain.stats.finish_reasons
    assert assisted.stats.num_target_passes < plain.stats.num_target_passes
    return plain, assisted


@pytest.mark.parametrize("at", [[15], [25, 15]])
def test_eos_inside_a_block(model: Any, answer: list[int], at: list[int]) -> None:
    """The text ends with the first end-of-text token; what the draft offered behind it is dropped."""
    ends = [answer[place] for place in at]
    plain, _ = both(model, answer, eos_token_id=ends if len(ends) > 1 else ends[0])
    assert plain.sequences[0].tolist() == answer[: min(answer.index(end, 4) for end in ends) + 1]
    assert plain.stats.finish_reasons == ("eos",)


def test_max_length_inside_a_block(model: Any, answer: list[int]) -> None:
    for length in range(6, 24):
        plain, assisted = both(model, answer, max_new_tokens=None, max_length=length)
        assert plain.sequences.shape[1] == assisted.sequences.shape[1] == length
        assert plain.stats.finish_reasons == ("length",)


@pytest.mark.parametrize("search", [{}, {"num_beams": 2}], ids=str)
def test_an_end_that_the_limit_forced(search: dict[str, Any]) -> None:
    """The text was cut, though its last token is an end token. (The reason was "eos", a server's "stop".)"""
    how = endless(8, eos_token_id=2, forced_eos_token_id=2, min_new_tokens=7, **search)
    out = SpecGenerator(tiny("llama"), "suffix").generate(PROMPT, **how)
    assert (out.new_tokens()[0][-1], out.stats.finish_reasons) == (2, ("length",))


def test_a_length_criterion_replaces_the_length(model: Any) -> None:
    """As in transformers' generate, in both directions. (The shorter of the two held.)"""
    for limit, given in ((40, {}), (12, {"max_new_tokens": 30}), (40, {"max_length": 20})):
        options = {"do_sample": False, "eos_token_id": [], "stopping_criteria": [MaxLengthCriteria(limit)], **given}
        out = SpecGenerator(model).generate(PROMPT, **options)
        assert out.sequences.shape[1] == limit
        assert out.stats.finish_reasons == ("length",)


def test_custom_criterion_inside_a_block(model: Any, answer: list[int]) -> None:
    """A criterion met in the middle of a block stops there, for a reason of its own if it has one.

    (Stock assisted decoding asked it once per block only.)
    """
    lengths: list[list[int]] = []

    def criterion(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        lengths[-1].append(ids.shape[1])
        return torch.tensor([ids.shape[1] >= 17])

    for draft, reason in ((None, "criteria"), (oracle("perfect", [answer], 64), "budget")):
        lengths.append([])
        out = SpecGenerator(model, draft).generate(PROMPT, **endless(LENGTH, stopping_criteria=[criterion]))
        assert out.sequences[0].tolist() == answer[:17]
        assert out.stats.finish_reasons == (reason,)
        criterion.reason = "budget"
    assert lengths[0] == lengths[1] == list(range(5, 18))


class OwnLength(MaxLengthCriteria):
    """A criterion that the generator does not know."""


def test_all_criteria_are_asked_even_at_the_end() -> None:
    """A criterion that counts its calls counts as in plain decoding; bare bools are answers too.

    The first that holds gives the reason, before the length and after an end token.
    """
    calls: list[int] = []
    criteria: list[Any] = [lambda ids, scores, n=n: calls.append(n) or n == 0 for n in range(2)]
    for options, reason in (({"eos_token_id": range(64)}, "eos"), ({"max_new_tokens": 1}, "criteria")):
        out = SpecGenerator(tiny("llama")).generate(PROMPT, **endless(9, stopping_criteria=criteria, **options))
        assert out.stats.finish_reasons == (reason,)
    assert calls == [0, 1] * 2
    for first, reason in ((EosTokenCriteria([*range(64)]), "eos"), (OwnLength(5), "length")):
        out = SpecGenerator(tiny("llama")).generate(PROMPT, **endless(9, stopping_criteria=[first, *criteria]))
        assert out.stats.finish_reasons == (reason,)


def test_criteria_see_the_scores(model: Any, answer: list[int]) -> None:
    """A tuple of one [1, vocab] per token where scores are kept, else None, as in transformers. (Always None.)"""
    seen: list[Any] = []

    def look(ids: torch.Tensor, scores: Any) -> bool:
        seen.append(scores)
        return False

    for draft in (None, oracle("perfect", [answer], 64)):
        for kept in (True, False):
            seen.clear()
            options = endless(9, output_scores=kept, stopping_criteria=look)
            out = SpecGenerator(model, draft).generate(PROMPT, **options)
            assert len(seen) == 9
            for count, scores in enumerate(seen, 1):
                if not kept:
                    assert scores is None
                    continue
                assert len(scores) == count
                assert all(torch.equal(a, b) for a, b in zip(scores, out.scores[:count], strict=True))


SAMPLED = ("coupled", "match", "rejection", "block")
KINDS = {
    "greedy": {},
    **{kind: {"do_sample": True, "sampling": kind, "seed": 3, "temperature": 0.5} for kind in SAMPLED},
}
TREES: dict[str, Any] = {"schedule": "constant", "num_assistant_tokens": 4, "num_assistant_branches": 3}
ROWS = [[5, 9, 12, 7], [8, 30, 31, 7, 22, 9], [11]]


@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings_inside_trees(model: Any, kind: str) -> None:
    """In a batch every row ends with its first stop string, on a path of a tree or off it, and is itself until then."""
    letter, draft = letters(), noisy(tiny("llama"), 0.01)
    options = endless(16, **KINDS[kind])
    generator = SpecGenerator(model, draft, tokenizer=letter, **TREES)
    free = generator.generate(ROWS, **options).new_tokens()
    if kind not in ("rejection", "block"):
        assert free == SpecGenerator(model).generate(ROWS, **options).new_tokens()
    on_a_path = off_it = 0
    for at in (3, 8, 12):
        stops = [letter.decode(free[0][at : at + 2]), letter.decode(free[1][at : at + 1])]
        last = {}
        for event in generator.stream(ROWS, **options, stop_strings=stops):
            last[event.row] = event
        found = generator.generate(ROWS, **options, stop_strings=stops)
        assert found.new_tokens() == [cut(letter, prompt, new, stops) for prompt, new in zip(ROWS, free, strict=True)]
        assert found.stats.finish_reasons[:2] == ("stop", "stop")
        on_a_path += sum(event.accepted == len(event.token_ids) for event in last.values())
        off_it += sum(event.accepted < len(event.token_ids) for event in last.values())
    assert on_a_path
    assert off_it


def test_stop_strings_of_word_pieces() -> None:
    """transformers' criterion cannot read such a vocabulary. (It ended in "substring not found".)"""
    words = word_piece()
    target = tiny("llama", len(words))
    options = endless(24, repetition_penalty=1.5)
    free = SpecGenerator(target, tokenizer=words).generate(ROWS, **options)
    for draft in (None, oracle("perfect", free.sequences.tolist(), len(words)), "suffix"):
        generator = SpecGenerator(target, draft, tokenizer=words)
        for at in (2, 9, 20):
            stop = free.texts[0][at : at + 3]
            out = generator.generate(ROWS, **options, stop_strings=stop)
            for new, whole in zip(out.new_tokens(), free.new_tokens(), strict=True):
                assert new == whole[: len(new)]
                assert stop not in words.decode(new[:-1])
            assert stop in out.texts[0]
            assert out.stats.finish_reasons[0] == "stop"


def cut(tokenizer: Any, prompt: list[int], new: list[int], stops: list[str]) -> list[int]:
    """`new` up to where the text first ends with one of `stops`."""
    ends = (i for i in range(1, len(new) + 1) if tokenizer.decode(prompt + new[:i]).endswith(tuple(stops)))
    return new[: next(ends, len(new))]


@pytest.mark.parametrize("search", [{}, {"num_beam_groups": 2, "diversity_penalty": 0.5}, {"do_sample": True}], ids=str)
def test_stop_strings_inside_a_search(model: Any, search: dict[str, Any]) -> None:
    """Beams that meet a stop string in the middle of the draft's branches end there, as without a draft."""
    letter = letters()
    options = endless(12, num_beams=4, seed=3, **search)
    options["num_return_sequences"] = 4
    free = SpecGenerator(model, tokenizer=letter).generate(ROWS, **options).texts
    generator = SpecGenerator(model, noisy(tiny("llama"), 0.02), tokenizer=letter, schedule="constant")
    ended = 0
    for at in (2, 6, 9):
        stop = {"stop_strings": [free[0][at : at + 2], free[8][at]], "output_scores": True}
        plain = SpecGenerator(model, tokenizer=letter).generate(ROWS, **options, **stop)
        out = generator.generate(ROWS, **options, **stop)
        assert out.sequences.tolist() == plain.sequences.tolist()
        assert torch.allclose(out.sequences_scores, plain.sequences_scores, atol=1e-4)
        ended += sum(text.endswith(tuple(stop["stop_strings"])) for text in plain.texts)
        assert out.stats.finish_reasons == plain.stats.finish_reasons
        assert out.stats.num_accepted_draft_tokens > 0
    assert ended or "num_beam_groups" in search  # whose beams end all together


def test_max_time(model: Any) -> None:
    out = SpecGenerator(model).generate(PROMPT, **endless(500, max_time=1e-6))
    assert out.stats.finish_reasons == ("time",)
    assert out.stats.num_new_tokens == 1


def test_a_deadline_of_the_caller(model: Any) -> None:
    """It began when the caller says, and calls may share it. (Every call began it anew, in the caller's object.)"""
    began = time.time() - 60
    deadline = MaxTimeCriteria(30, initial_timestamp=began)
    options = endless(8, stopping_criteria=[deadline])
    out = SpecGenerator(model).generate(PROMPT, **options, max_time=1000.0)
    assert out.stats.finish_reasons == ("time",)
    assert out.stats.num_new_tokens == 1
    assert deadline.initial_timestamp == began


@pytest.mark.parametrize(
    "how",
    [
        {"num_return_sequences": 4, "do_sample": True, "seed": 3},
        {"num_samples": 6, "num_return_sequences": 2, "do_sample": True, "seed": 3},
        {"num_samples": 6, "do_sample": True, "seed": 3},
        {"num_beams": 4, "num_return_sequences": 4},
        {"num_beams": 4, "num_return_sequences": 3, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"num_beams": 2, "num_return_sequences": 2, "force_words_ids": [[20, 21]]},
    ],
    ids=str,
)
@pytest.mark.parametrize("draft", [None, "suffix"])
def test_every_returned_text_has_its_own_reason(how: dict[str, Any], draft: Any) -> None:
    """Beams and ranked samples too; the reasons are in the order of the texts."""
    ends = list(range(40, 52))
    generator = SpecGenerator(tiny("llama", vocab=64), draft)
    prompts = [[5, 9, 12, 7], [6, 6, 9, 20]]
    out = generator.generate(prompts, **how, max_new_tokens=5, eos_token_id=ends, pad_token_id=0)
    texts = out.new_tokens()
    assert list(out.stats.finish_reasons) == ["eos" if text[-1] in ends else "length" for text in texts]
    assert len(texts) == 2 * how.get("num_return_sequences", 1)
