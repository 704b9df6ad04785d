"""Greedy text is the target's own: equal to transformers and to plain decoding, with any draft, on any architecture."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from specdec import LanguageModel, SpecGenerator
from specdec.core.budget import Budget
from specdec.core.draft_schedules.cost import Cost
from specdec.core.draft_schedules.estimates import Acceptance
from tests.matrix import endless, slow, with_kinds
from tests.oracle import KINDS, oracle
from tests.tiny import DECODERS, NAMES, tiny, tiny_inputs

VOCAB = 64
LENGTH = 12
ARCHITECTURES = [name for name in NAMES if name != "rwkv"]
COMMON = ("llama", "mistral", "gemma2", "gpt_neo", "bloom", "mamba", "t5", "whisper")  # one of every kind


def prompt_for(name: str, rows: int = 1) -> dict[str, Tensor]:
    """Model inputs for one architecture; longer than every window of the tiny models."""
    if name == "whisper":
        return tiny_inputs(name, rows, seed=7)
    ids = torch.randint(5, VOCAB, (rows, 14), generator=torch.Generator().manual_seed(7))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def reference(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """transformers' own greedy text."""
    from transformers import GenerationMixin

    with torch.no_grad():
        return GenerationMixin.generate(
            model, **inputs, **endless(LENGTH, **{"do_sample": False, "eos_token_id": None, **options})
        )


@pytest.mark.parametrize(("name", "kinds"), with_kinds(ARCHITECTURES, COMMON, KINDS))
def test_greedy_equals_transformers(name: str, kinds: Sequence[str]) -> None:
    """Plain and assisted text equal transformers', for drafts that are right, half right, wrong and random."""
    model = tiny(name, vocab=VOCAB)
    inputs = prompt_for(name)
    options = endless(LENGTH)
    expected = reference(model, inputs)
    plain = SpecGenerator(model).generate(**inputs, **options)
    assert plain.sequences.tolist() == expected.tolist()
    for kind in kinds:
        out = SpecGenerator(model, oracle(kind, expected.tolist(), VOCAB)).generate(**inputs, **options)
        assert out.sequences.tolist() == expected.tolist(), kind
        if kind == "perfect":
            assert out.stats.draft_acceptance_rate == 1.0
            if LanguageModel(model).capability.cache_kind == "kv":
                assert out.stats.num_target_passes < plain.stats.num_target_passes / 3
        if kind == "wrong":
            assert out.stats.num_accepted_draft_tokens == 0


def shifts(first: str, *others: str) -> list[Any]:
    """Cases of a name and a shift: 0 of every name, and of the first one all three."""
    return [*((name, 0) for name in (first, *others)), slow(first, 1), slow(first, 2)]


DRAFTING = list(itertools.product(("heuristic", "constant", "confidence", "cost"), (False, True)))


@pytest.mark.parametrize(
    ("name", "shift"),
    [*shifts("llama", "gemma2", "bloom", "qwen3_next", "t5", "whisper"), slow("gpt2", 0), slow("bart", 0)],
)
def test_every_draft_kind_keeps_the_text(name: str, shift: int) -> None:
    """Assistant model, prompt lookup, suffix automaton, early exit and hybrid: all give the plain text.

    The drafts take turns with schedules and branches; with the three shifts every draft meets all of these.
    """
    model, assistant = tiny(name, vocab=VOCAB), tiny(name, vocab=VOCAB, seed=1)
    inputs = prompt_for(name)
    length = 10 if name == "qwen3_next" else LENGTH
    options = endless(length)
    expected = SpecGenerator(model).generate(**inputs, **options).sequences.tolist()
    for i, draft in enumerate((model, assistant, ("suffix", assistant), "early_exit:1", "ngram", "suffix")):
        generator = SpecGenerator(model, draft)
        for schedule, wide in DRAFTING[(i + shift) % 3 :: 3]:
            branches = (3 if wide else 1) if generator.draft.guesses_trees else (None if wide else 1)
            out = generator.generate(**inputs, **options, schedule=schedule, num_assistant_branches=branches)
            assert out.sequences.tolist() == expected, (draft, schedule, branches)


@pytest.mark.parametrize("name", COMMON)
def test_branching_drafts_keep_the_text(name: str) -> None:
    """Trees of guesses, in a ragged batch and with a processor that reads the text."""
    model, assistant = tiny(name, vocab=VOCAB), noisy(tiny(name, vocab=VOCAB), 0.02)
    prompts = prompt_for(name) if name == "whisper" else {"prompt": [[5, 9, 12], [8, 30, 31, 7, 22, 9, 41, 6], [11]]}
    options = endless(16, no_repeat_ngram_size=2)
    expected = SpecGenerator(model).generate(**prompts, **options).sequences.tolist()
    generator = SpecGenerator(model, assistant, schedule="constant", num_assistant_tokens=4)
    chains = generator.generate(**prompts, **options)
    trees = generator.generate(**prompts, **options, num_assistant_branches=4)
    assert chains.sequences.tolist() == trees.sequences.tolist() == expected
    assert trees.stats.mean_acceptance_length > 1
    assert trees.stats.num_draft_tokens > 2 * chains.stats.num_draft_tokens


