"""What tests of drafts share: how many chains are made in one call."""

from typing import Any

import pytest

from specdec.core.drafts import Chained
from specdec.models.backends.kv_session import KvSession


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of chains of each call that makes some, from now on."""
    counts, chain = list[int](), KvSession.draft_chain

    def noted(self: KvSession, *given: Any) -> Chained | None:
        if (made := chain(self, *given)) is not None:
            counts.append(len(given[0]))
        return made

    monkeypatch.setattr(KvSession, "draft_chain", noted)
    return counts
