"""Drafts with another tokenizer, through text."""

from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specdec.core.budget import Budget
from specdec.core.drafts import SequenceView
from specdec.core.tree import Tree
from specdec.proposers import ModelDraft, TextBridge
from tests.proposers.fakes import FakeBudget, FakeEncoding, FakeModel, FakeSequence, OwnProposer, follow, one

TEXT = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on. Übergrößen kosten 12,50 € – naïve café.\n"
    "def area(width, height):\n    return width * height  # 面积 🙂🙃\n\n\nprint(area(3, 4))\n" * 2
)
KINDS = ["bytes-320", "bytes-420", "spaces-200"]


@lru_cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE like GPT-2's, or one over characters with byte fallback like Llama's, of some size."""
    style, size = kind.split("-")
    special = ["<s>", "</s>"]
    if style == "bytes":
        raw = Tokenizer(models.BPE())
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        raw = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        raw.pre_tokenizer = pre_tokenizers.Metaspace()
        raw.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        special = [*special, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        alphabet = []
        size = str(int(size) + 256)
    trainer = trainers.BpeTrainer(
        vocab_size=int(size), special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator([TEXT.replace("🙃", "")], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


ours, theirs = tokenizer("bytes-320"), tokenizer("bytes-420")


class Oracle(OwnProposer):
    """Drafts the true text in its own tokens; notes what it was given."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str, junk: int = 0) -> None:
        self.tokenizer, self.text, self.junk = tokenizer, text, junk
        self.seen: list[list[int]] = []

    def propose(self, rows: list[SequenceView], budgets: list[Budget]) -> list[Tree]:
        return [self._chain(row, budget.limit) for row, budget in zip(rows, budgets, strict=True)]

    def _chain(self, row: SequenceView, limit: int) -> Tree:
        self.seen.append(list(row.tokens))
        known = self.tokenizer.decode(row.tokens).removeprefix("<s>")
        rest = self.text[len(known) :] if self.text.startswith(known) else "?!"
        # As after other text: a word that goes on does not begin with a space. The emoji never merges with anything.
        anchor = self.tokenizer.encode("\n🙃", add_special_tokens=False)
        ids = self.tokenizer.encode("\n🙃" + rest, add_special_tokens=False)[len(anchor) :][:limit]
        if self.junk:
            ids = [(i * self.junk + 7) % len(self.tokenizer) for i in ids]
        return Tree.chain(ids, [0.9] * len(ids))


def emit(target: str, draft: str, text: str, junk: int = 0, limit: int = 6) -> tuple[int, int, Oracle]:
    """Emits `text` with a bridge that guesses along; tokens, passes and the draft."""
    ours, theirs = tokenizer(target), tokenizer(draft)
    true = ours.encode(text, add_special_tokens=False)
    oracle = Oracle(theirs, ours.decode(true), junk)
    session = TextBridge(oracle, ours, theirs).start(len(ours))
    row, passes = FakeSequence(true[:1]), 0
    while len(row.tokens) < len(true):
        [tree] = session.propose([row], [FakeBudget(limit)])
        assert len(tree) <= limit
        assert tree.is_chain
        assert all(0 <= token < len(ours) for token in tree.tokens)
        rest = true[len(row.tokens) :]
        accepted = len(tree.follow(rest[:-1]))
        follow(session, row, tree.tokens, accepted, rest[accepted])
        passes += 1
    return len(true), passes, oracle


