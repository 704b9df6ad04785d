"""Drafts with the layers that a target's own checkpoint has for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.errors import OptionError
from specdec.proposers.heads import load_mtp
from specdec.proposers.heads.proposer import HeadDrafter

if TYPE_CHECKING:
    from specdec.models import LanguageModel


class MtpDrafter(HeadDrafter):
    """Drafts with the target's multi-token prediction (arXiv 2412.19437); after the last of its layers, that again."""

    @classmethod
    def of(cls, target: LanguageModel, argument: str | None, name: str = "draft") -> MtpDrafter:
        """`mtp`; raises OptionError, which names the caller's argument `name`, for what follows it."""
        if argument is not None:
            raise OptionError.of(name, "a word without an argument", f"mtp:{argument}")
        return cls(load_mtp(target, argument=name), source="mtp")
