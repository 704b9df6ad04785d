"""What sessions promise beyond exact logits: cost, isolation, extras, errors."""

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch

from specdec import SpecGenerator
from specdec.core.tree import EMPTY
from specdec.core.work import Work
from specdec.errors import OptionError, UnsupportedError
from specdec.models import Encoding, LanguageModel
from specdec.models.cache import buffers, recurrent_state
from tests.matrix import endless, slow
from tests.models.exact import TOLERANCE, Twin, encoding_for, twin_of
from tests.oracle import oracle
from tests.shrink import class_named, tiny_of
from tests.tiny import tiny, tiny_inputs

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "opt", "t5", "bart", "whisper", "qwen3_next", "mamba2"])
def test_early_exit(name: str) -> None:
    """Stops after the first layer, shares every weight, and leaves the model as it was."""
    model = tiny(name)
    before, config = copy.deepcopy(model.state_dict()), copy.deepcopy(model.config.to_dict())
    language = LanguageModel(model)
    full = encoding_for(language, 1)
    shallow = language.early_exit(1)
    assert shallow.num_layers == 1
    twin = Twin(shallow, 1, full)
    twin.prefill(14)
    twin.step([twin.chain(3)], [3], [[0]])
    mine = {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for p in shallow.model.parameters()} <= mine
    assert len(list(shallow.model.parameters())) < len(list(model.parameters()))
    assert model.config.to_dict() == config
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    deep = Twin(language, 1, full)
    deep.prefill(14)


def test_early_exit_is_the_first_layers() -> None:
    """Hidden states after layer 1 of the whole model, normed and projected, are the shallow model's logits."""
    model = tiny("llama")
    ids = torch.randint(3, 64, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        middle = model(ids, output_hidden_states=True).hidden_states[1]
        expected = model.lm_head(model.model.norm(middle))
        got = LanguageModel(model).early_exit(1).model(ids).logits
    assert torch.allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["t5", "bart", "bloom", "recurrent_gemma"])
def test_exceptions_leave_the_model_as_it_was(name: str) -> None:
    """A pass that dies in the middle changes neither the model's own answers nor the session's next ones."""
    twin = twin_of(name, 2)
    twin.prefill(14, 6)
    last = list(twin.language.decoder.modules())[-1]
    handle = last.register_forward_pre_hook(Mock(side_effect=RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="memory"):
        twin.forward([twin.tree(), twin.tree()], [7, 7])
    handle.remove()
    twin.step([twin.tree(), twin.tree()], [7, 7], [[0, 2], [5]])
    twin.step([twin.chain(2), twin.chain(2)], [2, 2], [[0], [0, 1]])


@pytest.mark.parametrize("name", ["bloom", "biogpt", "recurrent_gemma"])
def test_threads_do_not_see_each_other(name: str) -> None:
    """Sessions of one model in several threads, while the model is also called directly."""
    language = LanguageModel(tiny(name))

    def work(seed: int) -> None:
        twin = Twin(language, 2, seed=seed)
        twin.prefill(9, 4)
        for _ in range(4):
            twin.step([twin.tree(), twin.chain(2)], [7, 2], [[0, 2], [0]])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))


