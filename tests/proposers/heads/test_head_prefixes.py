"""Heads of all kinds in all sorts of calls, beside and after others: prompts that begin alike, come late, in chunks."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LanguageModel, SpecGenerator
from specdec.models import prefix_bytes
from specdec.models.backends.kv_session import KvSession
from tests.engine.test_threads import is_clean
from tests.heads import IDS, RUN, Proposals, eagle_folder, target
from tests.matrix import slow

FIRST = [(7 * i) % 50 + 5 for i in range(40)]
DRAFTING: dict[str, Any] = {**RUN, "schedule": "constant", "num_assistant_tokens": 3}
KINDS = ["eagle", "mtp", slow("dflash"), slow("gemma4")]
WAYS: dict[str, dict[str, Any]] = {
    "constant": {"schedule": "constant", "num_assistant_tokens": 4},
    "branches": {"schedule": "heuristic", "num_assistant_branches": 3},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "seed": 3, "num_return_sequences": 2, "schedule": "cost"},
    "rejection": {"do_sample": True, "seed": 3, "sampling": "rejection", "num_assistant_branches": 3},
    "block": {"do_sample": True, "seed": 3, "sampling": "block", "schedule": "confidence"},
    "guided": {"guidance_scale": 1.8},
}
USUAL = {
    "fc": {*WAYS}, "dflash": {"constant", "branches", "block"}, "mtp": {"constant", "beams", "samples"},
    "mellum": {"constant"}, "gemma4": {"constant", "rejection"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "way"), [(kind, way) if way in USUAL[kind] else slow(kind, way) for kind in USUAL for way in WAYS]
)
def test_the_text_is_the_target_s(kind: str, way: str, made: Callable[[str], tuple[Any, Any]]) -> None:
    """With trees, samples and beams, in ragged batches; sampling by q repeats under a seed."""
    model, draft = made(kind)
    generator, plain, given = SpecGenerator(model, draft, prefix_cache=True), SpecGenerator(model), WAYS[way]
    out = generator.generate(IDS, **RUN, **given)
    if "sampling" in given:
        plain = generator
    else:
        given = {name: given[name] for name in given if name not in DRAFTING and name != "num_assistant_branches"}
    assert out.sequences.tolist() == plain.generate(IDS, **RUN, **given).sequences.tolist()
    assert out.stats.num_draft_tokens > 0 or (way == "beams" and kind == "dflash")


SAMPLED = {"do_sample": True, "seed": 3, "top_k": 20, "temperature": 1.5, "num_return_sequences": 2}


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", ["windows", "mtp"])
@pytest.mark.parametrize(("schedule", "how"), [("constant", {}), ("confidence", SAMPLED)], ids=str)
def test_chains_in_one_call_are_those_of_passes(
    kind: str,
    schedule: str,
    how: dict[str, Any],
    made: Callable[[str], tuple[Any, Any]],
    proposals: Proposals,
    chains: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However guesses are chosen, of one text and of several; experts and all."""
    model, draft = made(kind)
    generator, guesses = SpecGenerator(model, draft, backend="packed", schedule=schedule), []
    expected = [SpecGenerator(model).generate(ids, **RUN, **how).sequences.tolist() for ids in (IDS, IDS[:1])]
    for whole in (True, False):
        monkeypatch.setattr(KvSession, "draft_chains", whole)
        proposals.clear()
        chains.clear()
        assert [generator.generate(ids, **RUN, **how).sequences.tolist() for ids in (IDS, IDS[:1])] == expected
        assert (len({*chains}) > 1) == whole
        guesses.append([(text, tree.tokens) for text, tree in proposals])
    assert guesses[0] == guesses[1]