@pytest.mark.parametrize("draft", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_a_draft_that_knows_the_text_is_accepted(target: str, draft: str) -> None:
    """Words, code, accents, Chinese and emoji come over in both directions; at least two tokens a pass."""
    tokens, passes, _ = emit(target, draft, TEXT)
    assert tokens / passes > 2.0


@pytest.mark.parametrize("target", KINDS[:2])
def test_the_draft_reads_the_text_as_its_own_tokenizer_writes_it(target: str) -> None:
    """What the draft is given round after round is the text, and no half characters."""
    ours, theirs = tokenizer(target), tokenizer("bytes-420")
    _, _, oracle = emit(target, "bytes-420", TEXT)
    text = ours.decode(ours.encode(TEXT))
    canonical = 0
    for ids in oracle.seen:
        read = theirs.decode(ids, skip_special_tokens=True)
        assert text.startswith(read)
        canonical += theirs.encode(read, add_special_tokens=False) == ids
    assert canonical > 0.9 * len(oracle.seen)


@given(st.text(alphabet=list("ab \n.é€🙂x0"), min_size=1, max_size=40), st.sampled_from(KINDS), st.sampled_from(KINDS))
@settings(max_examples=60, deadline=None)
def test_any_text_passes_through(text: str, target: str, draft: str) -> None:
    """Whatever the text and the guesses, proposals are ids of the target's vocabulary and nothing breaks."""
    if tokenizer(target).encode(text, add_special_tokens=False):
        emit(target, draft, text)
        emit(target, draft, text, junk=3)


def test_half_a_character_waits() -> None:
    """The draft sees a character once all its bytes are there, and its guess still continues the row's tokens."""
    text = "dog 🙃 dog"
    true = ours.encode(text)
    cut = next(i for i in range(1, len(true)) if ours.decode(true[:i]).endswith("\ufffd"))
    oracle = Oracle(theirs, text)
    session = TextBridge(oracle, ours, theirs).start(len(ours))
    assert one(session, FakeSequence(true[:cut]), 8)[:4] == true[cut:][:4]
    assert theirs.decode(oracle.seen[0], skip_special_tokens=True) == ours.decode(true[:cut]).rstrip("\ufffd")


def test_begin_and_end_of_text_are_translated() -> None:
    """The target's beginning of text becomes the draft's, and a draft that ends the text proposes the target's end."""

    class Ending(Oracle):
        def _chain(self, row: SequenceView, limit: int) -> Tree:
            tree = super()._chain(row, limit)
            return Tree.chain([*tree.tokens, theirs.eos_token_id, 7])

    oracle = Ending(theirs, "the dog")
    session = TextBridge(oracle, ours, theirs).start(len(ours))
    row = FakeSequence([ours.bos_token_id, *ours.encode("the")])
    assert one(session, row, 9) == [*ours.encode(" dog"), ours.eos_token_id]
    assert oracle.seen[0] == [theirs.bos_token_id, *theirs.encode("the")]


def test_a_failing_draft_leaves_the_bridge_usable() -> None:
    """After an exception in the draft the rows are read anew."""
    model = FakeModel(len(theirs))
    session = TextBridge(ModelDraft(model), ours, theirs).start(len(ours))
    rows = [FakeSequence(ours.encode("the quick"), 0), FakeSequence(ours.encode("a lazy"), 1)]
    budgets = [FakeBudget(3), FakeBudget(5)]
    model.fail_in = 2
    with pytest.raises(ZeroDivisionError):
        session.propose(rows, budgets)
    trees = session.propose(rows, budgets)
    fresh = TextBridge(ModelDraft(model), ours, theirs).start(len(ours)).propose(rows, budgets)
    assert [tree.tokens for tree in trees] == [tree.tokens for tree in fresh]
    session.drop([0])
    rows[1].tokens += ours.encode(" dog")
    session.propose(rows[1:], budgets[1:])
    assert not session.propose(rows[1:], [FakeBudget(0)])[0].tokens


def test_a_draft_shares_the_encoder() -> None:
    """It reads what the target's encoder says. (Its rows had nothing of it: an IndexError in its first pass.)"""
    model = FakeModel(len(theirs), is_encoder_decoder=True)
    session = TextBridge(ModelDraft(model, shared_encoder=True), ours, theirs).start(len(ours))
    session.propose([FakeSequence(ours.encode("the quick"), encoding=FakeEncoding([4]))], [FakeBudget(3)])
    assert [*model.sessions[-1].encodings.values()] == [4]
