"""Models that see write what `model.generate` writes: every family, with any draft, whatever shares their passes."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch import Tensor
from transformers import GenerationMixin

from specdec import LanguageModel, OptionError, SpecGenerator, UnsupportedError
from specdec.models.backends.kv_session import KvSession
from specdec.models.hf.derived import media_modules
from tests.heads import changed, eagle_folder
from tests.matrix import endless, slow, with_kinds
from tests.oracle import KINDS, contrastive, oracle
from tests.pictures import FAMILIES, IMAGE, VIDEO, VOCAB, batch, hearing, prompt, seeing
from tests.tiny import tiny

LENGTH = 10
BEGINNING, MIDDLE, ENDING = [1, 5, 6, 7, 8], [20, 21], [9, 10, 11, 12, 13]


QUICK, MORE = ("qwen2_5_vl", "gemma3", "paligemma"), ("qwen3_vl", "smolvlm")
SOME = [*QUICK, *map(slow, MORE)]


@cache
def model_of(family: str) -> Any:
    return seeing(family)


def rows_of(family: str) -> list[dict[str, Tensor]]:
    """Text alone, a picture at the end, one in text, and two."""
    parts = [(BEGINNING, ENDING), (BEGINNING, 0), (BEGINNING, 0, ENDING), (BEGINNING, 1, MIDDLE, 2, ENDING)]
    return [prompt(family, *row) for row in parts]


def reference(model: Any, row: dict[str, Tensor], **options: Any) -> list[list[int]]:
    """transformers' text of one row."""
    settings = endless(LENGTH, **{"do_sample": False, "eos_token_id": None, **options})
    found: list[list[int]] = GenerationMixin.generate(model, **row, **settings).tolist()
    return found


@cache
def expected(family: str) -> list[list[int]]:
    """The greedy text of every row."""
    return [reference(model_of(family), row)[0] for row in rows_of(family)]


def new(rows: Any) -> list[list[int]]:
    """The new tokens of rows of ids."""
    return [list(map(int, row[-LENGTH:])) for row in rows]


@pytest.mark.parametrize(("family", "kinds"), with_kinds([*FAMILIES], QUICK, [None, *KINDS]))
def test_greedy_equals_transformers(family: str, kinds: Sequence[str | None]) -> None:
    """In one batch, with drafts that are right, half right, wrong and random."""
    model, inputs = model_of(family), batch(family, rows_of(family))
    other = reference(model, prompt(family, BEGINNING, 3, ENDING))
    assert new(other) != new(expected(family)[2:3]), "another picture in the same text changes nothing"
    for kind in kinds:
        draft = None if kind is None else oracle(kind, expected(family), VOCAB)
        out = SpecGenerator(model, draft).generate(**inputs, **endless(LENGTH))
        assert new(out.sequences) == new(expected(family)), kind
        if kind == "perfect":
            assert out.stats.draft_acceptance_rate == 1.0


@pytest.mark.parametrize("backend", ["eager", "packed"])
def test_prompts_in_both_directions_without_types(backend: str, built: None) -> None:
    """PaliGemma's layers read text alone so, in `generate` too. (A draft's first guesses were read with the prompt,
    which made another text, and in a batch a row's text was not the text of the row alone.)
    """
    model = model_of("paligemma")
    texts = [[1, 5, 6, 7, 8, 9, 10, 11], [1, 12, 13]]
    for how in ({}, {"repetition_penalty": 1.6}, {"num_beams": 3}):
        answers = [reference(model, {"input_ids": torch.tensor([text])}, **how)[0] for text in texts]
        for kind in (None, "perfect", "half", "wrong"):
            generator = SpecGenerator(model, kind and oracle(kind, answers, VOCAB), backend=backend)
            assert new(generator.generate(texts, **endless(LENGTH, **how)).sequences) == new(answers), kind
            alone = generator.generate(texts[:1], **endless(LENGTH, **how)).sequences
            assert alone.tolist() == answers[:1], kind
    with pytest.raises(UnsupportedError, match="reads prompts in both directions, without `guidance_scale`"):
        generator.generate(texts, guidance_scale=1.5, **endless(4))


@pytest.mark.parametrize("family", SOME)
def test_beams_equal_transformers(family: str) -> None:
    """Of two pictures in one text, with a draft."""
    model, row = model_of(family), rows_of(family)[3]
    options = {"num_beams": 3, "num_return_sequences": 2}
    out = SpecGenerator(model, "ngram").generate(**row, **endless(8, **options))
    assert out.sequences.tolist() == reference(model, row, max_new_tokens=8, **options)


@pytest.mark.parametrize("family", SOME)
def test_samples_and_layers_of_our_own(family: str) -> None:
    """Packed passes write the same greedy text; a seed's text is the same with and without a draft."""
    model, inputs = model_of(family), batch(family, rows_of(family))
    packed = SpecGenerator(model, "suffix", backend="packed")
    assert new(packed.generate(**inputs, **endless(LENGTH)).sequences) == new(expected(family))
    sampled = endless(LENGTH, do_sample=True, seed=3, num_return_sequences=2)
    plain = SpecGenerator(model).generate(**inputs, **sampled)
    assert packed.generate(**inputs, **sampled).sequences.tolist() == plain.sequences.tolist()


