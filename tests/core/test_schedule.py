"""How much is drafted: the rules one by one, and the promise that the cost rule never loses much."""

import math
import random
import statistics
from dataclasses import dataclass, replace
from typing import Any

import pytest

from specdec.core.budget import pays
from specdec.core.draft_schedules import Auto, Confidence, Constant, Cost, Heuristic, ScheduleSetup
from specdec.core.draft_schedules.cost import WIDEST
from specdec.core.draft_schedules.estimates import Acceptance, LinearFit
from specdec.core.draft_schedules.pause import Pause
from specdec.core.draft_schedules.seconds import Seconds
from specdec.core.outcome import Round, SequenceRound
from specdec.core.tree import Step
from tests.matrix import slow


def chance(acceptance: Acceptance, confidence: float) -> float:
    return acceptance.budget(1, 0.0, 0.0).chance(confidence)


@dataclass
class Key:
    id: int


def outcome(
    drafted: int, accepted: int, key: int = 0, seconds: tuple[float, float] = (0.1, 1.0), *, width: int = 1, **more: Any
) -> Round:
    """A round of one row with a draft so deep, and `width` nodes wide."""
    steps, nodes = [Step(0)] * (accepted + 1), width * drafted
    confidence = more.get("confidence", [1.0] * drafted)
    tested = [(c, i < accepted) for i, c in enumerate(confidence[: accepted + 1])]
    row = SequenceRound(key, nodes, drafted, accepted, False, "model", tested, len(tested), steps)
    return Round([row], 1 + nodes, seconds[0], seconds[1], 0.0, sum(seconds) + more.get("more", 0.0))


def limit(schedule: Any) -> int:
    """How many tokens are drafted next, for one row."""
    return schedule.budgets([Key(0)])[0].limit


def tried(schedule: Any, rounds: int, most: int, cost: float, accepted: int = 0, **more: Any) -> Any:
    """After so many rounds with drafts of `most` tokens, each of this cost, where a pass takes one second."""
    for _ in range(rounds):
        k = min(limit(schedule), most)
        seconds, guessed = (cost * k, 1.0), {"confidence": [more.get("belief", 0.5)] * k}
        hidden = k * more.get("hidden", 0.0)
        schedule = schedule.after(outcome(k, min(k, accepted), seconds=seconds, more=hidden, **guessed))
    return schedule


def following(schedule: Cost, **setup: Any) -> Cost:
    """The schedule of the next request of the same family."""
    return Cost.of(ScheduleSetup(**{"trees": False, "learned": schedule, **setup}))


def waited(schedule: Any, seconds: float = 1.0) -> int:
    """The rounds without a draft until one is tried again."""
    for idle in range(5000):
        if limit(schedule):
            return idle
        schedule = schedule.after(outcome(0, 0, seconds=(0.0, seconds)))
    raise AssertionError("never")


def goes_on(budget: Any, paths: list[list[float]], width: int = 1) -> bool:
    """Whether a sequence alone gets a further draft pass."""
    return pays([budget], [budget.gain(paths, width)])


def chain(budget: Any, rows: int = 1, width: int = 1) -> list[float]:
    """The confidences of a chain as long as the budget of all rows wants it, of a draft that is always as sure."""
    confidence: list[float] = []
    while len(confidence) < budget.limit and pays([budget], rows * [budget.gain([confidence], width)]):
        confidence.append(0.7)
    return confidence


def played(
    schedule: Any,
    rng: random.Random,
    acceptance: float,
    draft_cost: float,
    node_cost: float,
    *,
    rows: int = 1,
    hidden: float = 0.0,
) -> tuple[Any, Round]:
    """The schedule after a round in which all rows get its chain, and the round; a pass over one node takes one second.

    `hidden` seconds of a round with a draft are neither the draft's nor the pass's.
    """
    confidence = chain(schedule.budgets([Key(row) for row in range(rows)])[0], rows)
    k, shares = len(confidence), []
    for row in range(rows):
        accepted = next((i for i in range(k) if rng.random() >= acceptance), k)
        shares += outcome(k, accepted, row, confidence=confidence).seqs
    nodes = rows * (k + 1)
    seconds = k * draft_cost, 1 + node_cost * (nodes - 1)
    made = Round(shares, nodes, *seconds, 0.0, sum(seconds) + hidden * bool(k))
    return schedule.after(made), made


