"""Who reads how much of a text in a draft model, and when: chunks, copies, and texts that grew meanwhile."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from specdec.core.budget import Budget
from specdec.core.drafts import Draft
from specdec.core.tree import EMPTY, Tree
from specdec.engine import scheduler as module
from specdec.engine.drafts import OpenDrafts
from specdec.engine.prefix_cache import PrefixCache
from specdec.engine.scheduler import Scheduler
from specdec.errors import DraftError
from specdec.models import LanguageModel
from specdec.proposers import ModelDraft
from specdec.proposers.other_tokenizer import TextBridge
from specdec.proposers.views import TextAloneDraft
from tests.proposers.fakes import FakeBudget, FakeModel, FakeSequence, follow, task
from tests.proposers.test_branching import TASK, best_tree, paths
from tests.proposers.test_other_tokenizer import ours, theirs
from tests.tiny import tiny


class Text(FakeSequence):
    """A sequence with what the scheduler asks for."""

    num_embeds_only, context, embeds, unconditional = 0, None, None, None

    @property
    def text_ids(self) -> list[int]:
        return self.tokens

    @property
    def length(self) -> int:
        return len(self.tokens)


class Reader:
    """A draft whose texts a scheduler has read, as the engine does in each round."""

    def __init__(self, draft: Draft, vocab_size: int = 50, device: str = "cpu") -> None:
        model = LanguageModel(tiny("llama", vocab=vocab_size))
        model.device = torch.device(device)
        self.drafts = drafts = OpenDrafts(model, {}, lambda seqs: nullcontext())  # type: ignore[arg-type,return-value]
        self.scheduler = Scheduler(model, PrefixCache(0), drafts)
        drafts.start(draft, self.scheduler.session)
        [self.opened] = drafts.open.values()
        drafts.of = lambda seq: self.opened  # type: ignore[method-assign]
        self.proposer = self.opened.proposer

    def propose(self, rows: Sequence[Any], budgets: Sequence[Budget]) -> list[Tree]:
        for row in rows:
            row.sharing_key = row.task.source
        self.drafts.num_read.clear()
        trees = self.drafts.ask(self.opened, dict(zip(rows, budgets, strict=True)), self.scheduler.catch_up)
        return [trees.get(row.id, EMPTY) for row in rows]


def one(reader: Reader, row: Text, limit: int = 5) -> list[int]:
    return reader.propose([row], [FakeBudget(limit)])[0].tokens


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("CHUNKS", (8, 4)), ("CPU_CHUNKS", (4, 4)), ("READ_ALONG", 4)):
        monkeypatch.setattr(module, name, size)


@pytest.mark.usefixtures("small_chunks")
def test_long_prompts_are_read_a_chunk_per_round() -> None:
    """Nothing is proposed for a row until it is nearly read, and the others wait for no more than a small chunk."""
    model = FakeModel()
    session = Reader(ModelDraft(model))
    rows = [Text([1, 2], 0), Text(list(range(30)), 1), Text(list(range(20)), 2)]
    silent = []
    for _ in range(16):
        before = model.passes
        trees = session.propose(rows, [FakeBudget(2)] * 3)
        silent.append([not tree.tokens for tree in trees])
        assert model.passes <= before + 3
        for row, tree in zip(rows, trees, strict=True):
            assert tree.tokens in ([], model.greedy(row.tokens, 2))
            if tree.tokens:
                follow(session.proposer, row, tree.tokens, 1, 7)
    assert silent == [[False, True, True]] * 6 + [[False, False, True]] * 4 + [[False] * 3] * 6
    assert max(map(max, model.fed)) <= 4


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("device", "fed"), [("meta", [8, 8, 5]), ("cpu", [4, 4, 4, 4, 4, 1])])
def test_a_long_prompt_alone_is_read_in_long_chunks(device: str, fed: list[int]) -> None:
    """Small ones are for those who would have to wait, and for a CPU. (A request that came during a pass over 2,048
    tokens waited for nine seconds there, and the pass was no faster.)"""
    model, row = FakeModel(), Text(list(range(21)))
    session = Reader(ModelDraft(model), device=device)
    texts = [one(session, row, 1) for _ in fed[1:]]
    assert texts[-1] == model.greedy(row.tokens, 1)
    assert model.fed == [[count] for count in fed]


def test_rows_of_one_source_read_it_once() -> None:
    """Samples of one prompt continue copies of what the first has read; another prompt and a changed one do not."""
    model = FakeModel()
    session = Reader(ModelDraft(model))
    ours, theirs = task(source="ours"), task(source="theirs")
    early = Text([4, 4, 4], 9, task=theirs)
    follow(session.proposer, early, one(session, early), 2, 8)
    text = list(range(20))
    rows = [early, *(Text(list(text), k, task=ours) for k in range(3)), Text([*text[:9], 7], 3, task=ours)]
    before = sum(map(sum, model.fed))
    for _ in range(3):
        trees = session.propose(rows, [FakeBudget(2)] * len(rows))
        for row, tree in zip(rows, trees, strict=True):
            assert tree.tokens == model.greedy(row.tokens, 2)
            follow(session.proposer, row, tree.tokens, row.id % 3, 30 + row.id)
    read = sum(map(sum, model.fed)) - before
    assert read < 2 * 20 + 10 + 5 * 3 * 4


@pytest.mark.usefixtures("small_chunks")
def test_rows_of_one_long_source_read_it_once() -> None:
    """The others wait while the first reads its chunks."""
    model = FakeModel()
    session, ours = Reader(ModelDraft(model)), task(source="ours")
    rows = [Text(list(range(30)), k, task=ours) for k in range(3)]
    for _ in range(3):
        trees = session.propose(rows, [FakeBudget(1)] * 3)
    while not all(trees):
        trees = session.propose(rows, [FakeBudget(1)] * 3)
    assert [tree.tokens for tree in trees] == [model.greedy(rows[0].tokens, 1)] * 3
    assert sum(map(sum, model.fed)) < 29 + 3 * 5


def test_a_row_that_comes_later_continues_what_its_source_has_read() -> None:
    """Also where the one that read it has gone on meanwhile."""
    model = FakeModel()
    session, ours = Reader(ModelDraft(model)), task(source="ours")
    first, second = (Text(list(range(30)), k, task=ours) for k in range(2))
    follow(session.proposer, first, one(session, first), 2, 7)
    before = sum(map(sum, model.fed))
    assert one(session, second, 1) == model.greedy(second.tokens, 1)
    assert sum(map(sum, model.fed)) == before + 1
    assert session.drafts.num_read == {1: 0}


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_text_that_grew_long_without_the_draft(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read in chunks like a prompt. (Old branches were taken for its beginning.)"""
    monkeypatch.setattr(module, "CPU_CHUNKS", (4, 3))
    model, budget = tiny(name), Budget.sure(3, branches=2)
    rows = [Text([5, 6, 7], 0, task=TASK), Text([8, 9], 1, task=TASK)]
    session = Reader(ModelDraft(LanguageModel(model)), 64)
    silent = []
    for more in ([1], [9] * 6, [11, 12, 13], [4] * 9, [3], [3]):
        for row, tree in zip(rows, session.propose(rows, [budget] * 2), strict=True):
            silent.append(not tree.tokens)
            if tree.tokens:
                assert paths(tree).keys() == best_tree(model, row.tokens, budget).keys()
        rows[0].tokens += more
        rows[1].tokens += [3]
    assert sum(silent) < 5
    assert not any(silent[1::2])


