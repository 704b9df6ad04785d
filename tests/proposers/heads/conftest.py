"""What tests of heads share: tiny targets with a head of every kind, and what heads propose."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers

from specdec.core.budget import Budget
from specdec.core.drafts import SequenceView
from specdec.core.tree import Tree
from specdec.proposers.heads.proposer import HeadProposer
from tests.heads import Proposals, dflash_folder, eagle_folder, target
from tests.proposers.heads.test_gemma4 import pair
from tests.proposers.heads.test_heads import KINDS
from tests.proposers.heads.test_mtp import with_layers


@pytest.fixture(autouse=True)
def _all_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.23 refuses to build an assistant, as none of its layers makes keys and values."""
    for name in ("Gemma4TextConfig", "Gemma4UnifiedTextConfig"):
        kind = getattr(transformers, name)
        if (own := getattr(kind, "kv_sharing_modes", None)) is None:
            continue

        def modes(self: Any, own: property = own) -> Any:
            whole = self.num_kv_shared_layers == self.num_hidden_layers
            return ["reuse"] * self.num_hidden_layers if whole else own.fget(self)  # type: ignore[misc]

        monkeypatch.setattr(kind, "kv_sharing_modes", property(modes))


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> Proposals:
    """The text before every proposal of a head that is not empty, and the proposal; not for branches of a search."""
    seen: Proposals = []
    propose = HeadProposer.propose

    def spied(self: HeadProposer, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Tree]:
        trees = propose(self, seqs, budgets)
        pairs = zip(seqs, trees, strict=True)
        seen.extend((list(seq.tokens), tree) for seq, tree in pairs if tree.tokens and not seq.tree.tokens)
        return trees

    monkeypatch.setattr(HeadProposer, "propose", spied)
    return seen


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Any, Any]]:
    """Makes a tiny target and a head of a kind."""

    def make(kind: str) -> tuple[Any, Any]:
        if kind == "gemma4":
            return pair(window=5)
        if kind in ("mtp", "mellum"):
            return with_layers(monkeypatch, "mellum" if kind == "mellum" else "deepseek_v3", 1), "mtp"
        model, folder = target(), tmp_path / "head"
        if kind in ("dflash", "anchor"):
            return model, dflash_folder(folder, model, sample_from_anchor=kind == "anchor")
        return model, eagle_folder(folder, **KINDS.get(kind, {}))

    return make