@dataclass(frozen=True)
class Beside:
    """Chains of four guesses, with siblings or without."""

    siblings: bool
    max_tokens: ClassVar[int] = 4
    max_branches: ClassVar[int] = 2

    def budgets(self, seqs: Sequence[object]) -> list[Budget]:
        return [Acceptance().budget(4, 0.0, 0.01, 1, siblings=self.siblings)] * len(seqs)

    def after(self, round: object) -> "Beside":
        return self


@pytest.mark.parametrize(
    "own",
    [{}, {"no_repeat_ngram_size": 2}, {"do_sample": True, "seed": 5}],
    ids=["in one call", "pass by pass", "drawn"],
)
@pytest.mark.parametrize("name", COMMON)
def test_siblings_keep_the_text(name: str, own: dict[str, Any]) -> None:
    """The next tokens beside each guess, the likeliest or those that the noise favours, save passes of the target where
    the guess is wrong.
    """
    model, assistant = tiny(name, vocab=VOCAB), noisy(tiny(name, vocab=VOCAB), 0.03)
    prompts = prompt_for(name) if name == "whisper" else {"prompt": [[5, 9, 12], [8, 30, 31, 7, 22, 9, 41, 6], [11]]}
    options = endless(24, **own)
    expected = SpecGenerator(model).generate(**prompts, **options).sequences.tolist()
    for draft in (assistant, ("suffix", assistant)):
        generator = SpecGenerator(model, draft)
        chains, wide = (generator.generate(**prompts, **options, schedule=Beside(some)) for some in (False, True))
        assert chains.sequences.tolist() == wide.sequences.tolist() == expected
        if draft is assistant and generator.target.capability.cache_kind == "kv":  # others verify no trees
            assert wide.stats.num_target_passes <= chains.stats.num_target_passes - (name == "llama")


@pytest.mark.parametrize(("name", "trees"), [("llama", True), ("t5", True), ("mamba", False)])
@pytest.mark.parametrize("hybrid", [False, True])
def test_the_cost_rule_takes_trees_by_itself(
    name: str, trees: bool, hybrid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nodes are cheap, a draft model guesses more of them than a chain has. (It was never told of branches.)

    Not where the target runs the paths of a tree one by one.
    """
    # Whatever tiny models cost here: it drafts, all of it is worth its time, and trees are.
    monkeypatch.setattr(Cost, "is_measured", False)
    monkeypatch.setattr(Cost, "_nodes_are_cheap", True)
    monkeypatch.setattr(Budget, "keep", lambda *_: True)
    model, assistant = tiny(name, vocab=VOCAB), noisy(tiny(name, vocab=VOCAB), 0.02)
    options = endless(LENGTH)
    prompts = [[5, 9, 12], [8, 30, 31, 7, 22, 9, 41, 6]]
    generator = SpecGenerator(model, ("suffix", assistant) if hybrid else assistant, schedule="cost")
    out = generator.generate(prompts, **options, num_assistant_tokens=3)
    assert out.sequences.tolist() == SpecGenerator(model).generate(prompts, **options).sequences.tolist()
    assert (max(out.stats.per_round_drafted) > 3) == trees


def noisy(model: Any, scale: float) -> Any:
    """The model with noise on its weights: a draft that is often right."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gpt2", "bloom", "mamba", "t5", *map(slow, ("mistral", "falcon_alibi", "bart"))]
)
def test_ragged_batch_equals_each_row_alone(name: str) -> None:
    """Rows of different lengths that finish at different times: each equals the row decoded alone."""
    model, assistant = tiny(name, vocab=VOCAB), tiny(name, vocab=VOCAB, seed=1)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(5, VOCAB, (n,), generator=generator).tolist() for n in (3, 17, 9)]
    first = SpecGenerator(model).generate([prompts[0]], **endless(LENGTH))
    options = endless(LENGTH, eos_token_id=int(first.sequences[0, -LENGTH // 2]))
    alone = [new_tokens(SpecGenerator(model), [p], options)[0] for p in prompts]
    assert len({len(row) for row in alone}) > 1
    begun = prompts if name in DECODERS else [[model.config.decoder_start_token_id]] * 3
    texts = [start + row for start, row in zip(begun, alone, strict=True)]
    for draft in (None, assistant, "suffix", oracle("half", texts, VOCAB)):
        assert new_tokens(SpecGenerator(model, draft), prompts, options) == alone, draft


def new_tokens(generator: SpecGenerator, prompts: list[list[int]], options: dict[str, Any]) -> list[list[int]]:
    """Each row's new tokens, cut behind its own end of text."""
    return generator.generate(prompts, **options).new_tokens()