def test_a_draft_that_still_reads_says_so() -> None:
    """Through the bridge as without it. (Its rounds counted as slow, wrong guesses.)"""
    session = Reader(TextBridge(ModelDraft(FakeModel(len(theirs))), ours, theirs), len(ours))
    rows = [Text(ours.encode("the quick brown fox " * 400), 0), Text(ours.encode("a lazy"), 1)]
    sources = [[tree.source for tree in session.propose(rows, [FakeBudget(3)] * 2)] for _ in range(2)]
    assert sources[0] == ["", "bridge"]


@pytest.mark.parametrize("pictures", [False, True])
def test_a_draft_with_other_tokens_follows_a_text(pictures: bool) -> None:
    """It takes in what is new. (Its tokens were taken for the target's, and all of the text was read anew.)"""
    model = FakeModel(len(theirs))
    draft = TextAloneDraft(ModelDraft(model), {7}) if pictures else TextBridge(ModelDraft(model), ours, theirs)
    session = Reader(draft, len(ours))
    row = Text(ours.encode("the quick brown fox " * 40), 0, task=task(pictures=object() if pictures else None))
    row.prompt_length = len(row.tokens)
    views = session.proposer._views if pictures else session.proposer._seqs
    one(session, row, 3)
    view = views[0]
    row.tokens += ours.encode("jumps over")
    one(session, row, 3)
    assert views == {0: view}


def test_texts_share_what_a_draft_with_coarser_tokens_read() -> None:
    """Common tokens are the target's, unread ones the draft's. (Few common ones of a long text were not copied.)"""
    model = FakeModel(len(theirs))
    session, source = Reader(TextBridge(ModelDraft(model), ours, theirs), len(ours)), task(source="ours")
    shared, tail = "the quick brown fox jumps over ", "print(area(3, 4)) " * 8
    first, second = (Text(ours.encode(shared + tail * k), k, task=source) for k in (1, 2))
    one(session, first, 1)
    read = sum(map(sum, model.fed))
    one(session, second, 1)
    assert sum(map(sum, model.fed)) - read < len(theirs.encode(shared + tail * 2)) - len(theirs.encode(shared)) + 2


@pytest.mark.parametrize("ids", [None, [99], ["0"]])
def test_a_round_begins_with_ids_of_its_texts(ids: Any) -> None:
    """Anything else is the draft's error. (None was Python's, and others were left out without a word.)"""
    session = Reader(ModelDraft(FakeModel()))
    session.proposer.begin_round = lambda *_: ids  # type: ignore[method-assign]
    with pytest.raises(DraftError, match=r"`ModelProposer.begin_round` must return ids of the sequences that it got"):
        one(session, Text([1, 2], 0))
