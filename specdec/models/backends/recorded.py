"""Passes that were recorded: C++ calls the operators of one pass again, without Python.

Ragged passes have few sizes that change: the numbers of new nodes and of nodes with logits, and the rows and columns of
the buffers. So a pass over a few nodes is recorded twice, with different sizes. A number that is the same in both is a
constant, and other numbers are multiples of one size. The model's operators are called, so that results are equal,
bit for bit; a third pass, over one node, compares them. Models whose Python reads values are not recorded. Python that
takes another way for long inputs alone is not seen, which no decoder of transformers has been found to do.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specdec import kernels
from specdec.core.drafts import Chained, ChainRule
from specdec.models.backends.ragged_inputs import PassInputs, StepInputs
from specdec.models.backends.ragged_model import RaggedModel

_log = logging.getLogger(__name__)
_FORMATS: dict[Any, int] = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2}
_WORDS = 2  # words of bits in a table

Place = tuple[int, int]
"""An argument of a call, and a place in its list, or -1."""


class Sizes(NamedTuple):
    """Sizes of a pass: new nodes, nodes with logits, rows and columns of the text's buffers and of the encoders', nodes
    that the last layer computes to its end."""

    nodes: int
    logit_nodes: int
    rows: int
    columns: int
    encoders: int
    frames: int
    last: int


_FIRST, _SECOND = Sizes(5, 3, 4, 96, 8, 11, 4), Sizes(7, 4, 6, 104, 9, 13, 5)  # each size grows by another ratio
_COMPARED = Sizes(1, 1, 3, 40, 2, 5, 1)


class _Unrecordable(Exception):
    pass


class _Guard(TorchFunctionMode):  # type: ignore[misc,no-untyped-call]
    """Refuses what reads values without an operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__):
            raise _Unrecordable("it reads values, on which the next operators may depend")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):  # type: ignore[misc,no-untyped-call]
    """The operators that are called meanwhile, with arguments in the order of their schemas, and tensors they make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = list[tuple[Any, list[Any], list[Tensor]]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.dynamic_output_shape in func.tags and not _picks(func, args):
            raise _Unrecordable(f"{func} makes a tensor whose size depends on values")
        result = func(*args, **(kwargs or {}))
        parameters = func._schema.arguments[len(args) :]
        arguments = [*args, *((kwargs or {}).get(parameter.name, parameter.default_value) for parameter in parameters)]
        tensors = list(result) if isinstance(result, list | tuple) else [] if result is None else [result]
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise _Unrecordable(f"{func} makes {type(result).__name__}, on which the next operators may depend")
        self.calls.append((func, arguments, tensors))
        return result


class _Tape:
    """One recorded pass: its calls, and numbers of its values."""

    def __init__(self, model: RaggedModel, inputs: PassInputs) -> None:
        with _Guard(), _Recorder() as recorder:
            results = model(*inputs)
        self.calls, self.inputs, self.weights = recorder.calls, inputs.tensors, list[Tensor]()
        self.size_places = _size_places(inputs)
        self.sizes = [self.inputs[number].shape[dimension] for number, dimension in self.size_places]
        numbers = {id(tensor): place for place, tensor in enumerate(self.inputs)}
        result_ids = set[int]()
        for _, arguments, tensors in self.calls:
            for tensor in (value for _, value in _flat(arguments) if isinstance(value, Tensor)):
                if id(tensor) not in result_ids and id(tensor) not in numbers:
                    numbers[id(tensor)] = len(numbers)
                    self.weights.append(tensor)
            result_ids |= set(map(id, tensors))
        count = len(numbers)
        self.operands, self.results = list[dict[Place, int]](), list[list[int]]()
        for _, arguments, tensors in self.calls:
            flat = _flat(arguments)
            self.operands.append({place: numbers[id(value)] for place, value in flat if isinstance(value, Tensor)})
            self.results.append(list(range(count, count := count + len(tensors))))
            numbers |= {id(tensor): number for tensor, number in zip(tensors, self.results[-1], strict=True)}
        self.outputs = [numbers[id(tensor)] for tensor in results]

    def passes(self, other: _Tape) -> Any:
        """What runs passes of any sizes, if the `other` one differs in its sizes alone."""
        tapes = self, other
        flows = [([call[0] for call in tape.calls], tape.operands, tape.results, tape.outputs) for tape in tapes]
        is_same = flows[0] == flows[1] and len(self.weights) == len(other.weights)
        pairs = zip(self.weights, other.weights, strict=is_same)
        if not is_same or not all(a is b or torch.equal(a, b) for a, b in pairs):
            raise _Unrecordable("its operators depend on the number of tokens")
        passes = kernels.passes(len(self.inputs), self.size_places, self.weights)
        for (func, arguments, _), (_, other_arguments, _), operands, results in zip(
            self.calls, other.calls, self.operands, self.results, strict=True
        ):
            sizes = [
                [*place, *self._factor(a, b, other.sizes)]
                for (place, a), (_, b) in zip(_flat(arguments), _flat(other_arguments), strict=True)
                if not isinstance(a, Tensor | torch.ScriptObject) and a != b
            ]
            values, constants = [[*place, at] for place, at in operands.items()], tuple(map(_constant, arguments))
            passes.add(func._schema.name, func._schema.overload_name, constants, values, sizes, results)
        passes.end(self.outputs)
        return passes

    def _factor(self, number: Any, other_number: Any, sizes: Sequence[int]) -> tuple[int, int]:
        """The size that both numbers are the same multiple of, by its place, and the factor."""
        for place, (size, other) in enumerate(zip(self.sizes, sizes, strict=True)):
            if number % size == 0 and number // size * other == other_number:
                return place, number // size
        raise _Unrecordable(f"the numbers {number} and {other_number} follow no size")


@torch.no_grad()
def record(model: RaggedModel) -> Any:
    """What runs a model's passes without Python (`specdec.kernels.passes`); None if they cannot be recorded."""
    try:
        passes = _Tape(model, example(model, _FIRST)).passes(_Tape(model, example(model, _SECOND)))
        expected = model(*example(model, _COMPARED))
        if not all(map(torch.equal, passes.run(example(model, _COMPARED).tensors), expected)):
            raise _Unrecordable("another pass gives other numbers")
        return passes
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever an architecture does in Python
        level = logging.DEBUG if isinstance(error, _Unrecordable) else logging.INFO
        _log.log(level, "passes of %s run in Python: %r", type(model.model).__name__, error)
        return None


