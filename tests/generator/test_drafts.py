"""What a caller may name as a draft, by object, path or name: it works, is kept for a while, and is let go."""

import gc
import weakref
from pathlib import Path
from time import sleep
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import specdec.generator.drafts_by_name
from specdec import LanguageModel, OptionError, SpecGenerator
from specdec.generator.drafts_by_name import Drafts
from specdec.proposers import HybridDraft, ModelDraft, NgramDraft
from tests.folders import WIDTH, byte_tokenizer
from tests.generator.conftest import Letters
from tests.matrix import endless
from tests.tiny import tiny

IDS = torch.tensor([[5, 6, 7]])
RUN = endless(8)
SAMPLED: dict[str, Any] = {**RUN, "do_sample": True, "seed": 3}


# --- names


@pytest.mark.parametrize("kind", [str, Path])
def test_models_named_by_path(folders: tuple[str, str], kind: Any) -> None:
    """A target and a draft may be paths. (Every one crashed: `cannot create weak reference to 'str'`.)"""
    target, draft = map(kind, folders)
    generator = SpecGenerator(target, draft)
    out = generator.generate("ab", **RUN)
    assert out.stats.num_draft_tokens > 0
    assert out.texts == SpecGenerator(target).generate("ab", **RUN).texts
    assert generator.generate("ab", **RUN, assistant_model=draft).texts == out.texts


@pytest.mark.parametrize("pair", [False, True])
def test_a_draft_has_a_backend_of_its_own(folders: tuple[str, str], pair: bool) -> None:
    """`draft_options` name another than the target's. (The generator refused the draft that it had loaded so.)"""
    target, draft = folders
    given = f"suffix+{draft}" if pair else draft
    generator = SpecGenerator.from_pretrained(target, given, backend="packed", draft_options={"backend": "eager"})
    assert (generator.target.backend, generator.draft.models[0].backend) == ("packed", "eager")


