"""Prompts that were read before: what is reused, what is not, what gives way, and how much memory all of it takes."""

import threading
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
import torch

from specdec import LanguageModel, OptionError, SpecGenerator
from specdec.core.drafts import Draft, SavedState
from specdec.core.sequence import Context
from specdec.core.tree import common_length
from specdec.core.work import Work
from specdec.engine import scheduler
from specdec.engine.prefix_cache import PrefixCache, PrefixIndex
from specdec.models import free_bytes
from specdec.proposers import hybrid
from tests.engine.test_requests import finish, submit
from tests.engine.test_threads import generated, together
from tests.heads import eagle_folder
from tests.matrix import endless, in_pairs, slow
from tests.oracle import sessions_of_drafts, shapes
from tests.tiny import DECODERS, NAMES, tiny, tiny_inputs

COMMON = endless(12)
FIRST = [[(7 * i) % 50 + 5 for i in range(40)]]


def alone(model: Any, prompt: Any, **options: Any) -> list[list[int]]:
    """The texts of a generator that keeps nothing."""
    return SpecGenerator(model, prefix_cache=False).generate(prompt, **{**COMMON, **options}).sequences.tolist()


TURNS = [{}, {"do_sample": True, "seed": 3}, {"num_beams": 3}]


@in_pairs(name=["llama", "gemma2", "bloom", "gpt2"], how=TURNS, draft=["copies", "model", "both"])
def test_the_next_turn_continues_the_last(
    name: str, how: dict[str, Any], draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat so far is not read again, its answer included, and the text is as if it were.

    Nor does a draft model read it again. (The target continued, and the draft read all of it.)
    """
    monkeypatch.setattr(hybrid, "_FEW", 1000)  # the model reads however little is left
    target, model = tiny(name), tiny(name, seed=1)
    drafts: dict[str, Any] = {"copies": "suffix", "model": model, "both": ("suffix", model)}
    generator = SpecGenerator(target, drafts[draft], schedule="constant", prefix_cache=True)
    with shapes(model) as read:
        out = generator.generate(FIRST, **COMMON, **how)
        assert out.stats.cached_prompt_tokens == 0
        for turn in range(3):
            prompt = [[*out.sequences[0].tolist(), 9, 10 + turn, 11]]
            out = generator.generate(prompt, **COMMON, **how)
            assert out.stats.cached_prompt_tokens >= 40
            assert out.sequences.tolist() == alone(target, prompt, **how)
    assert bool(read) == (draft != "copies")
    assert sum(nodes for _, nodes in read if nodes > 35) < out.sequences.shape[1]


def test_a_hybrid_knows_what_the_draft_need_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It weighs the reading of what is new of a chat. (It weighed the reading of all of it, and so left the model.)"""
    unread: list[int] = []
    monkeypatch.setattr(hybrid, "_FEW", 1000)  # the model reads however little is left
    generator = SpecGenerator(tiny("llama"), ("suffix", tiny("llama", seed=1)), schedule="constant", prefix_cache=True)
    so_far = generator.generate(FIRST, **COMMON).sequences.tolist()
    prefers = hybrid.HybridProposer._prefers_model

    def noted(self: Any, seq: Any, *rest: Any) -> bool:
        unread.append(self._inner.unread(seq))
        return prefers(self, seq, *rest)

    monkeypatch.setattr(hybrid.HybridProposer, "_prefers_model", noted)
    generator.generate([[*so_far[0], 9, 10, 11]], **COMMON)
    assert unread[0] < 10


def test_samples_of_a_prompt_read_it_once() -> None:
    """Copies of a prompt continue what the first of them has read, in the draft as in the target, and count so."""
    target, draft = tiny("llama"), tiny("llama", seed=1)
    prompt = [[(5 * i) % 50 + 5 for i in range(100)]]
    with shapes(draft) as read:
        out = SpecGenerator(target, draft).generate(prompt, do_sample=True, num_return_sequences=4, seed=1, **COMMON)
    assert sum(rows * nodes for rows, nodes in read if nodes > 20) <= 100
    assert out.stats.cached_prompt_tokens == 3 * 99
    assert [row.cached_prompt_tokens for row in out.stats.per_row] == [0, 99, 99, 99]


def test_a_shared_beginning_is_enough() -> None:
    """A system prompt serves other questions; what differs is read."""
    model = tiny("llama")
    generator = SpecGenerator(model, prefix_cache=True)
    generator.generate([FIRST[0] + [6, 7, 8]], **COMMON)
    out = generator.generate([FIRST[0] + [20, 21]], **COMMON)
    assert out.stats.cached_prompt_tokens == 40
    assert out.sequences.tolist() == alone(model, [FIRST[0] + [20, 21]])
    short = generator.generate([FIRST[0][:9]], **COMMON)
    assert short.stats.cached_prompt_tokens == 0


@pytest.mark.parametrize("seeds", [[0, 1, 2], [5, 5, 5]])
def test_what_arrives_together_is_read_once(seeds: list[int]) -> None:
    """Prompts with a common beginning wait for the first of them, in any request, if that saves enough."""
    model = tiny("llama")
    generator = SpecGenerator(model, prefix_cache=True)
    engine = generator.engine
    shared = [(5 * i) % 50 + 5 for i in range(100)]
    prompts = [[[*shared, seed + 6, 7, 8]] for seed in seeds] + [[[9, 9, *shared]], [shared[:30]]]
    calls = [submit(generator, prompt, **COMMON) for prompt in prompts]
    with shapes(model) as read:
        engine.step()
    assert sum(rows * nodes for rows, nodes in read) <= 3 * 103
    finish(engine)
    cached = [call.seqs[0].cached_prompt_tokens for call in calls]
    assert cached[0] == cached[3] == cached[4] == 0
    assert min(cached[1:3]) >= 100
    for call, prompt in zip(calls, prompts, strict=True):
        assert [row.texts[0] for row in call.request.seqs] == [alone(model, prompt)[0][len(prompt[0]) :]]


def test_looking_for_what_prompts_share_is_linear() -> None:
    """Four times as many prompts that begin alike cost four times as many operations. (It was twelve times as many.)"""

    def operations(prompts: int) -> int:
        counted, random = 0, Random(0)
        begin, files = [random.randrange(5, 60) for _ in range(40)], {scheduler.__file__}

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal counted
            if frame.f_code.co_filename not in files:
                return None
            frame.f_trace_opcodes = True
            counted += event == "opcode"
            return trace

        texts = [[*begin, *(random.randrange(5, 60) for _ in range(20))] for _ in range(prompts)]
        generator, before = SpecGenerator(tiny("llama")), threading.gettrace()
        threading.settrace(trace)  # the engine's thread
        try:
            out = generator.generate(texts, **{**COMMON, "max_new_tokens": 2})
        finally:
            threading.settrace(before)  # type: ignore[arg-type]
        assert out.stats.cached_prompt_tokens >= 40 * (prompts - 40)
        return counted

    assert operations(400) < 6 * operations(100)


def test_embeddings_compare_by_content() -> None:
    """The same embeddings are known again, others of the same length are not."""
    model = tiny("llama")
    embeds = torch.randn(1, 30, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    generator = SpecGenerator(model, prefix_cache=True)
    found = [generator.generate(inputs_embeds=e, **COMMON) for e in (embeds, embeds.clone(), embeds + 1)]
    assert [out.stats.cached_prompt_tokens for out in found] == [0, 29, 0]
    for out, e in zip(found, (embeds, embeds, embeds + 1), strict=True):
        assert out.sequences.tolist() == alone(model, None, inputs_embeds=e)


def test_equal_embeddings_in_one_call() -> None:
    """What another row has read in part is shared in part. (The length of the whole was taken.)"""
    model = tiny("llama")
    embeds = torch.randn(1, 24, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    how = {"inputs_embeds": embeds.repeat(2, 1, 1), "do_sample": True, "seed": 5}
    twice = SpecGenerator(model).generate(**COMMON, **how, prefill_chunk_size=7)
    assert twice.sequences.tolist() == alone(model, None, **how)


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.device("meta")])
def test_modes_of_a_caller_reach_no_pass(mode: Any) -> None:
    """What a pass makes lies where its model does, and later calls can write to it."""
    model = tiny("llama")
    generator = SpecGenerator(model, tiny("llama", seed=1), prefix_cache=True)
    with mode():
        out = generator.generate(FIRST, **COMMON)
        stream = list(generator.stream(FIRST, **COMMON))
    assert [token for event in stream for token in event.token_ids] == out.new_tokens()[0]
    assert out.sequences.tolist() == alone(model, FIRST)
    assert generator.generate([FIRST[0] + [9]], **COMMON).sequences.tolist() == alone(model, [FIRST[0] + [9]])


@pytest.mark.parametrize("name", ["llama", "bloom", "t5"])
def test_autocast_of_a_caller_reaches_no_pass(name: str) -> None:
    """A call says so, decodes as ever, and so do those after it. (They raised, over keys of two types.)"""
    model = tiny(name)
    inputs = {"input_ids": torch.tensor(FIRST)} if name in DECODERS else tiny_inputs(name, 1)
    expected = SpecGenerator(model).generate(**inputs, **COMMON).sequences.tolist()
    with torch.autocast("cpu", torch.bfloat16):
        generator = SpecGenerator(model, "suffix", prefix_cache=True)
        with pytest.warns(RuntimeWarning, match=r"torch\.autocast does not reach"):
            assert generator.generate(**inputs, **COMMON).sequences.tolist() == expected
    out = generator.generate(**inputs, **COMMON)
    assert (out.sequences.tolist(), out.stats.exactness) == (expected, "exact")


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_encoder_inputs_compare_by_content(name: str) -> None:
    """A running row shares what it has written, too, with a call that hears the same, and with no other."""
    model = tiny(name)
    inputs = tiny_inputs(name, 2)
    one, other = ({key: value[r : r + 1] for key, value in inputs.items()} for r in (0, 1))
    begun = torch.tensor([[(5 * i) % 40 + 3 for i in range(24)]])
    generator = SpecGenerator(model, prefix_cache=True)
    stream = generator.stream(**one, decoder_input_ids=begun, **COMMON)
    written = [token for _ in range(3) for token in next(stream).token_ids]
    so_far = torch.cat([begun, torch.tensor([written])], dim=1)
    for heard, shares in ((one, True), (other, False)):
        out = generator.generate(**heard, decoder_input_ids=so_far, **COMMON)
        assert out.stats.cached_prompt_tokens == (out.sequences.shape[1] - 12 - 1) * shares
        assert out.sequences.tolist() == alone(model, None, **heard, decoder_input_ids=so_far)
    stream.close()


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_encodings_of_the_caller_are_shared_with_nobody(name: str) -> None:
    """Nobody knows what was read. (With a `cache_salt` a row continued another one, and heard its recording.)"""
    model = tiny(name)
    inputs = tiny_inputs(name, 2)
    encoded = model.get_encoder()(**inputs).last_hidden_state.detach()
    begun = torch.tensor([[(5 * i) % 40 + 3 for i in range(80)]]).repeat(2, 1)
    given = {"encoder_outputs": (encoded,), "decoder_input_ids": begun, **COMMON}
    plain = alone(model, None, **given)
    assert plain[0] != plain[1]
    generator = SpecGenerator(model, prefix_cache=True)
    out = generator.generate(**given, cache_salt="a user")
    assert (out.sequences.tolist(), out.stats.cached_prompt_tokens) == (plain, 0)
    one, other = (
        {"encoder_outputs": (encoded[r : r + 1],), "decoder_input_ids": begun[:1], "cache_salt": "a user"}
        for r in (0, 1)
    )
    stream = generator.stream(**one, **COMMON)
    next(stream)
    out = generator.generate(**other, **COMMON)
    assert out.sequences.tolist() == plain[1:]
    stream.close()


def test_salts_reach_unconditional_rows() -> None:
    """A negative prompt is continued by calls of the same salt alone. (It was, by those of any.)"""
    generator = SpecGenerator(tiny("llama"), prefix_cache=True)
    negative = torch.tensor([[(3 * i) % 50 + 5 for i in range(60)]])

    def passes(salt: str, prompt: int) -> int:
        how = {"guidance_scale": 1.5, "negative_prompt_ids": negative, "prefill_chunk_size": 8, "cache_salt": salt}
        out = generator.generate([[prompt] * 40], **how, **COMMON)
        return out.stats.num_target_passes

    stream = generator.stream(negative.tolist(), cache_salt="a", **COMMON)
    next(stream)
    assert passes("a", 9) < passes("b", 10)
    stream.close()


@pytest.mark.parametrize("ends", [{"max_new_tokens": 1}, {"max_new_tokens": 3, "eos_token_id": [*range(40)]}])
def test_more_copies_than_a_pass_reads(ends: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the copy that is read for the others ends at its first token, the next one is. (All waited for ever.)"""
    monkeypatch.setattr("specdec.engine.scheduler.CPU_CHUNKS", (50, 50))
    how = {**COMMON, "do_sample": True, "num_return_sequences": 120, "seed": 1, **ends}
    out = SpecGenerator(tiny("llama")).generate(FIRST, **how)
    assert out.sequences.tolist() == alone(tiny("llama"), FIRST, **how)
    assert [len(text) for text in out.new_tokens()].count(1) > 1


@pytest.mark.parametrize(
    ("name", "how"), [("mamba", {}), ("qwen3_next", {}), ("llama", {"output_hidden_states": True})]
)
def test_prompts_that_are_read_every_time(name: str, how: dict[str, Any]) -> None:
    """A recurrent state cannot be cut back to where two texts part; hidden states of all of a prompt are outputs."""
    generator = SpecGenerator(tiny(name), prefix_cache=True)
    for _ in range(2):
        out = generator.generate(FIRST, **{**COMMON, "max_new_tokens": 3}, **how)
        assert out.stats.cached_prompt_tokens == 0
    assert not how or out.hidden_states[0][0].shape[1] == 40


@pytest.mark.parametrize("draft", [None, "suffix", "early_exit:1", "model"])
@pytest.mark.parametrize("is_owned", [True, False])
def test_whose_models_continue_earlier_texts(is_owned: bool, draft: str | None) -> None:
    """In every dtype models that specdec loaded do, and a caller's where they are told to; one call shares anyway.

    (Only float32 did so, that is no real checkpoint.)
    """
    half, small = tiny("llama").to(torch.bfloat16), LanguageModel(tiny("llama", seed=1).to(torch.bfloat16))
    target = LanguageModel(half, backend="eager", owned=is_owned)
    prompt = [5 + i % 50 for i in range(80)]
    by_default = 79 * (is_owned and draft != "model")  # the draft is the caller's
    for wanted, shared, cached in ((None, 79, by_default), (True, 79, 79), (False, 0, 0)):
        generator = SpecGenerator(target, small if draft == "model" else draft, prefix_cache=wanted)
        out = generator.generate([prompt, [*prompt[:79], 3, 4]], **endless(4))
        assert out.stats.cached_prompt_tokens == shared
        assert generator.generate([prompt], **endless(4)).stats.cached_prompt_tokens == cached
    with pytest.raises(OptionError, match="prefix_cache"):
        SpecGenerator(tiny("llama"), prefix_cache=-1)


def test_the_least_recently_used_gives_way() -> None:
    """Texts go when room is short, and one that goes on takes the place of what it continues."""
    kept = PrefixCache(4 * 40)
    key = (Context(0), ())

    def read(begin: int, count: int = 20) -> None:
        kept.keep(key, range(begin, begin + count), SavedState(count, None, 4 * count))

    def found(begin: int, count: int = 20) -> int:
        return kept.find(key, range(begin, begin + count))[1]

    read(0)
    read(100)
    assert found(0, 30) == 20
    read(200)  # 100 was used longest ago
    assert [found(begin) for begin in (0, 100, 200)] == [20, 0, 20]
    assert kept.find((Context(0, salt="salt"), ()), range(20)) == (None, 0)
    read(0, 40)
    assert found(200) == 0
    assert kept.bytes == 160
    assert not kept.wants(key, range(30))
    kept.room = 100
    kept.shrink()
    assert found(0) == kept.bytes == 0


def test_readers_keep_what_they_have_read() -> None:
    """A draft finds only texts that it has read; texts of drafts that are gone are dropped when a new one comes."""

    @dataclass
    class Equal(Draft):  # neither hashable nor different from others of its kind
        def start(self, vocab_size: int) -> Any: ...

    one, other = Equal(), Equal()
    kept, ids, context = PrefixCache(1000), range(20), Context(0)

    def key_of(draft: Draft | None) -> Any:
        return (context, ()) if draft is None else kept.key_of(draft, context)

    for reader in (None, one, other):
        kept.keep(key_of(reader), ids, SavedState(20, id(reader), 10))
    for draft in (one, other):
        found, length = kept.find(key_of(draft), ids)
        assert (found.state, length) == (id(draft), 20)
    del draft, other, reader
    kept.keep(key_of(None), range(21), SavedState(21, None, 10))
    assert kept.bytes == 30
    assert kept.find(key_of(Equal()), ids) == (None, 0)
    assert kept.bytes == 20
    assert kept.find(key_of(one), ids)[1] == 20


def test_longest_common_beginnings() -> None:
    """They are those that a comparison with every text finds, while texts come, grow and go."""
    random, index = Random(0), PrefixIndex[int]()
    texts: dict[int, list[int]] = {}
    for step in range(600):
        owner = random.randrange(12)
        if owner in texts and step % 5 == 0:
            del texts[owner]
            index.drop(owner)
        elif owner in texts:
            texts[owner].append(random.randrange(2))
            index.put(owner, owner % 2, texts[owner])
        else:
            texts[owner] = [random.randrange(2) for _ in range(random.randrange(5))]
            index.put(owner, owner % 2, texts[owner])
        wanted = [random.randrange(2) for _ in range(random.randrange(9))]
        for key in (0, 1, 2):
            common = {owner: common_length(text, wanted) for owner, text in texts.items() if owner % 2 == key}
            found, length = index.find(key, wanted)
            assert length == max(common.values(), default=0)
            assert common[found] == length if found is not None else not length


@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_budget_is_kept(kind: str, tmp_path: Path) -> None:
    """Buffers of target, draft and kept texts never take more; requests wait for their turn; all texts are right."""
    model = tiny("llama", num_hidden_layers=3)
    draft = tiny("llama", seed=1) if kind == "model" else eagle_folder(tmp_path / "head")
    budget = 180_000
    generator = SpecGenerator(model, draft, kv_budget=budget, schedule="constant", num_assistant_tokens=3)
    engine, step, seen = generator._driver.engine, generator._driver.engine.step, []

    def counted() -> None:
        step()
        sessions = [engine.session, *sessions_of_drafts(engine)]
        held = sum(one.buffers.bytes for s in sessions for one in getattr(s, "stages", [s]))
        seen.append((held + generator._prefixes.bytes, len(engine.running)))

    engine.step = counted
    prompts = [[[(seed + 3 * i) % 50 + 5 for i in range(20 + 4 * seed)]] for seed in range(8)]
    found = together(*(lambda prompt=prompt: generated(generator, prompt, **COMMON) for prompt in prompts))
    assert max(taken for taken, _ in seen) <= budget
    assert max(rows for _, rows in seen) < 8
    assert found == [alone(model, prompt) for prompt in prompts]


def test_a_negative_prompt_counts_at_its_own_length() -> None:
    """Both rows get the new tokens. (The longer row was counted as the shorter one.)"""
    model = tiny("llama")
    call = {**COMMON, "guidance_scale": 2.0, "negative_prompt_ids": [[7] * 400]}
    generator = SpecGenerator(model, kv_budget=2 * 100 * LanguageModel(model).kv_bytes)
    with pytest.raises(OptionError, match="kv_budget"):
        generator.generate([[5, 6]], **call)
    assert generator.generate([[5, 6]], **{**call, "negative_prompt_ids": [[7] * 40]}).stats.num_new_tokens == 12


def test_what_never_fits_is_an_error_at_once() -> None:
    """Before any pass, with what it needs and what it may have; wrong budgets are named too."""
    model = tiny("llama")
    generator = SpecGenerator(model, kv_budget=20_000)
    with pytest.raises(OptionError, match=r"may need [\d,]+ bytes.*kv_budget.* allows 20,000"):
        generator.generate(FIRST, **{**COMMON, "max_new_tokens": 400})
    assert generator._driver.engine.session.passes == 0
    assert generator.generate([[5, 6]], **COMMON).stats.num_new_tokens == 12
    for wrong in (0, -5, 1.5, True, "much"):
        with pytest.raises(OptionError, match="kv_budget"):
            SpecGenerator(model, kv_budget=wrong)
    assert SpecGenerator(model, kv_budget=0.5).engine.memory.limit <= free_bytes(torch.device("cpu"))


def test_a_budget_has_room_for_what_is_drafted() -> None:
    """For as many tokens as the schedule drafts, fewer in a short text, and trees only where the draft has them."""
    model = tiny("llama")
    bytes_, call = LanguageModel(model).kv_bytes, {**COMMON, "max_new_tokens": 60, "schedule": "auto"}
    for draft, options, room in [
        ("suffix", {}, 32),
        ("suffix", {"schedule": "constant", "num_assistant_tokens": 5}, 5),
        ("suffix", {"max_new_tokens": 1}, 0),
        (tiny("llama", seed=1), {"num_assistant_branches": 1}, 32),
    ]:
        given = {**call, **options}
        columns, models = 2 + given["max_new_tokens"] + room + 4, 1 if draft == "suffix" else 2
        generator = SpecGenerator(model, draft, kv_budget=models * columns * bytes_)
        assert generator.generate([[5, 6]], **given).stats.num_new_tokens == given["max_new_tokens"]
    with pytest.raises(OptionError, match="num_assistant_branches"):
        generator.generate([[5, 6]], **call)


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_a_draft_that_rests_takes_nothing_of_a_budget(name: str) -> None:
    """Its buffers are freed with its last text. (They stayed until Python looked for cycles.)"""
    generator, sessions = SpecGenerator(tiny(name), tiny(name, seed=1), kv_budget=10**6), list[Any]()

    def note(ids: torch.Tensor, scores: Any) -> bool:
        sessions[:] = sessions_of_drafts(generator.engine)
        return False

    generator.generate(FIRST, stopping_criteria=[note], **COMMON)
    held = [cache.buffers.bytes for session in sessions for cache in (session, session.cross) if cache is not None]
    assert held
    assert not any(held)


def test_a_budget_counts_the_frames_of_both_models() -> None:
    """Keys and values over the encoder's output. (Those of the draft were left out.)"""
    model, draft = tiny("bart"), LanguageModel(tiny("bart", seed=1))
    plain, assisted = (SpecGenerator(model, one, kv_budget=10**8) for one in (None, draft))
    needed = []
    for length in (10, 110):
        ids = torch.full((2, length), 5)
        jobs = [(own, own.submit(input_ids=ids, **COMMON)) for own in (plain, assisted)]
        needed.append([own.engine.memory.bytes([job.call.request]) for own, job in jobs])
    (short, short_both), (long, long_both) = needed
    assert long - short == 2 * 100 * LanguageModel(model).kv_bytes
    assert long_both - short_both == long - short + 2 * 100 * draft.kv_bytes


USUAL = ("llama", "gpt2", "gemma2", "bloom", "phi3", "deepseek_v3", "llama4_text", "t5", "bart", "whisper")


@pytest.mark.parametrize("name", [*USUAL, *(slow(name) for name in NAMES if name not in USUAL)])
def test_what_a_position_takes_is_known(name: str) -> None:
    """What is expected of every model that keeps plain keys and values is what its store takes."""
    language = LanguageModel(tiny(name))
    if language.capability.cache_kind != "kv":
        pytest.skip("keeps no plain keys and values")
    encoding = language.encode(tiny_inputs(name)) if language.is_encoder_decoder else None
    session: Any = language.session()
    session.bound(1, 128)
    row = session.add(encoding)
    session.run([Work.text(row, [5, 6, 7])])
    assert session.buffers.bytes <= language.kv_bytes * session.buffers.capacity
    latent = getattr(language.config, "kv_lora_rank", None)  # some versions keep less of these
    assert latent or 2 * session.buffers.bytes >= language.kv_bytes * session.buffers.capacity