def draft_chain(
    passes: Any, first: PassInputs, steps: StepInputs, rules: Sequence[ChainRule], embeddings: Tensor | None
) -> Chained:
    """Drafts chains: the first pass has inputs `first`; `embeddings` is a head's `PackedLinear.table`."""
    encoders = [table[:, :, first.last[first.logit_nodes]] for table in first.encoders]
    buffers = [side for pair in (*first.buffers, *first.frames) for side in pair]
    arguments = first.tensors, steps.positions, steps.tables, encoders, buffers, list(map(_numbers, rules)), embeddings
    tokens, probabilities, scores = passes.draft_chain(*arguments)
    rest, guesses, siblings = iter(scores), [], []
    for rule, chain in zip(rules, zip(tokens, probabilities, strict=True), strict=True):
        pairs, width = list(zip(*chain, strict=True)), 1 + rule.siblings
        guesses.append(pairs[::width])
        groups = (pairs[at + 1 : at + width] for at in range(0, len(pairs), width))
        siblings.append([[pair for pair in group if pair[1]] for group in groups])  # 0: there was none
    return Chained(guesses, [next(rest).softmax(-1) if rule.needs_q else None for rule in rules], siblings)


def _numbers(rule: ChainRule) -> tuple[object, ...]:
    """A rule as passes.cpp takes it."""
    filters, address, first = rule.choice
    noise = [] if address is None else [kernels.signed(address), first]
    chosen = [(name, [*map(float, numbers)]) for name, numbers in filters], noise
    budget = rule.budget
    bins = [*budget.edges], [*budget.bases], [*budget.rates]
    costs = budget.node_cost / budget.later, budget.pass_cost / budget.later
    chain = rule.most, rule.width, [*rule.ends], rule.siblings, [*rule.text], budget.match
    return *chosen, *chain, *bins, *costs, budget.needs_confidence, rule.needs_q


def example(model: RaggedModel, sizes: Sizes) -> PassInputs:
    """A pass over a chain of nodes in the first row, with logits of the first nodes."""
    count, num_logits, rows, columns, encoders, frames, last = sizes
    place = torch.arange(count)
    table = torch.zeros(1, 1, count, 4 + _WORDS, dtype=torch.int32)
    table[..., 1], table[..., 3] = place, place + 1
    cross = torch.zeros_like(table)
    cross[..., 3] = frames
    has_encoder = model.has_encoder
    return PassInputs(
        model.inputs(place[None]),
        place[None] + count,  # unequal to columns and tokens
        place[:num_logits],
        [table.clone() for _ in range(len(model.kinds) or 1)],
        [cross] if has_encoder else [],
        place[:last],
        [_pair(width, rows, columns, model.dtype) for width in model.widths],
        [_pair(width, encoders, frames, model.dtype) for width in model.widths] if has_encoder else [],
        [place % last for _ in range(model.states)],
    )


def _size_places(inputs: PassInputs) -> list[list[int]]:
    """The sizes that change: numbers of an input and of a dimension."""
    text = 3 + len(inputs.tables) + len(inputs.encoders)
    buffers = [text, text + 2 * len(inputs.buffers)][: 1 + bool(inputs.frames)]
    last = len(inputs.tensors) - 1
    return [[0, 1], [2, 0], *([number, dimension] for number in buffers for dimension in (0, 2)), [last, 0]]


def _pair(width: tuple[int, ...], rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    heads, *sides = width
    keys, values = (torch.zeros(rows, heads, columns, side, dtype=dtype) for side in sides)
    return keys, values


def _picks(func: Any, args: Any) -> bool:
    """Whether this is a choice by numbers, whose count is known."""
    picks = func is torch.ops.aten.index.Tensor
    return picks and not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _flat(arguments: Sequence[Any]) -> list[tuple[Place, Any]]:
    """Arguments with their places; members in the place of lists."""
    pairs: list[tuple[Place, Any]] = []
    for place, value in enumerate(arguments):
        is_list = isinstance(value, list | tuple)
        pairs += [((place, at), member) for at, member in enumerate(value)] if is_list else [((place, -1), value)]
    return pairs


def _constant(value: Any) -> Any:
    """An argument as passes.cpp takes it: lists as tuples, tensors as None, and layouts as numbers."""
    if isinstance(value, list | tuple):
        return tuple(map(_constant, value))
    return None if isinstance(value, Tensor) else _FORMATS.get(value, value)