def test_a_large_model_copies_besides(folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By path or as an object, unless its name says that it is alone; the text stays. "none" is no model's name."""
    target, draft = folders
    assert SpecGenerator.from_pretrained(target, "none").draft is None
    plain = SpecGenerator(target).generate("abab", **RUN).texts
    monkeypatch.setattr(specdec.generator.drafts_by_name, "_DEAR", 0)
    model = SpecGenerator(draft).target
    kinds = {draft: HybridDraft, f"model:{draft}": ModelDraft, model: HybridDraft, ("model", model): ModelDraft}
    for given, kind in kinds.items():
        generator = SpecGenerator(target, given)
        assert type(generator.draft) is kind
        assert generator.generate("abab", **RUN).texts == plain


def test_a_named_assistant_is_loaded_once(folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call with the same path finds model and tokenizer ready."""
    target, draft = folders
    generator, module = SpecGenerator(target), specdec.generator.drafts_by_name
    monkeypatch.setattr(module, "load_model", load := Mock(wraps=module.load_model))
    for _ in range(2):
        assert generator.generate("ab", **RUN, assistant_model=draft).stats.num_draft_tokens > 0
    assert [call.args[0] for call in load.call_args_list] == [draft]


def test_assistants_are_let_go() -> None:
    """Only the last two assistants of calls are kept. (All of them were, as long as the generator lived.)"""
    generator, seen = SpecGenerator(tiny("llama")), []
    for seed in range(5):
        assistant = tiny("llama", seed=seed)
        seen.append(weakref.ref(assistant))
        generator.generate(IDS, **RUN, assistant_model=assistant)
        del assistant
    gc.collect()
    assert [reference() is not None for reference in seen] == [False, False, False, True, True]


def test_a_draft_is_prepared_once_for_the_same_model() -> None:
    """What a draft learned carries over to the next call that names the same object, and to no other."""
    drafts = Drafts(LanguageModel(tiny("llama")))
    models = [{"assistant_model": tiny("llama", seed=seed)} for seed in (1, 2)]
    lookups = [{"prompt_lookup_num_tokens": n} for n in (3, 4)]
    for one, other in (models, lookups):
        first = drafts.of_call(one, None)
        assert drafts.of_call(other, None) is not first
        assert drafts.of_call(dict(one), None) is first


# --- what the cost rule learns


class Sleepy:
    """A draft of one's own that may be slow and wrong, or fast and right."""

    def __init__(self, text: list[int]) -> None:
        self.text, self.asleep = text, False

    def propose(self, tokens: list[int], k: int) -> list[int]:
        if self.asleep:
            sleep(0.05)
            return [0] * k
        return self.text[len(tokens) : len(tokens) + k]


def test_a_search_that_lost_does_not_silence_greedy_drafting() -> None:
    """Calls of one family share what was learned, others do not. (One verdict held for all calls of a generator.)"""
    model, searching = tiny("llama"), {**RUN, "num_beams": 3, "max_new_tokens": 20}
    draft = Sleepy(SpecGenerator(model).generate(IDS, **RUN).sequences[0].tolist())
    generator = SpecGenerator(model, draft, schedule="cost")
    draft.asleep = True
    assert generator.generate(IDS, **searching).stats.num_draft_tokens > 15
    assert generator.generate(IDS, **searching).stats.num_draft_tokens <= 6  # two looks at one token of every beam
    draft.asleep = False
    assert generator.generate(IDS, **RUN).stats.num_accepted_draft_tokens == RUN["max_new_tokens"] - 1
    assert generator.generate(IDS, **searching).stats.num_draft_tokens <= 6


def test_what_was_learned_belongs_to_the_draft() -> None:
    """Another draft of the same generator starts anew; the same one, named again, does not."""
    model, run = tiny("llama"), {**RUN, "max_new_tokens": 20}
    text = SpecGenerator(model).generate(IDS, **run).sequences[0].tolist()
    bad, good, run = Sleepy(text), Sleepy(text), {**run, "schedule": "cost"}
    bad.asleep = True
    generator = SpecGenerator(model)
    assert generator.generate(IDS, **run, assistant_model=bad).stats.num_draft_tokens > 10
    assert generator.generate(IDS, **run, assistant_model=bad).stats.num_draft_tokens <= 1
    assert generator.generate(IDS, **run, assistant_model=good).stats.num_draft_tokens > 10


def test_what_a_draft_cost_is_told() -> None:
    """A slow draft that is wrong takes longer than plain rounds; where these were not measured, nothing is told."""
    model, draft = tiny("llama"), Sleepy([])
    draft.asleep = True
    slow = SpecGenerator(model, draft, schedule="cost").generate(IDS, **RUN).stats
    assert slow.saved_seconds < -0.05
    assert "`draft='none'`" in slow.draft_advice
    unmeasured = SpecGenerator(model, draft, schedule="heuristic").generate(IDS, **RUN).stats
    assert unmeasured.saved_seconds == 0


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("assistant_model", {"assistant_model": 3}),
        ("assistant_model", {"assistant_model": ("suffix", "ngram")}),
        ("assistant_model", {"assistant_model": ("suffix", "none")}),
        ("assistant_model", {"assistant_model": ("suffix", "zoo:python-code")}),
        ("assistant_model", {"assistant_model": "suffix+suffix"}),
        ("assistant_model", {"assistant_model": "early_exit:9"}),
        ("assistant_early_exit", {"assistant_early_exit": True}),
        ("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": True}),
        ("max_matching_ngram_size", {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 0}),
        ("assistant_model", {"assistant_model": torch.nn.Linear(2, 2)}),
    ],
)
def test_errors_name_the_caller_s_argument(argument: str, given: dict[str, Any]) -> None:
    """`assistant_model=3` is not about `draft`. (It said so; True passed for a number.)"""
    with pytest.raises(OptionError, match=f"^`{argument}` must be"):
        SpecGenerator(tiny("llama")).generate(IDS, **RUN, **given)


# --- tokenizers


def tokenizers() -> dict[str, Any]:
    """Those of a target and of a draft with other numbers for the same bytes."""
    return {"tokenizer": byte_tokenizer(), "assistant_tokenizer": byte_tokenizer(backwards=True)}


@pytest.mark.parametrize("sampling", ["rejection", "block"])
@pytest.mark.parametrize("pair", [False, True])
def test_a_bridge_under_rejection_sampling(sampling: str, pair: bool) -> None:
    """It guesses by text, alone and in a pair."""
    target, model = tiny("llama", vocab=WIDTH), tiny("llama", vocab=WIDTH)
    generator = SpecGenerator(target, ("suffix", model) if pair else model, **tokenizers())
    assert generator.generate("abab", **SAMPLED, sampling=sampling).stats.num_draft_tokens > 0


def test_a_bridge_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """In the log and the statistics; a draft with the same tokenizer is not. (Its slowness had no reason.)"""
    model = tiny("llama", vocab=WIDTH)
    generator = SpecGenerator(model, model, tokenizer=byte_tokenizer(), assistant_tokenizer=byte_tokenizer())
    assert generator.generate("ab", **RUN).stats.settings["draft_kind"] == "model"
    assert not caplog.messages
    generator = SpecGenerator(model, ("suffix", model), **tokenizers())
    assert generator.generate("ab", **RUN).stats.settings["draft_kind"] == "suffix+model of another tokenizer"
    assert [message[:46] for message in caplog.messages] == ["the draft has another tokenizer than the targe"]