def test_heuristic() -> None:
    """Starts at 5; all accepted, +2; otherwise −1, never below 1; nothing drafted, the same; every row has its own.

    Trees stop growing at 1,024 nodes. A generator that runs for days keeps no lengths of texts that ended.
    """
    schedule = Heuristic()
    lengths = []
    for drafted, accepted in ((5, 5), (7, 7), (9, 3), (8, 0)):
        schedule = schedule.after(outcome(drafted, accepted))
        lengths.append(limit(schedule))
    assert lengths == [7, 9, 8, 7]
    for _ in range(20):
        schedule = schedule.after(outcome(5, 0))
    assert [budget.limit for budget in schedule.after(outcome(0, 0)).budgets([Key(0), Key(1)])] == [1, 5]
    whole = outcome(5, 5, key=3)
    schedule = Heuristic().after(whole)
    assert schedule.lengths == {3: 7}
    assert schedule.after(replace(whole, seqs=[replace(whole.seqs[0], finish="eos")])).lengths == {}
    trees = Heuristic(60, branches=16)
    for _ in range(4):
        trees = trees.after(outcome(5, 5))
    assert limit(trees) == 64


def test_constant_and_confidence() -> None:
    """A fixed length; and a draft that stops behind the first token it doubts."""
    assert limit(Constant(3).after(outcome(3, 3))) == 3
    budget = Confidence(k=4, threshold=0.4).budgets([Key(0)])[0]
    assert goes_on(budget, [[]])
    assert goes_on(budget, [[0.9, 0.4]])
    assert not goes_on(budget, [[0.9, 0.39]])
    assert not goes_on(budget, [[0.9] * 4])
    assert budget.keep([0.9, 0.1])
    assert not budget.keep([0.1, 0.9])


def simulate(
    schedule: Any, acceptance: float, draft_cost: float, node_cost: float, tokens: int, hidden: float = 0.0
) -> float:
    """Seconds per token of decoding with a draft of this acceptance, where a plain pass takes one second."""
    rng, made, spent = random.Random(0), 0, 0.0
    while made < tokens:
        schedule, last = played(schedule, rng, acceptance, draft_cost, node_cost, hidden=hidden)
        made += len(last.seqs[0].steps)
        spent += last.seconds
    return spent / made


