"""The part of an answer in which a model thinks: its forms, its reading and its budget of tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core.tree import place_after
from specdec.generator.tokenizers import begun


@dataclass(frozen=True)
class ThinkingForm:
    """The text of thoughts: `opening`, thoughts, `closing`; `unsaid` are marks around the answer itself."""

    opening: str
    closing: str
    unsaid: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """All marks."""
        return "".join((self.opening, self.closing, *self.unsaid))


# An expression that a chat template matches, the first that does -> the form of its thoughts.
_FORMS = {
    r"<\|channel\|>": ThinkingForm(  # gpt-oss
        "<|channel|>analysis<|message|>",
        "<|end|>",
        ("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>", "<|end|>"),
    ),
    r"\[/?THINK\]": ThinkingForm("[THINK]", "[/THINK]"),  # Magistral
    r"</?think>": ThinkingForm("<think>", "</think>"),  # Qwen, DeepSeek, GLM and many more
}


def thinking_of(template: str) -> ThinkingForm | None:
    """The form of the thoughts of a chat template; None for models that do not think."""
    return next((form for mark, form in _FORMS.items() if re.search(mark, template)), None)


class ThinkingReader:
    """Reads an answer piece by piece into thoughts and the rest, without their marks and the white space beside these.

    `thinks`: the prompt has the opening.
    """

    def __init__(self, form: ThinkingForm, *, thinks: bool) -> None:
        self._form, self.thinks, self._text = form, thinks, ""
        self._is_marked, self._is_begun = thinks, False  # a mark is before this part; the part has text

    def read(self, text: str, *, last: bool) -> tuple[str, str]:
        """The new thoughts, and the new text of the rest."""
        self._text += text
        parts = {True: "", False: ""}
        while True:
            marks = [self._form.closing] if self.thinks else [self._form.opening, *self._form.unsaid]
            places = [(place, mark) for mark in marks if (place := self._text.find(mark)) >= 0]
            place, mark = min(places, default=(len(self._text), ""))
            if not mark and not last:
                place -= max(begun(self._text, start) for start in marks)
            parts[self.thinks] += self._part(place, is_whole=bool(mark), last=last)
            if not mark:
                return parts[True], parts[False]
            self._text = self._text.removeprefix(mark)
            self.thinks = mark == self._form.opening
            self._is_marked, self._is_begun = True, False

    def _part(self, end: int, *, is_whole: bool, last: bool) -> str:
        """Takes the text up to `end`; white space at its end waits for what follows."""
        part, self._text = self._text[:end], self._text[end:]
        if self._is_marked and not self._is_begun:
            part = part.lstrip()
        if is_whole or not last:
            sure = part.rstrip()
            self._text = self._text if is_whole else part[len(sure) :] + self._text
            part = sure
        self._is_begun = self._is_begun or bool(part)
        return part


class ThinkingBudget:
    """A logits processor that closes thoughts after `most` tokens in all; the prompt has `begin` tokens.

    `opening`, `closing`: the tokens of the marks. `thinks`: the prompt has the opening.
    """

    pure = True  # a function of ids and logits

    def __init__(self, most: int, begin: int, opening: list[int], closing: list[int], *, thinks: bool) -> None:
        self._most, self._begin, self._thinks = most, begin, thinks
        self._opening, self._closing = opening, closing

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """`logits` `[n, vocab]` after `ids` `[n, length]`, with one choice where thoughts must close."""
        texts = ids[:, self._begin :].tolist()
        ends = [self._closing[self._closed(text)] if self._is_spent(text) else -1 for text in texts]
        chosen = torch.tensor(ends, device=logits.device)[:, None]
        is_other = torch.arange(logits.shape[1], device=logits.device) != chosen
        return logits.masked_fill(is_other & (chosen >= 0), -torch.inf)

    def _is_spent(self, text: list[int]) -> bool:
        """Whether thoughts are open and the budget is used up."""
        spent, start = 0, 0 if self._thinks else place_after(text, self._opening)
        while start is not None:
            text = text[start:]
            end = place_after(text, self._closing)
            if end is None:
                return spent + len(text) >= self._most
            spent, text = spent + end, text[end:]
            start = place_after(text, self._opening)
        return False

    def _closed(self, text: list[int]) -> int:
        """How many tokens of the closing end a text."""
        return next((n for n in range(len(self._closing) - 1, 0, -1) if text[-n:] == self._closing[:n]), 0)