@pytest.mark.parametrize("kind", KINDS)
def test_what_others_have_read(kind: str, made: Callable[[str], tuple[Any, Any]], proposals: Proposals) -> None:
    """A request that comes late continues a running one, in the head too, and guesses as if it had come alone.

    So does the running one, and one whose beginning only rows that have left had read.
    """
    model, draft = made(kind)
    prompts = [[*FIRST, 30], [*FIRST[:32], 9, 8, 7, *FIRST]]
    generator = SpecGenerator(model, draft, prefix_cache=True)
    stream = generator.stream([FIRST], **{**DRAFTING, "max_new_tokens": 40})
    next(stream)
    late = [generator.generate([prompt], **DRAFTING, prefill_chunk_size=7) for prompt in prompts]
    assert list(stream)
    prompts.append([*late[0].sequences[0].tolist(), 9, 8, 7])
    late.append(generator.generate(prompts[-1:], **DRAFTING))
    beside = {tuple(text): tree.tokens for text, tree in proposals}
    assert [out.stats.cached_prompt_tokens for out in late[:2]] == [39, 31]
    assert late[2].stats.cached_prompt_tokens > 41
    for prompt, out in zip(prompts, late, strict=True):
        proposals.clear()
        alone = SpecGenerator(model, draft, prefix_cache=False).generate([prompt], **DRAFTING)
        assert out.sequences.tolist() == alone.sequences.tolist()
        assert out.sequences.tolist() == SpecGenerator(model).generate([prompt], **RUN).sequences.tolist()
        assert out.stats.num_draft_tokens > 0
        assert proposals
        assert all(beside[tuple(text)][: len(tree)] == tree.tokens for text, tree in proposals)


