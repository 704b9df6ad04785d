"""What a round brings a text."""

from __future__ import annotations

from specdec import SpecGenerator
from tests.matrix import endless
from tests.tiny import tiny


def test_a_guessed_token_that_ends_the_text_is_accepted() -> None:
    """The round brings no token of the target's own; what was guessed after it is not reached."""
    model, prompt = tiny("llama"), [5, 9, 12]
    [text] = SpecGenerator(model).generate([prompt], **endless(12)).new_tokens()
    end = next(i for i in range(2, 12) if text[i] not in text[:i])

    def rest(tokens: list[int], k: int) -> list[int]:
        return text[len(tokens) - len(prompt) :][:k]

    how = {"schedule": "constant", "num_assistant_tokens": 11, "eos_token_id": text[end], "max_new_tokens": 12}
    out = SpecGenerator(model, rest).generate([prompt], pad_token_id=0, **how)
    assert out.new_tokens() == [text[: end + 1]]
    assert out.stats.num_accepted_draft_tokens == end + 1
    assert out.stats.num_target_passes == 1