def test_recurrent_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a draft one is copied once, not at every token; rejected tokens are fed again with the next pass."""
    twin = Twin(LanguageModel(tiny("mamba2")))
    monkeypatch.setattr(recurrent_state, "snapshot", snapshot := Mock(wraps=recurrent_state.snapshot))
    twin.prefill(9)
    for _ in range(6):
        twin.step([twin.chain(1)], [1], [[0]])
    assert snapshot.call_count == 1
    for _ in range(3):
        twin.step([twin.chain(4)], [4], [[0, 1]])
    assert twin.session.passes == 1 + 6 + 3


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_eager_attention(name: str) -> None:
    """It adds masks as they are given; each node's weights over the row's text and the nodes so far sum to one."""
    twin = Twin(LanguageModel(tiny(name, attn_implementation="eager")), 2)
    twin.prefill(20, 4)
    trees = [twin.tree(), twin.chain(2)]
    for row, out in enumerate(twin.forward(trees, [7, 2], attentions=True)):
        nodes = len(trees[row])
        assert out.attentions[0].shape == (4, nodes, len(twin.texts[row]) + nodes)
        torch.testing.assert_close(out.attentions[0].sum(-1), torch.ones(4, nodes))
    twin.step([twin.tree(), twin.tree()], [7, 7], [[0, 2, 4], [5]])
    twin.step([twin.chain(2), twin.chain(1)], [2, 1], [[0], [0]])


def test_branches_are_moved_only_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dead branches leave void columns behind, which are closed up once there are many; results stay exact."""
    twin = Twin(LanguageModel(tiny("llama")), 1)
    twin.prefill(40)
    kept = twin.session.buffers
    monkeypatch.setattr(kept, "move_columns", move := Mock(wraps=kept.move_columns))
    twin.branch(60)
    assert 0 < move.call_count < 12
    assert kept.end < 40 + 60 * 4


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_forks_are_no_longer_than_the_text(name: str) -> None:
    """Nobody has read what comes after it."""
    twin = twin_of(name, 1)
    twin.prefill(9)
    with pytest.raises(OptionError, match="at most the 9 tokens"):
        twin.session.fork(twin.rows[0], 10)


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_rows_of_other_encoder_inputs_join(name: str) -> None:
    """With a mask or without, longer or shorter, while others run: each row equals itself alone."""
    language = LanguageModel(tiny(name))
    inputs = [tiny_inputs(name, rows, seed=seed) for seed, rows in enumerate((2, 1, 3, 1))]
    if name != "whisper":
        del inputs[1]["attention_mask"]
        inputs[1]["input_ids"] = inputs[1]["input_ids"][:, :5]
        inputs[3]["input_ids"] = inputs[3]["input_ids"].repeat(1, 2)
        inputs[3]["attention_mask"] = inputs[3]["attention_mask"].repeat(1, 2)
    encodings = [language.encode(one) for one in inputs]
    twin = Twin(language, 2, encodings[0])
    twin.prefill(5, 3)
    for encoding in encodings[1:]:
        twin.join(len(encoding), encoding)
        twin.some(range(len(twin.rows)))
        twin.some([*range(len(twin.rows))][::-1])
    twin.fork(2, 1)
    twin.fork(5)
    twin.leave(0, 4)
    for _ in range(2):
        twin.some(range(len(twin.rows)))
        twin.some([4, 0])
        twin.some([2])


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "bloom"])
def test_kept_prefixes(name: str) -> None:
    """A row that begins with what another one left behind, in this session or a new one, also after branches."""
    twin = twin_of(name, 2)
    twin.prefill(30, 12)
    tree = twin.tree()
    assert twin.run([tree, twin.chain(1)], [7, 1]) < TOLERANCE
    twin.session.commit(twin.rows, [[0, 2, 4], [0]], num_texts=[2, 1])
    twin.texts[0] += [tree.tokens[0], tree.tokens[2]]
    twin.texts[1] = []
    prefix = twin.session.keep_prefix(twin.rows[0], 32)
    assert [tuple(keys.shape[1:2]) for keys, _ in prefix] == [(32,)] * 2
    texts = [twin.texts[0][:length] for length in (32, 17)]
    twin.session.remove(twin.rows)
    new = Twin(twin.language, 0)
    for other in (twin, new):
        other.rows = [other.session.read_from(prefix, len(text)) for text in texts]
        other.texts = [list(text) for text in texts]
        other.encodings, other.pending = [None, None], [EMPTY, EMPTY]
        other.join(1, None)
        assert other.lengths == [32, 17, 0]
        other.some([0, 1, 2])
        other.some([2, 0])


def test_padding_stays_within_bounds() -> None:
    """A long row beside one that reads a prompt takes passes of its own where both would write beyond the bounds.

    (A `kv_budget` was overstepped, by the columns of padding.)
    """
    twin = twin_of("llama", 2)
    twin.session.bound(2, 60)
    twin.prefill(50, 1)
    before = twin.session.passes
    twin.step([twin.chain(1), twin.chain(40)], [1, 1], [[0], [*range(40)]])
    assert twin.session.passes == before + 2
    assert twin.session.buffers.bytes <= 2 * 60 * twin.language.kv_bytes
    twin.step([twin.chain(2), twin.chain(3)], [2, 3], [[0], [0, 1]])
    assert twin.session.passes == before + 3