@pytest.mark.parametrize("draft", [None, "suffix", "early_exit:1", Sleepy([]), ("suffix", Sleepy([]))])
def test_an_assistant_tokenizer_needs_a_draft_model(draft: Any) -> None:
    """Beside a draft that has none it did nothing, silently."""
    with pytest.raises(OptionError, match="`assistant_tokenizer` belongs to a draft model"):
        SpecGenerator(tiny("llama", vocab=WIDTH), draft, **tokenizers())


def test_an_assistant_tokenizer_needs_the_target_s() -> None:
    """Alone it did nothing, silently; the target's may come with the call."""
    target, draft = tiny("llama", vocab=WIDTH), tiny("llama", vocab=WIDTH, seed=1)
    theirs = byte_tokenizer(backwards=True)
    with pytest.raises(OptionError, match="pass `tokenizer=` too"):
        SpecGenerator(target, draft, assistant_tokenizer=theirs)
    assistant = {"assistant_model": draft, "assistant_tokenizer": theirs}
    with pytest.raises(OptionError, match="pass `tokenizer=` too"):
        SpecGenerator(target).generate(IDS, **RUN, **assistant)
    out = SpecGenerator(target).generate("ab", **RUN, **assistant, tokenizer=byte_tokenizer())
    assert out.stats.num_draft_tokens > 0


@pytest.mark.parametrize("name", ["tokenizer", "assistant_tokenizer"])
@pytest.mark.parametrize("value", [3, "gpt2", object()])
def test_wrong_tokenizers(name: str, value: Any) -> None:
    """What is no tokenizer is refused at once. (It was a raw TypeError, in a call only after all tokens were made.)

    Two vocabularies are compared by their tokens. (A tokenizer without them was an AttributeError.)
    """
    tokenizers = {"tokenizer": byte_tokenizer(), name: value}
    target, draft = tiny("llama", vocab=WIDTH), tiny("llama", vocab=WIDTH, seed=1)
    with pytest.raises(OptionError, match=f"^`{name}` must be a transformers tokenizer"):
        SpecGenerator(target, draft, **tokenizers)
    with pytest.raises(OptionError, match=f"^`{name}` must be a transformers tokenizer"):
        SpecGenerator(target).generate(IDS, **RUN, assistant_model=draft, **tokenizers)
    with pytest.raises(OptionError, match=r"`tokenizer` must be a tokenizer with `get_vocab`"):
        SpecGenerator(target, draft, tokenizer=Letters(), assistant_tokenizer=byte_tokenizer())


# --- models that are not ready


@pytest.mark.parametrize("draft", ["model", ("ngram", "model"), "early_exit:1", "bridge"])
@pytest.mark.parametrize("which", ["target", "draft"])
def test_training_mode_after_construction(draft: Any, which: str) -> None:
    """Dropout would change the text. (Only the constructor looked.)"""
    target, small = tiny("llama", vocab=WIDTH), tiny("llama", vocab=WIDTH, seed=1)
    names = {"model": small, "bridge": small, ("ngram", "model"): ("ngram", small)}
    generator = SpecGenerator(target, names.get(draft, draft), **(tokenizers() if draft == "bridge" else {}))
    generator.generate(IDS, **RUN)
    (small if which == "draft" and draft != "early_exit:1" else target).train()
    with pytest.raises(OptionError, match=r"training mode.*\.eval\(\)"):
        generator.generate(IDS, **RUN)
    target.eval()
    small.eval()
    generator.generate(IDS, **RUN)


def test_a_generator_describes_itself() -> None:
    """Target and draft by architecture, size and place. (The target was an address.)"""
    generator = SpecGenerator(tiny("llama"), tiny("gpt2", seed=1))
    assert repr(generator).startswith("SpecGenerator(LanguageModel(LlamaForCausalLM, 2 layers, float32, cpu), draft=")
    assert "0x" not in repr(generator)
    assert repr(SpecGenerator(tiny("llama"), "ngram").draft) == repr(NgramDraft())


def test_streams_that_are_closed_early_teach_costs() -> None:
    """The next call knows what passes cost. (Only calls that ran to their end were learned from.)"""
    generator = SpecGenerator(tiny("llama"), tiny("llama", seed=1), schedule="cost")
    stream = generator.stream(IDS, **{**RUN, "max_new_tokens": 40})
    for _ in range(4):
        next(stream)
    stream.close()
    (pacing,) = generator._scheduled._pacings.values()
    cost = pacing.schedule
    assert cost.seconds.passes.weight > 0
