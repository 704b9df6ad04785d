"""Passes that need other positions or angles leave no trace on the user's modules, and no other thread sees them."""

import threading
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate import cpu_offload
from torch import nn

from specdec import LanguageModel, SpecGenerator
from specdec.models.hf.patching import override
from tests.matrix import endless
from tests.models.test_rotary import DYNAMIC, LONG
from tests.test_exact import prompt_for
from tests.tiny import tiny

pytestmark = pytest.mark.filterwarnings("ignore")
OPTIONS = endless(8)
LOOKED_UP: dict[str, dict[str, Any]] = {"t5": {}, "umt5": {}, "bart": {}, "m2m_100": {}, "bloom": {}}
MODELS = {**LOOKED_UP, "llama": DYNAMIC, "mistral": LONG, "llama4_text": DYNAMIC, "recurrent_gemma": {}}


def traces(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The attributes of every module itself, by its name."""
    return {name: dict(vars(module)) for name, module in model.named_modules()}


def differing(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    """Names of attributes that came, went or became another object; plain values count by equality."""
    assert before.keys() == after.keys()
    return [
        f"{module}.{name}"
        for module, own in before.items()
        for name in {*own, *after[module]}
        if own.get(name, nn) is not after[module].get(name, nn) and own.get(name, nn) != after[module].get(name, nn)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_no_trace_after_generate(name: str) -> None:
    """Every module has the attributes it had. (Forwards stayed replaced for good.)"""
    model = tiny(name, **MODELS[name])
    before = traces(model)
    generator = SpecGenerator(LanguageModel(model), "suffix")
    assert not differing(before, traces(model))
    generator.generate(**prompt_for(name, rows=2), **OPTIONS)
    assert not differing(before, traces(model))


@pytest.mark.parametrize("name", ["bart", "t5", "bloom"])
def test_no_trace_after_an_error(name: str) -> None:
    """A pass that breaks off leaves modules as they were, also those with accelerate's hooks."""
    model = tiny(name)
    cpu_offload(model, execution_device=torch.device("cpu"))
    generator = SpecGenerator(LanguageModel(model), "suffix")
    before = traces(model)
    hook = model.get_output_embeddings().register_forward_pre_hook(Mock(side_effect=KeyError("broken")))
    with pytest.raises(KeyError, match="broken"):
        generator.generate(**prompt_for(name, rows=2), **OPTIONS)
    hook.remove()
    assert not differing(before, traces(model))


class Doubling(nn.Module):
    """A module whose forward and whose other method are overridden in tests."""

    def forward(self, x: int) -> int:
        return 2 * x

    def half(self, x: int) -> int:
        return x // 2


def test_passes_overlap() -> None:
    """Each thread's pass has its own functions, also when one ends first; the module's own are called outside of both,
    while one still runs and afterwards.
    """
    module, inside, go_on = Doubling(), threading.Event(), threading.Event()
    seen: list[tuple[int, int]] = []

    def longer() -> None:
        seen.append((module(3), module.half(8)))
        with override({(module, "forward"): lambda x: x + 100}):
            inside.set()
            go_on.wait(30)
            seen.append((module(3), module.half(8)))

    thread = threading.Thread(target=longer)
    with override({(module, "forward"): lambda x: -x, (module, "half"): lambda x: 0}):
        thread.start()
        inside.wait(30)
        assert (module(3), module.half(8)) == (-3, 0)
    assert (module(3), module.half(8)) == (6, 4)
    go_on.set()
    thread.join()
    assert seen == [(6, 4), (103, 4)]
    assert not {"forward", "half"} & vars(module).keys()


def test_passes_nest() -> None:
    """The inner pass's functions count while it runs, then the outer one's again; a replaced forward comes back."""
    module = Doubling()
    module.forward = own = lambda x: 7  # type: ignore[method-assign, assignment]
    with override({(module, "forward"): lambda x: 1}):
        with override({(module, "forward"): lambda x: 2}):
            assert module(0) == 2
        assert module(0) == 1
    assert module(0) == 7
    assert vars(module)["forward"] is own


def test_replaced_meanwhile() -> None:
    module = Doubling()
    with override({(module, "forward"): lambda x: 1}):
        module.forward = later = lambda x: 9  # type: ignore[method-assign, assignment]
    assert vars(module)["forward"] is later