def test_store_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of rows that left are given back, all of them in the end; those that stay are exact."""
    monkeypatch.setattr(buffers, "_SPARE_BYTES", 0)
    twin = twin_of("llama", 9)
    twin.prefill(*[40] * 9)
    twin.some([3], trees=False)
    full = twin.session.buffers.bytes
    twin.leave(0, 1, 2, 4, 5, 6, 7)
    assert twin.session.buffers.bytes * 2 < full
    twin.some([0, 1])
    twin.fork(0)
    twin.some([2, 1, 0])
    twin.leave(0, 1, 2)
    assert twin.session.buffers.bytes == 0
    twin.join(2, None)
    twin.some([0, 1])


@pytest.mark.parametrize(
    ("lengths", "chosen", "weights", "passes"),
    [
        ([6, 7, 190, 6, 7], range(5), 1, 5),
        ([6, 7, 190, 6, 7], range(5), 50_000, 3),
        ([6, 7, 190, 6, 7], range(5), 10**9, 1),
        ([7, 400, 7], [0, 2], 50_000, 2),  # an idle row between others
    ],
)
def test_a_long_row_is_nobody_s_padding(lengths: list[int], chosen: list[int], weights: int, passes: int) -> None:
    """Short rows share no pass with a long one that would cost them more than the weights, and all texts are right."""
    language = LanguageModel(tiny("llama"))
    language.weight_bytes = weights  # type: ignore[misc]
    twin = Twin(language, len(lengths))
    twin.prefill(*lengths)
    before = twin.session.passes
    twin.some(chosen)
    assert twin.session.passes - before == passes


def test_a_long_row_lets_the_others_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied while rows come and grow, but what they need is all that is taken."""
    twin = twin_of("llama", 1)
    twin.prefill(20)
    session: Any = twin.session
    monkeypatch.setattr(type(session.buffers), "_resize", lambda *_: pytest.fail("the buffers were copied"))
    twin.join(3, None)
    twin.some(range(4))
    twin.step([twin.chain(200), *[twin.chain(1)] * 3], [1] * 4, [list(range(200)), [0], [0], [0]])
    twin.some(range(4))
    assert 200 * twin.language.kv_bytes < session.buffers.bytes < 400 * twin.language.kv_bytes


def test_buffers_that_cannot_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay as they were, and so do all rows.

    A row that leaves afterwards is zeroed, for the next one in its place. (What a failed row left was, instead.)
    """
    twin = twin_of("llama", 2)
    twin.session.bound(2, 60)
    twin.prefill(50, 9)
    with monkeypatch.context() as patch:
        results = [DEFAULT, DEFAULT, MemoryError("no room")]
        patch.setattr(buffers, "_zeros", Mock(wraps=buffers._zeros, side_effect=results))
        with pytest.raises(MemoryError):
            twin.forward([twin.chain(40), twin.chain(1)], [1, 1])
    twin.some([0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(buffers, "_zeros", Mock(side_effect=MemoryError("no room")))
        with pytest.raises(MemoryError):
            twin.join(1, None)
    assert twin.session.buffers.bytes > 0
    twin.leave(1)
    assert not any(side[1].any() for pair in twin.session.buffers.pairs() for side in pair)


def test_memory_counts_rows_that_moved() -> None:
    """What a row that left had written to is still taken, also where a shorter one moved into its place."""
    twin = twin_of("llama", 2)
    twin.prefill(300, 5)
    before = twin.session.buffers.bytes
    twin.leave(0)
    assert twin.session.buffers.bytes >= 0.9 * before


def test_bounds() -> None:
    """Buffers grow no further than was said, unless more is needed after all.

    A pass may fill the last column. (They grew a column early, which bounds of memory counted.)
    """
    twin = twin_of("llama", 1)
    twin.session.bound(3, 150)
    twin.prefill(100)
    twin.join(2, None)
    twin.some([0, 1, 2])
    twin.step([twin.chain(40)] + [twin.chain(1)] * 2, [1] * 3, [list(range(40)), [0], [0]])
    kept = twin.session.buffers
    assert (kept.row_capacity, kept.capacity) == (3, 150)
    twin.step([twin.chain(60)] + [twin.chain(1)] * 2, [1] * 3, [list(range(60)), [0], [0]])
    assert kept.capacity > 200
    twin.session.bound(5, 60)
    twin.join(2, None)
    twin.some(range(5))
    assert kept.row_capacity == 5
    session: Any = twin.language.session()
    session.bound(1, 200)
    session.run([Work.text(session.add(), [5] * 200)])
    assert session.buffers.capacity == 200


def test_shared_encoder() -> None:
    """Equal encoders are recognised by their weights; one different number is enough to tell them apart."""
    target, draft = LanguageModel(tiny("whisper")), LanguageModel(tiny("whisper"))
    assert target.shares_encoder_with(draft)
    draft.model.get_encoder().layers[0].fc1.bias.data[0] += 1
    assert not target.shares_encoder_with(draft)
    assert not target.shares_encoder_with(LanguageModel(tiny("llama")))


def test_bad_input() -> None:
    model = tiny("llama")
    language = LanguageModel(model)
    with pytest.raises(UnsupportedError, match="no encoder"):
        language.encode({"input_ids": torch.tensor([[3]])})
    session: Any = language.session()
    row = session.add()
    with pytest.raises(OptionError, match="rows"):
        session.remove([17])
    with pytest.raises(UnsupportedError, match="eager"):
        session.run([Work.text(row, [3])], attentions=True)
    for layers in (0, 2, 9):
        with pytest.raises(OptionError, match="layers"):
            language.early_exit(layers)
    assert [out.logits.shape for out in session.run([Work.text(row, [], 0)])] == [(0, 64)]
    assert session.passes == 0  # where every row sits out


def test_a_decoder_that_forgets_its_order_gets_a_mask() -> None:
    """In some versions T5s leave the order of tokens to a mask, and make none. (Guesses saw what followed them.)"""
    model = tiny("umt5")
    for name, module in model.decoder.named_modules():
        if name.endswith(".SelfAttention"):
            module.is_causal = False
    language = LanguageModel(model)
    encoding = language.encode(tiny_inputs("umt5"))

    def logits(pieces: list[int]) -> torch.Tensor:
        session, found = language.session(), []
        row = session.add(encoding)
        for size, start in zip(pieces, [0, *accumulate(pieces)], strict=False):
            text = list(range(5 + start, 5 + start + size))
            found.append(session.run([Work.text(row, text, size)])[0].logits)
            session.commit([row], [list(range(size))])
        return torch.cat(found)

    torch.testing.assert_close(logits([2, 4]), logits([1] * 6), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_rows_leave_before_their_encodings_are_read(name: str) -> None:
    """No pass is run for them; the rows that stay read their own. (An encoding that could not be read ended all.)"""
    language = LanguageModel(tiny(name))
    encoding = language.encode(tiny_inputs(name, 3))
    twin = Twin(language, 3, encoding)
    twin.leave(0)
    assert twin.session.passes == 0
    twin.prefill(4, 3)
    twin.join(1, encoding.select([0]))
    twin.leave(1)
    twin.step([twin.chain(2), twin.chain(3)], [2, 3], [[0], [0, 1]])


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_an_encoding_that_cannot_be_read_fails_its_own_row_alone(name: str) -> None:
    """Rows that run beside it are read as ever. (Their passes failed with it.)"""
    language = LanguageModel(tiny(name))
    encoding = language.encode(tiny_inputs(name))
    session = language.session()
    row, broken = session.add(encoding), session.add(Encoding(encoding.hidden[..., 1:], None))
    [out] = session.run([Work.text(row, [5])])
    assert out.logits.isfinite().all()
    with pytest.raises(RuntimeError):
        session.run([Work.text(broken, [5])])


def test_cross_attentions_of_rows_with_encodings_of_different_lengths() -> None:
    """Each row's go to its own frames, also where rows share a padded pass."""
    language = LanguageModel(tiny("bart", attn_implementation="eager"))
    long, short = (language.encode({"input_ids": torch.arange(5, 5 + n)[None]}) for n in (9, 3))
    twin = Twin(language, 1, long)
    twin.join(1, short)
    outputs = twin.forward([twin.chain(4), twin.chain(4)], [1, 1], attentions=True)
    assert [out.cross_attentions[0].shape[-1] for out in outputs] == [9, 3]


