"""A traced pass as calls of a few functions: layers of equal code are one function, over weights of their own.

Compiling takes seconds for each function, whatever it computes, and more than a second for each layer. So a graph is
cut where layers begin and end only if that spares enough layers; otherwise one function is the whole pass.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

_LEAST = 8  # layers that need not be compiled, for which cutting pays
_LAYER = re.compile(r"(.*?\.\d+)(\.|$)")
_SYMBOL = re.compile(r"\b[su]\d+\b")

Call = tuple[int, list[int], list[int]]
"""A function's number, and the numbers of the values that it reads and makes."""


@dataclass(frozen=True)
class Pieces:
    """A pass: its `functions`, and their `calls` in order.

    Values have numbers: first the inputs of the pass, then the tensors named `held`, then what calls make. The pass
    returns the values `outputs`.
    """

    functions: list[GraphModule]
    held: list[str]
    calls: list[Call]
    outputs: list[int]

    @classmethod
    def of(cls, program: ExportedProgram) -> Pieces:
        pieces, functions = [_Piece(nodes) for nodes in _parts(program.graph)], dict[str, _Piece]()
        for piece in pieces:
            functions.setdefault(piece.code, piece)
        signature = program.graph_signature
        names = dict(signature.inputs_to_parameters) | dict(signature.inputs_to_buffers)
        names |= signature.inputs_to_lifted_tensor_constants
        inputs = program.graph.find_nodes(op="placeholder")
        held = [node for node in inputs if node.name in names and node.users]
        values = [*(node for node in inputs if node.name not in names), *held]
        values += [node for piece in pieces for node in piece.outputs]
        number = {node: place for place, node in enumerate(values)}
        order = {code: place for place, code in enumerate(functions)}
        return cls(
            [GraphModule(program.graph_module, piece.graph) for piece in functions.values()],
            [names[node.name] for node in held],
            [
                (order[piece.code], [number[node] for node in piece.inputs], [number[node] for node in piece.outputs])
                for piece in pieces
            ],
            [number[node] for node in program.graph.output_node().args[0]],
        )


class _Piece:
    """Neighbouring nodes of a graph as a graph of their own, which reads `inputs` and makes `outputs`."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.graph, self.inputs = Graph(), list[Node]()
        own = dict.fromkeys(nodes)
        sizes, copies = _sizes(own), dict[Node, Node]()
        for tensor in (read for node in (*sizes, *own) for read in node.all_input_nodes if _is_tensor(read)):
            if tensor not in own and tensor not in copies:
                copies[tensor] = self.graph.placeholder(f"given_{len(self.inputs)}")
                copies[tensor].meta = {"val": tensor.meta["val"]}
                self.inputs.append(tensor)
        for node in (*sizes, *own):
            copies[node] = self.graph.node_copy(node, copies.__getitem__)
        self.outputs = [node for node in own if _is_tensor(node) and not own.keys() >= node.users.keys()]
        self.graph.output(tuple(copies[node] for node in self.outputs))

    @cached_property
    def code(self) -> str:
        """The same text for pieces that compute the same."""
        number = {node: f"%{place}" for place, node in enumerate(self.graph.nodes)}
        symbols = dict[str, str]()
        lines = [
            f"{'' if node.op == 'placeholder' else node.target} {map_arg((node.args, node.kwargs), number.get)}"
            for node in self.graph.nodes
        ]
        given = [node.meta["val"] for node in self.inputs]
        lines += [f"{value.dtype} {tuple(value.shape)} {value.stride()}" for value in given]
        return _SYMBOL.sub(lambda found: symbols.setdefault(found[0], f"s{len(symbols)}"), "\n".join(lines))


def example_inputs(function: GraphModule) -> tuple[Tensor, ...]:
    """Tensors without values, some of whose sizes change."""
    return tuple(node.meta["val"] for node in function.graph.find_nodes(op="placeholder"))


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _sizes(own: Mapping[Node, None]) -> dict[Node, None]:
    """What these nodes read of others that is no tensor, after all that it is computed from."""
    sizes = dict[Node, None]()

    def note(node: Node) -> None:
        for read in node.all_input_nodes:
            if read not in own and read not in sizes and not _is_tensor(read):
                note(read)
                sizes[read] = None

    for node in own:
        note(node)
    return sizes


def _parts(graph: Graph) -> list[list[Node]]:
    """The computing nodes of a graph: a part for each layer that recurs, and what lies between them."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    label = dict(zip(nodes, _labels(nodes), strict=True))
    layers = [list(part) for _, part in groupby(nodes, label.__getitem__)]
    codes = [_Piece(layer).code for layer in layers]
    counts = Counter(codes)
    if len(codes) - len(counts) < _LEAST:
        return [nodes]
    merged = groupby(range(len(codes)), lambda place: place if counts[codes[place]] > 1 else -1)
    return [[node for place in places for node in layers[place]] for _, places in merged]


def _labels(nodes: Sequence[Node]) -> list[str]:
    """The layer that each node belongs to; nodes between two layers belong to the first, those around all to none."""
    labels = list[str]()
    for node in nodes:
        *_, (path, _) = (node.meta.get("nn_module_stack") or {"": ("", None)}).values()
        layer = _LAYER.match(path)
        labels.append(layer[1] if layer else "")
    end = max((place for place, label in enumerate(labels) if label), default=0)
    for place in range(1, end):
        labels[place] = labels[place] or labels[place - 1]
    return labels