def plain(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Texts without a draft, and without anything kept."""
    return SpecGenerator(model, prefix_cache=False).generate(prompts, **{**RUN, **options}).sequences.tolist()


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}, {"do_sample": True, "seed": 3}], ids=str)
def test_several_texts_and_ways(how: dict[str, Any], tmp_path: Path) -> None:
    """The next turns of several chats continue what was kept of each, in one call, and beside copied guesses."""
    model, folder = target(), eagle_folder(tmp_path / "head")
    chats = [FIRST, [*FIRST[::-1], 3], [7, 8, *FIRST]]
    for draft in (folder, f"suffix+{folder}"):
        generator, prompts = SpecGenerator(model, draft, prefix_cache=True), chats
        options = {**how, "schedule": "constant", "num_assistant_tokens": 3}
        for turn in range(2):
            out = generator.generate(prompts, **RUN, **options, prefill_chunk_size=7)
            assert out.sequences.tolist() == plain(model, prompts, **how)
            assert (out.stats.cached_prompt_tokens >= 3 * 40) == bool(turn)
            prompts = [[*prompt, *new, 9] for prompt, new in zip(prompts, out.new_tokens(), strict=True)]


def test_a_head_continues_what_it_has_read_itself(tmp_path: Path) -> None:
    """What was kept without a head, or with another one, is read again, and all parts stay side by side."""
    model = target()
    one, other = eagle_folder(tmp_path / "one"), eagle_folder(tmp_path / "other", seed=1)
    generator = SpecGenerator(model, prefix_cache=True)

    def turn(prompt: list[int], **draft: Any) -> tuple[int, list[int]]:
        out = generator.generate([prompt], **RUN, **draft)
        assert out.sequences.tolist() == plain(model, [prompt])
        return out.stats.cached_prompt_tokens, out.sequences[0].tolist()

    _, text = turn(FIRST)
    assert turn(FIRST, assistant_model=one)[0] == 0
    assert turn(FIRST, assistant_model=other)[0] == 0
    assert turn(FIRST)[0] == 39
    cached, longer = turn([*text, 9, 8], assistant_model=one)
    assert 40 < cached < len(text)
    assert turn([*longer, 7])[0] == len(longer) - 1  # the target alone goes further
    assert turn([*longer, 7, 6], assistant_model=other)[0] in range(40, len(text))
    assert turn([*longer, 7, 6, 5], assistant_model=one)[0] in range(len(text) + 2, len(longer))


def test_what_is_kept_of_a_head_holds_no_sequence(tmp_path: Path) -> None:
    """Results that nobody has any longer are freed. (Their sequences stayed, with logits that no limit counted.)"""
    generator = SpecGenerator(target(), eagle_folder(tmp_path), prefix_cache=True)
    call = generator.submit([FIRST], **RUN, output_logits=True)
    sequence = weakref.ref(call.call.seqs[0])
    call.run()
    del call
    assert is_clean(generator)  # the engine's thread has ended
    gc.collect()
    assert sequence() is None


def test_a_head_beside_a_row_without_one(tmp_path: Path) -> None:
    """Keys and values come of the row that runs, and the head's part of one that has left."""
    model, folder = target(), eagle_folder(tmp_path / "head")
    generator = SpecGenerator(model, prefix_cache=True)
    generator.generate([FIRST], **RUN, assistant_model=folder)
    stream = generator.stream([[*FIRST, 30, 31]], **RUN)
    next(stream)
    out = generator.generate([[*FIRST, 30, 9]], **RUN, assistant_model=folder)
    stream.close()
    assert out.stats.cached_prompt_tokens == 39
    assert out.sequences.tolist() == plain(model, [[*FIRST, 30, 9]])


@pytest.mark.parametrize("count", [1, 3])
def test_rows_that_end_early(tmp_path: Path, count: int) -> None:
    """What a cancelled call has read is kept as well; the head need not have read as much as the target."""
    model, folder = target(), eagle_folder(tmp_path / "head")
    generator = SpecGenerator(model, folder, prefix_cache=True)
    stream = generator.stream([FIRST], **DRAFTING)
    events = [next(stream) for _ in range(count)]
    with torch.inference_mode():
        stream.close()
    text = [*FIRST, *(token for event in events for token in event.token_ids)]
    out = generator.generate([[*text, 9]], **RUN)
    assert 39 <= out.stats.cached_prompt_tokens <= len(text)
    assert out.sequences.tolist() == plain(model, [[*text, 9]])


def test_room_for_heads_too(tmp_path: Path) -> None:
    """Target's and heads' parts together never take more than is allowed, and give way together."""
    model, folder = target(), eagle_folder(tmp_path / "head")
    prompts = [[(seed + 3 * i) % 50 + 5 for i in range(40)] for seed in range(4)]
    each = LanguageModel(model).kv_bytes * 53
    generator = SpecGenerator(model, folder, prefix_cache=int(2.8 * each))
    prefixes = generator._prefixes
    for prompt in prompts:
        generator.generate([prompt], **RUN)
        sizes = [prefix_bytes(kept.state) for kept in prefixes._states]
        assert sum(sizes) == sum(kept.bytes for kept in prefixes._states) == prefixes.bytes
        assert each < prefixes.bytes <= prefixes.limit
    for prompt, kept in zip(prompts[::-1], (True, True, False, False), strict=True):
        out = generator.generate([prompt], **RUN)
        assert (out.stats.cached_prompt_tokens > 0) == kept
        assert out.sequences.tolist() == plain(model, [prompt])


def test_embeddings_without_ids_in_chunks(tmp_path: Path) -> None:
    """Nothing of such a prompt has ids. (A head took back a token that no text had.)"""
    model = target()
    embeds = model.get_input_embeddings()(torch.tensor([FIRST[:20]])).detach()
    plain = SpecGenerator(model).generate(inputs_embeds=embeds, **RUN)
    generator = SpecGenerator(model, eagle_folder(tmp_path / "head"), prefix_cache=True)
    for way in ({}, {"num_beams": 3}):
        expected = plain if not way else SpecGenerator(model).generate(inputs_embeds=embeds, **RUN, **way)
        out = generator.generate(inputs_embeds=embeds, **DRAFTING, **way, prefill_chunk_size=7)
        assert out.new_tokens() == expected.new_tokens()
