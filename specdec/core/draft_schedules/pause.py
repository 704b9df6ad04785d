"""Rounds without a draft: how long they go on where drafting does not pay, and the verdict where it lost."""

from __future__ import annotations

from typing import NamedTuple

_SHORTEST, _LONGEST = 16, 256  # plain rounds until the next try: at first, and after wrong ones
_LONGEST_DEAR = 1024  # the most after slow tries
_GROWTH = 4  # times the last pause that one after a slow try may last: the try may have been a stall
_LOOK = 0.005  # the share of the time without a draft that tries may take, reading the text included
_REST = 8  # one round in so many of a pause is measured
_MOST_LOST = 3  # plain rounds' seconds that drafting may lose before it is suspended
_MOST_WON = 12  # plain rounds' seconds: greater gains offset no later losses, as texts have easy parts and hard ones
_SUSPENSION = (64, 512)  # plain rounds that a suspension lasts: the first, and at most


class Pause(NamedTuple):
    """The time without a draft, until `waited` reaches `length`: in plain rounds as they were when it began.

    A plain round took `unit` seconds when the pause began. A longer one counts as several, so that drafting is tried
    sooner, a shorter one as one. `rounds`: rounds of the pause so far. `reading`: seconds of drafts since the last try,
    for reading texts and for the try.

    Predictions may be wrong, so drafting is also judged by its results. `lost`: the seconds, in plain rounds, that
    drafting took beyond the seconds of its tokens without it, less than 0 after gains; above a bound drafting is
    suspended, whatever is predicted. `suspension`: the plain rounds that the next one lasts.
    """

    length: float = 0.0
    waited: float = 0.0
    unit: float = 1.0
    rounds: int = 0
    reading: float = 0.0
    lost: float = 0.0
    suspension: int = _SUSPENSION[0]

    @property
    def is_over(self) -> bool:
        """Whether drafting is tried in the next round."""
        return self.waited >= self.length

    @property
    def is_suspension(self) -> bool:
        """Whether drafting waits though it may be predicted to pay."""
        return self.lost > _MOST_LOST and not self.is_over

    @property
    def skips_rule(self) -> bool:
        """Whether the next round needs no look at the rule, whose own time counts beside passes of a millisecond."""
        return self.rounds % _REST > 0 and not self.is_over

    def fresh(self) -> Pause:
        """For the next request, at least half over: so short requests try again, too. A suspension goes on."""
        return self if self.is_suspension else self._replace(waited=max(self.waited, self.length / 2), rounds=0)

    def after_plain(self, seconds: float) -> Pause:
        """After a round without a draft."""
        return self._replace(waited=self.waited + max(seconds / self.unit, 1.0), rounds=self.rounds + 1)

    def stop(self, *, right: bool) -> Pause:
        """No pause, since drafting is predicted to pay; a `right` guess makes the next one short."""
        length = 0.0 if right else self.length
        return self._replace(length=length, waited=length, rounds=0, reading=0.0)

    def start(self, *, right: bool, price: float, plain_round: float) -> Pause:
        """A pause, as drafting is predicted to lose; the last draft's nodes took `price` seconds of the target's pass.

        A wrong guess doubles the pause, a `right` one makes it the shortest. It lasts so long that tries, with the
        reading before them, take at most the share `_LOOK` of the time, or twice that after a right guess. But one slow
        try alone makes no long pause.
        """
        usual = _SHORTEST if right else min(max(2 * self.length, _SHORTEST), _LONGEST)
        dear = (self.reading + price) / plain_round / (2 * _LOOK if right else _LOOK)
        length = max(usual, min(dear, _GROWTH * max(self.length, _SHORTEST), _LONGEST_DEAR))
        return self._replace(length=length, waited=0.0, unit=plain_round, rounds=0, reading=0.0)

    def judged(self, loss: float, plain_round: float) -> Pause:
        """After a round with a draft that took so many plain rounds' seconds more than its tokens do without one.

        The losses add up (CUSUM, Page 1954); a stall counts as one round at most.
        """
        before = self.lost if self.lost <= _MOST_LOST else 0.0  # it was suspended
        lost = max(before + min(loss, 1.0), -_MOST_WON)
        first, longest = _SUSPENSION
        if lost <= _MOST_LOST:
            return self._replace(lost=lost, suspension=first if lost == -_MOST_WON else self.suspension)
        length = max(self.suspension, self.length - self.waited)  # a pause that has just begun may be the longer one
        following = min(2 * self.suspension, longest)
        return self._replace(length=length, waited=0.0, unit=plain_round, lost=lost, suspension=following)
