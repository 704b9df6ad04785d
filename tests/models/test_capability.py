"""The table of architectures is kept true, and unknown ones are found out by trying."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.models import LanguageModel, capability, load
from specdec.models.probe import probe
from specdec.options.load import Loading
from tests.tiny import DECODERS, ENCODER_DECODERS, tiny

pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_listed_architecture_is_tested() -> None:
    """A model type in the table has a tiny model, so that the exactness tests cover it."""
    tested = {model_type for model_type, _ in (DECODERS | ENCODER_DECODERS).values()}
    assert {*capability.KV, *capability.REPLAY, *capability.COUNTS_COLUMNS} <= tested


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "llama4_text", "whisper", "bart", "t5", "bloom"])
def test_probe_finds_what_the_table_says(name: str) -> None:
    """Trying leads to the same cache and positions as knowing."""
    language = LanguageModel(tiny(name))
    found = probe(language)
    assert found.cache_kind == "kv"
    assert found.positions == language.capability.positions
    assert found.masks == language.capability.masks


@pytest.mark.parametrize("name", ["gpt_neo", "mpt", "falcon_alibi", "mamba2"])
def test_probe_refuses_the_store_where_it_is_wrong(name: str) -> None:
    """Models that count cache columns or keep a recurrent state get the library's own cache."""
    assert probe(LanguageModel(tiny(name))).cache_kind == "replay"


def test_offloaded_models_are_not_probed() -> None:
    """A probe would read every weight from disk, several times."""
    model = tiny("xglm").to("meta")
    assert LanguageModel(model).capability.cache_kind == "replay"


@pytest.mark.parametrize("name", ["llama", "t5", "whisper"])
def test_load(name: str, tmp_path: Path) -> None:
    """A directory with safetensors becomes a model in eval mode, in its own or the wanted type."""
    tiny(name).save_pretrained(tmp_path)
    assert load(tmp_path).dtype == torch.float32
    language = load(str(tmp_path), Loading(dtype="bfloat16"))
    assert language.dtype == torch.bfloat16
    assert load(language) is language