NEW = 20  # tokens, more than a window has
SOME = pytest.mark.parametrize("kinds", [(None, "half"), slow(("perfect", "wrong", "random"))], ids=str)


@SOME
@pytest.mark.parametrize("search", [{"repetition_penalty": 1.4}, {"num_beams": 3}], ids=str)
def test_a_window_that_begins_after_the_prompt(search: dict[str, Any], kinds: Sequence[str | None]) -> None:
    """UnlimitedOcr keeps its prompt whole, and a window of the answer. (A draft's first guesses counted as prompt: from
    the end of the window on the text was another one.)
    """
    model = tiny_of(class_named("UnlimitedOcrForConditionalGeneration"))
    prompts = [[*range(5, 25)], [*range(5, 20), 40, 41], [7, 8]]
    answers = [theirs(model, prompt, **search) for prompt in prompts]
    for kind in kinds:
        generator = SpecGenerator(model, kind and oracle(kind, answers, 64), prefix_cache=True)
        for some in (prompts, prompts[:1], prompts[1:2]):
            out = generator.generate(some, **endless(NEW, **search))
            found = [row[-NEW:] for row in out.sequences.tolist()]
            assert found == [answer[-NEW:] for answer in answers if answer[:-NEW] in some], kind


def theirs(model: Any, prompt: list[int], **search: Any) -> list[int]:
    found = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, **search)
    text: list[int] = found[0].tolist()
    return text


@SOME
def test_ngrams_of_a_window(kinds: Sequence[str | None]) -> None:
    """UnlimitedOcr's checkpoint asks for it. (All of the text was the window, without a word: another text.)"""
    model = tiny_of(class_named("UnlimitedOcrForConditionalGeneration"))
    whole = theirs(model, [5, 6, 7, 8], no_repeat_ngram_size=1)
    model.generation_config.no_repeat_ngram_size, model.generation_config.no_repeat_ngram_window_size = 1, 2
    for search in ({}, {"num_beams": 3}):
        answer = theirs(model, [5, 6, 7, 8], **search)
        assert answer != whole
        for kind in kinds:
            generator = SpecGenerator(model, kind and oracle(kind, [answer], 64))
            assert generator.generate([[5, 6, 7, 8]], **endless(NEW, **search)).sequences.tolist() == [answer], kind