@pytest.mark.parametrize("draft_cost", [0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("node_cost", [0.0, 0.1])
def test_cost_never_loses_much(draft_cost: float, node_cost: float) -> None:
    """A useless draft costs at most 5% over 256 tokens, however dear it is."""
    assert simulate(Cost(), 0.0, draft_cost, node_cost, 256) < 1.05


@pytest.mark.parametrize(
    ("acceptance", "draft_cost"), [(0.9, 0.1), (0.6, 0.1), slow(0.8, 0.05), slow(0.8, 0.2), slow(0.5, 0.05)]
)
def test_cost_comes_near_the_best_constant(acceptance: float, draft_cost: float) -> None:
    """With a good draft it is within 12% of the best fixed length in hindsight."""
    best = min(simulate(Constant(k), acceptance, draft_cost, 0.02, 2000) for k in range(1, 33))
    assert simulate(Cost(), acceptance, draft_cost, 0.02, 2000) < 1.12 * best


@pytest.mark.parametrize(("hidden", "bound"), [(0.3, 1.05), (1.0, 1.08)])
def test_cost_sees_losses_that_it_did_not_predict(hidden: float, bound: float) -> None:
    """A round with a draft may cost more than its parts say: what was measured decides."""
    assert simulate(Cost(), 0.1, 0.01, 0.001, 512, hidden=hidden) < bound
    assert simulate(Cost(), 0.9, 0.01, 0.001, 512, hidden=hidden) < 0.6


@pytest.mark.parametrize("paths", [1, 3])
def test_a_draft_pass_is_worth_its_cost(paths: int) -> None:
    """Its tokens count by the mean of what came true so deep: how sure the draft is of them is not known yet."""
    worth = paths * Acceptance().mean
    assert goes_on(Acceptance().budget(9, 0.99 * worth, 0.0), [[]] * paths)
    assert not goes_on(Acceptance().budget(9, 1.01 * worth, 0.0), [[]] * paths)
    acceptance = Acceptance().after([(1.0, True)], 1).after([(1.0, True), (1.0, False)], 2)
    worth = paths * chance(acceptance, 1.0) * acceptance.later
    assert acceptance.later == pytest.approx(1.6 / 3)
    assert goes_on(acceptance.budget(9, 0.99 * worth, 0.0), [[1.0]] * paths)
    assert not goes_on(acceptance.budget(9, 1.01 * worth, 0.0), [[1.0]] * paths)


@pytest.mark.parametrize("hidden", [0.0, 1.0])
def test_cost_tries_again_in_short_calls(hidden: float) -> None:
    """A draft that turns good is found again over calls of 24 tokens. (Every call began its waiting anew.)"""
    schedule: Any = Cost()
    drafted = 0
    for turn in range(40):
        good, schedule = turn >= 10, following(schedule)
        for _ in range(24):
            k = min(limit(schedule), 3)
            seconds, more = (0.1 * k, 1.0), 0.0 if good else hidden * bool(k)
            schedule = schedule.after(outcome(k, k if good else 0, seconds=seconds, confidence=[0.5] * k, more=more))
            drafted += good and k > 0
    assert drafted > 300


def test_a_draft_that_proposes_nothing_is_charged() -> None:
    """A draft pass in every round, whose guess is never worth verifying. (It made its pass for ever: nothing proposed,
    nothing learned, and a fifth of all time went there.)"""
    schedule: Any = Cost()
    passes = [limit(schedule) > 0]
    for _ in range(256):
        schedule = schedule.after(outcome(0, 0, seconds=(0.25 * passes[-1], 1.0)))
        passes.append(limit(schedule) > 0)
    assert 3 <= sum(passes) <= 10
    assert schedule.seconds.plain.at(1) == pytest.approx(1.0)  # what the draft took is no part of a round without one


def test_texts_without_an_idea_are_asked_on() -> None:
    """A draft that takes next to no time has nothing to propose for long, and then something."""
    schedule: Any = Cost()
    for _ in range(500):
        assert limit(schedule) > 0
        schedule = schedule.after(outcome(0, 0, seconds=(0.005, 1.0)))


@pytest.mark.parametrize(
    ("reading", "right", "least", "most"), [(0.0, 0, 30, 300), (4.0, 0, 800, 1024), (4.0, 1, 400, 500)]
)
def test_a_dear_look_is_a_rare_one(reading: float, right: int, least: int, most: int) -> None:
    """What a draft reads before it can guess again counts as what the look costs; the third one sets the wait.

    So it does where a guess was right. (Sixteen texts were read again every 16 rounds, at five rounds' cost.)
    """
    schedule = following(replace(tried(Cost(), 12, 1, 0.2), acceptance=Acceptance(levels=200.0)))
    row = replace(outcome(1, right, confidence=[0.5]).seqs[0], prefill=True)
    look = Round([row], 2, 0.2 + reading, 1.0, 0.0, 1.2 + reading)
    assert least <= waited(schedule.after(look).after(look).after(look)) <= most


@pytest.mark.parametrize("rounds", range(2, 12))
def test_a_stall_costs_no_text(rounds: int) -> None:
    """Two of three guesses are right, and another program holds one draft pass up. (One such pass early in a process
    ended drafting for 1,024 rounds, so that a first run was slower than without a draft.)"""
    schedule, drafted = Cost(), 0
    for turn in range(100):
        k, stall = min(limit(schedule), 1), 20.0 * (turn == rounds)
        right = {"accepted": k * (turn % 3 > 0), "confidence": [0.7] * k}
        schedule = schedule.after(outcome(k, seconds=(0.45 * k + stall, 1.0), **right))
        drafted += k
    assert drafted > 60


def test_tokens_that_a_draft_reads_along_are_nodes_of_its_passes() -> None:
    """A draft that reads ten copied tokens before each guess cost as much per pass as those, so that it never paid."""
    schedule = Cost()
    for read in (0, 10, 4, 10, 0, 10, 7):
        row = replace(outcome(2, 2).seqs[0], read=read)
        schedule = schedule.after(Round([row], 3, 0.2 + 0.03 * read, 1.0, 0.0, 1.2 + 0.03 * read))
    assert schedule.seconds.drafts["model"].at(1) == pytest.approx(0.1, rel=0.1)


def test_rest_ends_with_what_is_new() -> None:
    """Most rounds without a draft are not looked at, but for one that takes far longer, or has other company."""
    schedule = tried(Cost(), 40, 1, 0.2)
    while not schedule.pause.skips_rule:
        schedule = schedule.after(outcome(0, 0, seconds=(0.0, 1.0)))
    usual = outcome(0, 0, seconds=(0.0, 1.0))
    assert schedule.after(usual).seconds is schedule.seconds
    assert schedule.after(usual).pause.rounds == schedule.pause.rounds + 1
    for new in (outcome(0, 0, seconds=(0.0, 2.5)), replace(usual, others=outcome(0, 0, key=1).seqs)):
        assert schedule.after(new).seconds is not schedule.seconds


def test_cost_judges_a_batch_as_a_batch() -> None:
    """Eight rows after calls of one: a draft that pays for each goes on. (One round of eight rows was held against the
    tokens per second of single ones, and the draft was lost.)"""
    rng = random.Random(0)
    schedule: Any = Cost()
    for rows in (1, 1, 8):
        schedule, drafted = following(schedule), 0
        for _ in range(20):
            schedule, made = played(schedule, rng, 0.8, 0.1, 0.05, rows=rows)
            drafted += made.draft_seconds > 0
        assert drafted >= 17


def test_what_is_left_of_a_batch_is_drafted_for() -> None:
    """At once, as the rate follows the number of rows. (That of eight kept two from drafting for a dozen rounds.)"""
    rng = random.Random(0)
    schedule: Any = Cost()
    drafted = []
    for rows in [8] * 20 + [2] * 3:
        schedule, made = played(schedule, rng, 0.9, 0.2 + 0.01 * rows, 0.03, rows=rows)
        drafted.append(made.draft_seconds)
    assert min(drafted[-3:]) > 0


def test_chains_of_a_batch_end_together() -> None:
    """A draft pass takes as long for one row as for eight. (A row went on alone for fifteen, at an eighth of each.)"""
    acceptance = Acceptance().after([(0.75, i < 75) for i in range(100)], 100)
    cost = fitted(0.02, drafts={"model": LinearFit().add(1, 0.15).add(1, 0.15)}, acceptance=acceptance)
    budget, *_ = cost.budgets([Key(row) for row in range(8)])
    gain = budget.gain([[0.75]])
    assert gain > 0
    assert pays([budget], [gain] * 8)
    assert not pays([budget], [gain])
    (alone,) = cost.budgets([Key(0)])
    assert pays([alone], [alone.gain([[0.75]])])


def test_a_pass_over_no_nodes_is_never_less_than_free() -> None:
    """Rounding made it so where the seconds grow faster than the nodes, and the budget of a batch its logarithm."""
    line = LinearFit(
        weight=6.731591374218749, nodes=17.220557748437496, seconds=0.1481613565085003, squares=47.613240496874994,
        products=0.4753102562585435,
    )  # fmt: skip
    assert line.at(0) == 0
    passes = LinearFit().add(3, 1.0).add(6, 1.01).add(3, 1.0)
    plain = LinearFit().add(3, 1.0).add(3, 1.0).add(3, 1.0)
    cost = Cost(seconds=Seconds(passes, plain, {"model": line}))
    assert cost.budgets([Key(0), Key(1), Key(2)])[0].limit > 0


def test_cost_tries_again_when_passes_get_dearer() -> None:
    """Drafting that lost beside fast passes is tried again soon after they become slow, as when files turn cold."""
    schedule: Any = Cost()
    while not schedule.pause.is_suspension:
        schedule = tried(schedule, 1, 3, 0.5, accepted=1, belief=0.7, hidden=0.5)
    assert waited(schedule) >= 60
    assert waited(schedule, 5.0) <= waited(schedule) / 4


def test_a_suspension_is_short_again_after_gains() -> None:
    """Each lasts twice as long as the last one, unless drafting has gained twelve rounds in between."""

    def lost(pause: Pause) -> Pause:
        while not pause.is_suspension:
            pause = pause.judged(1.0, 2.0)
        return pause

    first = lost(Pause())
    assert (first.length, first.unit) == (64, 2.0)
    over = first._replace(waited=first.length)
    assert lost(over).length == 2 * first.length
    for gains, length in ((11, 2), (12, 1)):
        pause = over
        for _ in range(gains):
            pause = pause.judged(-1.0, 2.0)
        assert lost(pause).length == length * first.length


def test_a_suspension_shortens_no_pause() -> None:
    """A slow try that was wrong waits for its whole pause, whatever the verdict. (It was over after 64 rounds.)"""
    pause = Pause(length=256).start(right=False, price=8.0, plain_round=1.0)
    while not pause.is_suspension:
        pause = pause.judged(1.0, 1.0)
    assert pause.length == 1024


def test_cheaper_rounds_make_no_pause_longer() -> None:
    """A pause of 16 rounds of a large batch is one of 16 of a single text. Dearer rounds end it sooner."""
    begun = Pause().start(right=False, price=0.0, plain_round=0.5)
    for seconds, rounds in ((0.01, 16), (0.5, 16), (2.0, 4)):
        pause, count = begun, 0
        while not pause.is_over:
            pause, count = pause.after_plain(seconds), count + 1
        assert count == rounds


def test_rows_that_leave_make_nothing_dearer() -> None:
    """A batch whose rows finish one by one waits as long for another trial as one row does. (A token took more seconds
    the fewer rows shared a pass, which passed for passes that had got dearer.)"""
    rng = random.Random(0)
    schedule: Any = Cost()
    drafted = 0
    for turn in range(320):
        schedule, made = played(schedule, rng, 0.3, 0.02, 0.002, rows=8 - turn // 40, hidden=1.0)
        drafted += made.draft_seconds > 0
    assert drafted < 20


def test_cost_gets_over_a_stall() -> None:
    """One round of thirty seconds, as when passes are compiled, is forgotten at once when the next ones are fast."""
    schedule: Any = Cost().after(outcome(3, 3, seconds=(30.0, 30.0), confidence=[0.7] * 3))
    for _ in range(3):
        schedule = schedule.after(outcome(3, 3, seconds=(0.003, 0.01), confidence=[0.7] * 3))
    assert schedule.seconds.passes.at(4) < 0.02
    assert schedule.seconds.drafts["model"].at(1) < 0.002
    schedule = schedule.after(outcome(3, 3, seconds=(30.0, 30.0), confidence=[0.7] * 3))
    assert schedule.seconds.passes.at(4) < 0.03
    assert schedule.seconds.drafts["model"].at(1) < 0.003


def test_unlikely_guesses_are_not_given_up_early() -> None:
    """Twenty misses of guesses of 6% say little. (Their estimate fell to a tenth, they were never drafted again.)

    Of guesses that were to come true as often as not they say all.
    """
    acceptance = Acceptance()
    for _ in range(20):
        acceptance = acceptance.after([(0.7, True), (0.06, False)], 1)
    assert chance(acceptance, 0.06) > 0.03
    assert chance(acceptance, 0.7) > 0.7
    for _ in range(20):
        acceptance = acceptance.after([(0.5, False)], 1)
    assert chance(acceptance, 0.5) < 0.1


@pytest.mark.parametrize(("seconds", "least", "most"), [(0.6, 2, 8), (0.01, 40, 48)])
def test_a_draft_that_is_wrong_while_prompts_are_read_guesses_single_tokens(
    seconds: float, least: int, most: int
) -> None:
    """They measure its costs, and a free draft is used though it is rarely right. (It waited for 256 rounds.)"""
    schedule: Any = Cost()
    row = replace(outcome(1, 0, confidence=[0.5]).seqs[0], prefill=True)
    for _ in range(12):
        schedule = schedule.after(Round([row] * 4, 8, 0.1, 1.0, 0.0, 1.1))
    assert limit(schedule) == 1
    drafted = 0
    for i in range(48):
        k = min(limit(schedule), 1)
        right = int(k and i % 3 == 0)
        schedule = schedule.after(outcome(k, right, seconds=(seconds * k, 1.0), confidence=[0.5] * k))
        drafted += k
    assert least <= drafted <= most


def test_drawn_guesses_hold_however_unlikely() -> None:
    """Four in ten of a probability from 1e-5 to 0.1, nine in ten above. (Chances were shares of the probability.)"""
    source, acceptance = random.Random(0), Acceptance()
    for _ in range(200):
        confidence = 10 ** source.uniform(-5, 0)
        acceptance = acceptance.after([(confidence, source.random() < 0.4 + 0.5 * (confidence > 0.1))], 1)
    for confidence in (2e-5, 2e-4, 2e-3, 2e-2):
        assert 0.25 < chance(acceptance, confidence) < 0.6
    assert chance(acceptance, 0.9) > 0.75


def test_a_sure_draft_goes_on() -> None:
    """Where a first guess is right, later ones are too: they count by their own mean, without the first."""
    acceptance = Acceptance()
    for i in range(100):
        right = i % 4 == 0
        tested = [(0.9, True), (0.9, True), (0.9, True)] if right else [(0.2, False)]
        acceptance = acceptance.after(tested, len(tested))
    assert acceptance.mean < 0.55 < 0.9 < acceptance.later


def test_unlikely_guesses_that_hold_are_drafted() -> None:
    """At high temperatures a guess of 1% is right every second time. (It was dropped unseen, and that counted as wrong,
    until nothing was drafted any more.)
    """
    source, schedule, drafted = random.Random(0), Cost(), 0
    for _ in range(200):
        (budget,) = schedule.budgets([Key(0)])
        k = int(budget.limit > 0 and goes_on(budget, [[]]) and budget.keep([0.01]))
        drafted += k
        asked = 0.3 * (budget.limit > 0)
        made = outcome(k, int(source.random() < 0.5) * k, seconds=(asked, 1.0), confidence=[0.01] * k)
        schedule = schedule.after(made)
    assert drafted > 150


@pytest.mark.parametrize(("fixed", "node", "least", "most"), [(1.0, 0.0001, 100, 600), (0.01, 0.002, 0, 8)])
def test_trees_are_as_wide_as_passes_are_dear(fixed: float, node: float, least: int, most: int) -> None:
    """Hundreds of nodes where a pass takes a second whatever its width, a few where each takes its time."""
    schedule: Any = Cost(k=32, branches=WIDEST)
    widths = []
    source, rates = random.Random(0), [0.69, *[0.05] * 4, *[0.01] * 8]
    for _ in range(40):
        (budget,) = schedule.budgets([Key(0)])
        ends: list[list[float]] = [[]]
        nodes, depth, accepted, tested = 0, 0, 0, []
        alive = True
        while ends and goes_on(budget, ends, len(ends)):
            children = [[*end, rate] for end in ends for rate in rates if budget.keep([*end, rate])]
            if alive and children:  # whatever is right, is the child of the first
                right = source.choices([*range(len(rates)), None], [*rates, 1 - sum(rates)])[0]
                own = [path[-1] for path in children if path[:-1] == ends[0]]
                tested += [(rate, i == right) for i, rate in enumerate(own)]
                alive = right is not None and right < len(own)
                accepted += alive
            nodes, depth = nodes + len(children), depth + bool(children)
            ends = sorted(children, key=lambda path: -math.prod(path))[:WIDEST]
        levels = accepted + (depth > accepted)
        row = SequenceRound(0, nodes, depth, accepted, False, "model", tested, levels, [Step(0)] * (accepted + 1))
        seconds = fixed + node * (1 + nodes)
        schedule = schedule.after(Round([row], 1 + nodes, 0.003 * depth, seconds, 0.0, 0.003 * depth + seconds))
        widths.append(nodes)
    assert least <= statistics.median(widths[10:]) <= most


def test_wide_drafts_pay_for_all_their_nodes() -> None:
    """A search's draft takes several nodes for each token: what pays for a chain does not pay for eight branches."""

    def settled(width: int) -> int:
        schedule: Any = Cost()
        drafted = 0
        for _ in range(60):
            confidence = chain(schedule.budgets([Key(0)])[0], width=width)
            depth = len(confidence)
            costs = {"seconds": (0.1 * depth, 1 + 0.1 * width * depth), "width": width}
            schedule = schedule.after(outcome(depth, min(depth, 1), confidence=confidence, **costs))
            drafted += depth
        return drafted

    assert settled(1) > 60
    assert settled(10) < 30


def fitted(node: float, drafts: Any = None, widest_nodes: float = 1.0, **more: Any) -> Cost:
    """The rule where a pass takes a second over one node, so many more over each other one."""
    passes, line = LinearFit(), LinearFit()
    for nodes in (1, 4, 9, 16, 25):
        passes, line = passes.add(nodes, 1.0 + node * (nodes - 1)), line.add(1, 0.01)
    seconds = Seconds(passes, LinearFit().add(1, 1.0), drafts or {"model": line}, widest_nodes=widest_nodes)
    return Cost(k=16, seconds=seconds, **more)


@pytest.mark.parametrize(("node", "branches"), [(0.001, 8), (0.05, 1)])
def test_trees_only_where_nodes_cost_little(node: float, branches: int) -> None:
    """A pass of one second over one node: trees where another takes a millisecond, chains where it takes fifty."""
    cost = fitted(node, widest=8, widest_nodes=100.0)
    (budget,) = cost.budgets([Key(0)])
    assert budget.limit == 16
    assert budget.branches == branches
    (asked,) = following(cost, tokens=16, branches=3, trees=True).budgets([Key(0)])
    assert asked.branches == 3
    (search,) = following(cost, tokens=16).budgets([Key(0)])
    assert search.branches is None


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        ({}, True),
        ({"tokens": 256}, True),
        ({"tokens": 257}, False),
        ({"branches": 1}, False),
        ({"trees": False}, False),
    ],
)
def test_siblings_where_trees_may_pay(setup: dict[str, Any], expected: bool) -> None:
    """And where memory for so many nodes was set aside; who names branches gets chains without them."""
    [budget] = Cost.of(ScheduleSetup(**setup)).budgets([Key(0)])
    assert budget.siblings == expected


@pytest.mark.parametrize(("seen", "branches", "deep"), [(1.0, 2, 4), (5.0, 2, 10), (25.0, 6, 16), (400.0, WIDEST, 16)])
def test_trees_grow_step_by_step(seen: float, branches: int, deep: int) -> None:
    """To four times the nodes of the widest pass of late. (The first tree had a thousand, or was 32 deep.)"""
    (budget,) = fitted(0.001, widest=WIDEST, widest_nodes=seen).budgets([Key(0)])
    assert (budget.branches, budget.limit) == (branches, deep)


def test_offloaded_weights_are_worth_long_drafts_from_the_beginning() -> None:
    """Before anything was measured, a draft for a target in memory stops sooner than one for weights on disk."""
    (near,), (far,) = (following(Cost(), offloaded=far).budgets([Key(0)]) for far in (False, True))
    assert len(chain(near)) < 4
    assert len(chain(far)) > 2 * len(chain(near))


def test_a_look_of_asked_branches_has_them_all() -> None:
    """A search goes on only where all of its beams were guessed. (Looks had one branch, and never found anything.)"""
    cost = fitted(0.001, branches=8, acceptance=Acceptance(levels=200.0))
    (budget,) = cost.budgets([Key(0)])
    assert (budget.limit, budget.branches) == (1, 8)


def test_what_was_measured_outweighs_the_prior() -> None:
    """Passes over experts take a quarter more for each node. (More than half of it was lost: trees were too large.)"""
    passes = LinearFit(steepness=0.02, trust=8.0)
    for nodes in (1, 4, 6) * 5:
        passes = passes.add(nodes, 1.0 + 0.25 * (nodes - 1))
    assert passes.slope == pytest.approx(0.25, rel=0.15)


def test_wide_passes_are_no_stalls() -> None:
    """Ten times the nodes may take ten times as long. (They counted as three passes, and trees went on for long.)"""
    passes = LinearFit()
    for nodes in (4, 5, 6) * 5:
        passes = passes.add(nodes, 1.0)
    assert passes.add(200, 20.0).at(200) == pytest.approx(20.0, rel=0.1)
    assert passes.add(5, 20.0).at(5) < 1.3


def test_narrow_passes_show_no_stalls() -> None:
    """One node in a quarter of the time of thirty: what the wide passes took stays known. (Each plain round dropped it,
    and the rule began anew.)"""
    passes = LinearFit().add(30, 4.0).add(30, 4.0)
    assert passes.add(1, 1.0).at(30) == pytest.approx(4.0, rel=0.05)
    assert passes.add(30, 1.0).at(30) == 1.0


def test_a_fast_draft_pass_is_as_good_as_two() -> None:
    """It shows that earlier ones were stalls. (Costs counted as unknown again, and whole chains were drafted.)"""
    schedule = tried(Cost(), 40, 1, 0.2)
    fast = schedule.after(outcome(1, 0, seconds=(0.01, 1.0), confidence=[0.5]))
    assert fast.seconds.drafts["model"].at(1) == pytest.approx(0.01)
    assert fast.is_measured


def test_a_gap_that_was_read_is_not_the_price_of_a_draft_pass() -> None:
    """A try after a long pause reads what it missed. (Its price rose with every try, and drafting never came back.)"""
    schedule = tried(Cost(), 40, 1, 0.2)
    price = schedule.seconds.drafts["model"].at(1)

    def after(seconds: float) -> float:
        row = replace(outcome(1, 1).seqs[0], prefill=True)
        read = schedule.after(Round([row], 2, seconds, 1.0, 0.0, 1 + seconds))
        return read.seconds.drafts["model"].at(1)

    assert after(5.0) == price
    assert after(0.01) == pytest.approx(0.01)  # it was too high all along


def test_texts_without_a_guess_are_no_misses_of_an_instant_draft() -> None:
    """Seven of eight texts without an n-gram say nothing about the eighth's."""
    acceptance = Cost().acceptance
    silent = [replace(outcome(0, 0, key=key).seqs[0], source="ngram") for key in range(1, 8)]
    [right] = outcome(3, 3).seqs
    instant = Cost().after(Round([right, *silent], 11, 0.0001, 1.0, 0.0, 1.0))
    assert instant.acceptance == acceptance.after(right.tested, right.levels)
    slow = Cost().after(Round([right, *silent], 11, 0.3, 1.0, 0.0, 1.3))
    assert slow.acceptance.levels == right.levels + 7


def test_a_pause_goes_on_while_another_draft_reads() -> None:
    schedule: Any = tried(Cost(), 40, 1, 0.2)
    usual = outcome(0, 0, seconds=(0.0, 1.0))
    reading = replace(outcome(0, 0, key=1, seconds=(0.5, 1.0)).seqs[0], source="", prefill=True)
    for _ in range(300):
        schedule = schedule.after(replace(usual, others=[reading]))
    assert schedule.pause.is_over


def test_plain_rounds_are_measured_beside_drafts_of_others() -> None:
    """Without the price of the others' nodes. (A schedule waited for ever for a round without any draft.)"""
    schedule: Any = Cost()
    neighbour = replace(outcome(4, 4, key=1).seqs[0], source="other")
    drafted = 0
    for _ in range(100):
        k = limit(schedule)
        drafted += k > 0
        own = outcome(min(k, 4), min(k, 4), confidence=[0.7] * min(k, 4)).seqs
        nodes = 6 + min(k, 4)
        pass_seconds = 1.0 + 0.05 * nodes
        seconds = 0.01 * min(k, 4), pass_seconds, 0.0, 0.01 * min(k, 4) + pass_seconds
        schedule = schedule.after(Round(own, nodes, *seconds, others=[neighbour]))
    assert drafted > 90
    assert schedule.seconds.plain.at(2) == pytest.approx(1.1, rel=0.1)


def test_plain_rounds_of_more_sequences_than_were_measured() -> None:
    """They take what their pass takes. (Two took half as long again as one, so sixteen were to take nine times as long,
    and drafting for sixteen took a sixth more than it brought.)
    """
    passes = LinearFit()
    for nodes in (1, 4, 9, 16, 25):
        passes = passes.add(nodes, 1.0 + 0.05 * (nodes - 1))
    plain = LinearFit().add(1, 1.1).add(2, 1.6).add(1, 1.1).add(2, 1.6)
    seconds = Seconds(passes, plain, {"model": LinearFit().add(1, 0.1).add(1, 0.1)}, other=0.1)
    assert seconds.plain_round(2) == plain.at(2) == pytest.approx(1.6, rel=0.1)
    assert seconds.plain_round(16) == pytest.approx(1.85, rel=0.05)
    assert not seconds.pays(16, 1, 0.5)


def test_a_hard_part_after_an_easy_one_is_no_verdict() -> None:
    """A signature that is copied, then a sentence that is not: drafting pays. (It was given up in every sentence.)"""
    cost, lost = Cost(), 0
    for _ in range(20):
        cost = following(cost)
        for drafted, accepted in [(8, 8), (8, 7), *[(1, 0)] * 20]:
            (budget,) = cost.budgets([Key(0)])
            lost += cost.pause.is_suspension
            right = (drafted, accepted) if budget.limit else (0, 0)
            cost = cost.after(outcome(*right, seconds=(0.2 * right[0], 1.0)))
    assert lost == 0


def test_rows_of_other_requests_share_passes_and_nothing_else() -> None:
    """Seconds, nodes and tokens are everyone's; acceptance and draft passes are learned from own rows."""
    (own,) = outcome(3, 3).seqs
    other = replace(outcome(9, 0, key=1).seqs[0], source="other")
    cost = Cost().after(Round([own], 14, 0.9, 1.0, 0.1, 2.0, others=[other]))
    assert cost.tokens == 5
    assert (cost.seconds.passes.nodes, cost.seconds.passes.seconds) == (14, 1.1)
    assert cost.acceptance == Cost().acceptance.after(own.tested, own.levels)
    assert (dict(cost.seconds.drafts), cost.seconds.plain.weight) == ({}, 0)
    assert (cost.seconds.other_seqs, cost.seconds.drafting_seqs) == (1, 0)
    shared = Cost().after(Round([own], 8, 0.3, 1.0, 0.0, 1.3, others=[replace(own, id=1)]))
    assert shared.seconds.drafts["model"].at(2) == pytest.approx(0.1)
    assert (shared.seconds.other_seqs, shared.seconds.drafting_seqs) == (1, 1)
    alone = shared.after(outcome(3, 3))
    assert (alone.seconds.other_seqs, alone.seconds.drafting_seqs) == (0, 0)
    reading = Cost().after(Round([own], 8, 0.3, 1.0, 0.0, 1.3, others=[replace(other, prefill=True)]))
    assert reading.seconds.passes.weight == 0


def test_a_source_that_stalled_is_measured_again() -> None:
    """Its price fades while the other source drafts. (A busy minute left the model of a hybrid out for good.)"""
    copies = outcome(4, 4, seconds=(0.01, 1.0))
    copies = replace(copies, seqs=[replace(copies.seqs[0], source="suffix")])
    schedule: Any = Cost()
    for round in [*[copies] * 4, *[outcome(0, 0, seconds=(0.0, 1.0))] * 3, *[outcome(1, 1, seconds=(50.0, 1.0))] * 2]:
        schedule = schedule.after(round)
    assert schedule.budgets([Key(0)])[0].pass_cost > 10
    for round in [copies, outcome(0, 0, seconds=(0.0, 1.0))] * 80:
        schedule = schedule.after(round)
    assert schedule.budgets([Key(0)])[0].pass_cost < 1


# --- auto


def test_the_default_begins_with_the_published_length_until_costs_are_known() -> None:
    """A round that reads a prompt measures nothing: two more tokens after it if all were accepted, else one less."""
    for accepted, expected in ((5, 7), (3, 4)):
        schedule: Any = Auto.of(ScheduleSetup(trees=False))
        assert limit(schedule) == 5
        read = outcome(5, accepted, seconds=(0.05, 1.0))
        schedule = schedule.after(replace(read, seqs=[replace(read.seqs[0], prefill=True)]))
        assert limit(schedule) == expected
        schedule = schedule.after(outcome(expected, expected, seconds=(0.05, 1.0)))
        assert limit(schedule) == expected + 2
        assert limit(schedule.after(outcome(5, 5, seconds=(0.05, 1.0)))) == Cost().k
    assert limit(Auto.of(ScheduleSetup(tokens=3, trees=False))) == 3


def test_a_stall_in_the_first_draft_pass_stops_no_drafting() -> None:
    """The first pass of a draft that is cheap took as long as forty of the target, as when it is built."""
    for first in (Cost(), Auto.of(ScheduleSetup(trees=False))):
        schedule: Any = first.after(outcome(3, 0, seconds=(40.0, 1.0), confidence=[0.7] * 3))
        assert limit(schedule) > 0
        schedule = schedule.after(outcome(3, 3, seconds=(0.05, 1.0), confidence=[0.7] * 3))
        assert limit(schedule) > 3


def test_the_default_takes_along_what_it_learned() -> None:
    """The next request of the family begins with the measured costs."""
    learned = tried(Auto.of(ScheduleSetup(trees=False)), 6, 5, cost=0.05, accepted=5)
    later = Auto.of(ScheduleSetup(trees=False, learned=learned))
    assert later.seconds.passes == learned.seconds.passes
    assert limit(later) == Cost().k


def test_a_stall_in_a_wider_pass_makes_no_node_dear() -> None:
    """One of two passes over two nodes took twice as long. (Then every pass with a draft looked dear.)"""
    schedule: Any = Cost()
    for drafted, accepted, seconds in ((1, 1, 1.0), (0, 0, 1.0), (0, 0, 1.0), (1, 0, 2.0)):
        schedule = schedule.after(
            outcome(drafted, accepted, seconds=(0.35 * drafted, seconds), confidence=[0.3] * drafted)
        )
    assert limit(schedule) > 0
