"""Statistics as people read them."""

from specdec.core.stats import Stats


def test_print_shows_the_table() -> None:
    """It was one line of forty fields."""
    stats = Stats(
        num_new_tokens=40, num_target_passes=10, num_draft_rounds=9, num_draft_tokens=60, num_accepted_draft_tokens=30,
        per_round_accepted=(3, 3, 3, 3, 3, 3, 4, 4, 4), seconds=2.0, draft_seconds=0.5, verify_seconds=1.5,
        finish_reasons=("length",), settings={"schedule": "auto"},
    )  # fmt: skip
    lines = [line.split() for line in str(stats).splitlines()]
    assert lines[:2] == [["new", "tokens", "40"], ["ended", "by", "length"]]
    assert lines[2] == ["tokens", "per", "second", "20.0", "in", "2.00", "s"]
    assert ["accepted", "30", "50%", "of", "60", "drafted"] in lines
    assert ["acceptance", "histogram", "3:", "6,", "4:", "3"] in lines
    assert ["draft", "time", "0.500", "s", "25%"] in lines
    columns = zip(str(stats).splitlines()[1:], ("length", "in 2"), strict=False)
    assert len({line.index(word) for line, word in columns}) == 1


def test_a_draft_that_does_not_pay_is_named() -> None:
    """A draft that lost a fifth of the time did so without a word; later four slow passes of the target spoke."""
    advice = "took 0.40 s more than it saved: `draft='none'` leaves it out"
    assert advice in str(Stats(num_draft_rounds=20, seconds=2.0, saved_seconds=-0.4))
    assert advice in str(Stats(num_draft_rounds=4, seconds=2.0, draft_seconds=0.3, saved_seconds=-0.4))
    assert "leave it out" not in str(Stats(num_draft_rounds=4, seconds=2.0, draft_seconds=0.01, saved_seconds=-0.4))
    assert "leave it out" not in str(Stats(num_draft_rounds=20, seconds=2.0, saved_seconds=-0.01))
    assert not Stats(seconds=2.0, saved_seconds=-0.4, settings={"draft_kind": "form"}).draft_advice
