"""Layers of equal code become one function, and its calls compute what the model does; nothing is compiled here."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental import _config

from specdec.models import LanguageModel
from specdec.models.backends.compiler import example, tensors_of
from specdec.models.backends.pieces import Pieces
from specdec.models.backends.ragged import RaggedForward
from specdec.models.backends.ragged_model import RaggedModel
from tests.tiny import tiny

pytestmark = pytest.mark.usefixtures("built")
DEEP = 12  # layers


def traced(model: RaggedModel) -> tuple[Pieces, dict[str, Tensor]]:
    """The pieces of a model, and its tensors by name."""
    given, sizes = example(model)
    with torch.no_grad(), _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        program = torch.export.export(model.eval(), tuple(given), dynamic_shapes={"given": tuple(sizes)}, strict=False)
    return Pieces.of(program), {**program.constants, **tensors_of(model)}


def run(pieces: Pieces, given: list[Tensor], tensors: dict[str, Tensor]) -> list[Tensor]:
    """The outputs of a pass, whose functions run as torch's operators."""
    values = [*given, *(tensors[name] for name in pieces.held)]
    for function, read, made in pieces.calls:
        results: Any = pieces.functions[function](*(values[place] for place in read))
        assert made == [*range(len(values), len(values) + len(results))]
        values += results
    return [values[place] for place in pieces.outputs]


@pytest.mark.parametrize(
    ("name", "deep", "functions"),
    [
        ("llama", {"num_hidden_layers": DEEP}, 3),
        ("gemma2", {"num_hidden_layers": DEEP}, 4),  # of two kinds, in turn
        ("gpt2", {"n_layer": DEEP}, 3),
        ("whisper", {"decoder_layers": DEEP}, 3),
        ("t5", {"num_decoder_layers": DEEP}, 3),  # the first layer has biases, and joins what stands before it
        ("llama", {}, 1),  # few layers are compiled faster as one function
    ],
)
def test_pieces(name: str, deep: dict[str, int], functions: int) -> None:
    """There is a function before the layers, one for each kind of layer and one after them: the model's results."""
    model = RaggedForward(LanguageModel(tiny(name, **deep))).model
    pieces, tensors = traced(model)
    assert len(pieces.functions) == functions
    assert len(pieces.calls) == (1 if functions == 1 else DEEP + 2 - (name == "t5"))
    found, expected = run(pieces, example(model)[0].tensors, tensors), model(*example(model)[0])
    for mine, own in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, own)


def test_layers_of_several_shapes() -> None:
    """A layer that differs from all others is no function of its own, unless it stands between some that recur."""
    model = RaggedForward(LanguageModel(tiny("llama", num_hidden_layers=DEEP))).model
    for place, activation in ((0, torch.nn.ReLU()), (6, torch.nn.Tanh())):
        model.model.model.layers[place].mlp.act_fn = activation
    pieces, tensors = traced(model)
    assert [function for function, *_ in pieces.calls] == [0, *[1] * 5, 2, *[1] * 5, 3]
    found, expected = run(pieces, example(model)[0].tensors, tensors), model(*example(model)[0])
    torch.testing.assert_close(found[0], expected[0])