@pytest.mark.parametrize("family", SOME)
def test_a_draft_of_the_family_sees_the_picture(family: str) -> None:
    """A copy of the target guesses all; another model, layers of the target, a model of text alone change nothing."""
    model, inputs = model_of(family), batch(family, rows_of(family))
    drafts = {"same": seeing(family), "other": seeing(family, seed=1), "text": tiny("llama")}
    for name, draft in {**drafts, "exit": "early_exit:1", "few bits": "quantized"}.items():
        out = SpecGenerator(model, draft).generate(**inputs, **endless(LENGTH))
        assert new(out.sequences) == new(expected(family)), name
        if name == "same":
            assert out.stats.draft_acceptance_rate == 1.0


@pytest.mark.parametrize("draft", ["model", "hybrid"])
def test_a_model_of_text_alone_reads_no_placeholder(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts, samples and beams stay the target's; the draft's row is shorter by the pictures."""
    model, inputs, small = model_of("llava"), batch("llava", rows_of("llava")), LanguageModel(tiny("llama"))
    monkeypatch.setattr(KvSession, "run", run := create_autospec(KvSession.run, side_effect=KvSession.run))
    generator = SpecGenerator(model, small if draft == "model" else ("suffix", small), prefix_cache=False)
    for options in ({}, {"do_sample": True, "seed": 5}, {"num_beams": 2}):
        plain = SpecGenerator(model).generate(**inputs, **endless(LENGTH, **options))
        run.reset_mock()
        out = generator.generate(**inputs, **endless(LENGTH, **options))
        assert out.sequences.tolist() == plain.sequences.tolist()
        passes = [works for (session, works), _ in run.call_args_list if session._language is small]
        read = [work.tree.tokens for works in passes for work in works]
        assert any(tokens[: len(BEGINNING)] == BEGINNING for tokens in read)
        assert not any(IMAGE in (one, other) for tokens in read for one, other in pairwise(tokens) if one == other)


@pytest.mark.parametrize("family", SOME)
def test_a_prefix_is_shared_with_the_same_pictures_alone(family: str) -> None:
    """By content: another picture in the same text shares nothing; a text that goes on after the same one does."""
    model, longer = model_of(family), [*ENDING, *range(20, 40)]
    reads_all = family == "paligemma"  # in both directions, to the end
    generator = SpecGenerator(model, "suffix", prefix_cache=True)
    for parts in ((BEGINNING, 0, longer), (BEGINNING, 3, longer), (BEGINNING, 0, longer)):
        row = prompt(family, *parts)
        out = generator.generate(**row, **endless(LENGTH))
        assert new(out.sequences) == new(reference(model, row)), parts
    width = row["input_ids"].shape[1]
    assert out.stats.cached_prompt_tokens == (0 if reads_all else width - 1)
    row = prompt(family, BEGINNING, 0, [*longer, 30, 31])
    out = generator.generate(**row, **endless(LENGTH))
    assert new(out.sequences) == new(reference(model, row))
    assert out.stats.cached_prompt_tokens == (0 if reads_all else width)


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_long_prompts_are_read_in_chunks(family: str) -> None:
    """What follows the last picture; guidance reads its negative prompt without the picture."""
    model, row = model_of(family), prompt(family, BEGINNING, 1, MIDDLE, 2, [*range(5, 45)])
    out = SpecGenerator(model, "suffix").generate(**row, **endless(LENGTH, prefill_chunk_size=7))
    assert new(out.sequences) == new(reference(model, row))
    assert out.stats.num_target_passes >= 6
    guided = {"guidance_scale": 2.0, "negative_prompt_ids": torch.tensor([[5, 6, 7]])}
    plain = SpecGenerator(model).generate(**row, **endless(8, **guided))
    assert SpecGenerator(model, "suffix").generate(**row, **endless(8, **guided)).sequences.equal(plain.sequences)


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        *((family, "eager") for family in QUICK),
        *(slow(family, "eager") for family in MORE),
        slow("qwen2_5_vl", "packed"),
    ],
)
def test_eyes_are_loaded_for_the_first_picture(family: str, backend: str, tmp_path: Path) -> None:
    """Text needs none of their memory; a draft of the target's layers gets them as well."""
    model, inputs = model_of(family), batch(family, rows_of(family))
    model.save_pretrained(tmp_path)
    generator = SpecGenerator(str(tmp_path), "early_exit:1", backend=backend)
    target = generator.target
    text = prompt(family, BEGINNING, [*ENDING, *range(20, 40)])
    for _ in range(2):
        out = generator.generate(**text, **endless(LENGTH))
        assert new(out.sequences) == new(reference(model, text))
        assert not media_modules(target.model)
        assert type(target.model) is type(model)
    for _ in range(3):
        out = generator.generate(**inputs, **endless(LENGTH))
        assert new(out.sequences) == new(expected(family))
    assert media_modules(target.model).keys() == media_modules(model).keys()
    assert target.weight_bytes <= sum(weight.nbytes for weight in model.get_decoder().parameters()) * 2
    longer = prompt(family, BEGINNING, 0, [*ENDING, *range(20, 40)])
    generator.generate(**longer, **endless(LENGTH))
    again = generator.generate(**longer, **endless(LENGTH))
    assert bool(again.stats.cached_prompt_tokens) == (family != "paligemma")  # read in both directions, to the end


@pytest.mark.parametrize("family", SOME)
def test_hidden_states_and_attentions(family: str) -> None:
    model, row = seeing(family), prompt(family, BEGINNING, 0, ENDING)
    model.set_attn_implementation("eager")
    names = {"hidden_states": "output_hidden_states", "attentions": "output_attentions"}
    options = endless(4, return_dict_in_generate=True, **dict.fromkeys(names.values(), True))
    out = SpecGenerator(model, "suffix").generate(**row, **options)
    theirs = GenerationMixin.generate(model, **row, **{**options, "do_sample": False, "eos_token_id": None})
    assert out.sequences.tolist() == theirs.sequences.tolist()
    for name in names:
        for mine, other in zip(out[name], theirs[name], strict=True):
            for one, two in zip(mine, other, strict=True):
                width = two.shape[-1]  # transformers forgets columns before a window
                assert torch.allclose(one[..., -width:], two, atol=1e-4)


@pytest.mark.parametrize("family", [one for one in SOME if one != "paligemma"])  # it reads new text in one direction
@torch.no_grad()
def test_contrastive_search_equals_the_formula(family: str) -> None:
    model, row, (alpha, k) = model_of(family), prompt(family, BEGINNING, 0, ENDING), (0.6, 4)
    out = SpecGenerator(model).generate(
        **row, **endless(8, penalty_alpha=alpha, top_k=k, suppress_tokens=[IMAGE, VIDEO])
    )

    def read(new: list[int]) -> Any:
        ids = torch.cat([row["input_ids"], torch.tensor([new]).long()], 1)
        longer = {n: torch.nn.functional.pad(v, (0, len(new))) for n, v in row.items() if n.endswith("token_type_ids")}
        found = model(
            **row | longer | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, output_hidden_states=True
        )
        found.logits[..., [IMAGE, VIDEO]] = -torch.inf
        return found

    assert out.new_tokens() == [contrastive(read, alpha, k, 8)]


@pytest.mark.parametrize("family", SOME)
def test_a_head_reads_what_the_target_saw(family: str, tmp_path: Path) -> None:
    """It guesses from hidden states of the text and its pictures, and changes nothing."""
    model, inputs = model_of(family), batch(family, rows_of(family))
    folder = eagle_folder(tmp_path, eagle_aux_hidden_state_layer_ids=[0, 1])
    changed(folder, speculators_config={"verifier": {"architectures": [type(model).__name__]}})
    for options in ({}, {"num_beams": 2}):
        out = SpecGenerator(model, str(folder)).generate(**inputs, **endless(LENGTH, **options))
        plain = SpecGenerator(model).generate(**inputs, **endless(LENGTH, **options))
        assert out.sequences.tolist() == plain.sequences.tolist()
        assert out.stats.draft_acceptance_rate is not None


@pytest.mark.parametrize("family", [one for one in SOME if one != "paligemma"])
@pytest.mark.usefixtures("built")
def test_strict_passes(family: str) -> None:
    """A row's logits are the same, bit for bit, alone and in a batch with a draft."""
    model, rows = model_of(family), rows_of(family)
    how: Any = {"backend": "packed", "exactness": "strict"}
    options = endless(LENGTH, output_logits=True)
    batched = SpecGenerator(model, "suffix", **how).generate(**batch(family, rows), **options)
    generator = SpecGenerator(model, **how)
    for number, row in enumerate(rows):
        alone = generator.generate(**row, **options)
        assert torch.equal(torch.cat(alone.logits), torch.stack(batched.logits)[:, number])


@pytest.mark.usefixtures("built")
def test_recorded_passes() -> None:
    """They go on where the model's own code has read the pictures, at its positions."""
    target = LanguageModel(seeing("qwen2_5_vl"), backend="packed")
    assert target.ragged is not None
    assert target.ragged.recorded is not None
    for draft in (None, "suffix"):
        out = SpecGenerator(target, draft).generate(**batch("qwen2_5_vl", rows_of("qwen2_5_vl")), **endless(LENGTH))
        assert new(out.sequences) == new(expected("qwen2_5_vl"))


@pytest.mark.parametrize("family", ["qwen2_audio", "voxtral", "granite_speech"])
def test_recordings_in_text(family: str) -> None:
    """They are read as pictures are."""
    model, row = hearing(family)
    for draft in (None, "suffix"):
        out = SpecGenerator(model, draft).generate(**row, **endless(LENGTH))
        assert out.sequences.tolist() == reference(model, row)
    with pytest.raises(OptionError, match="places for a recording"):
        SpecGenerator(model).generate(row["input_ids"], **endless(LENGTH))
