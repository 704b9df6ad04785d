"""What libraries do not promise and this package needs: a failure tells which release has changed what, and who minds.

One line for each internal, tried in the smallest way; what becomes of it in passes is tested where it is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from packaging.requirements import Requirement
from packaging.version import Version
from torch import Tensor, nn
from torch.fx.experimental import _config
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, WhisperTokenizer, utils
from transformers.cache_utils import CacheLayerMixin, DynamicCache, EncoderDecoderCache
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TASK_IDS, TO_LANGUAGE_CODE

from specdec.models.cache import recurrent_state
from specdec.models.cache.buffers import KvLayer
from specdec.models.hf import device_hooks, private_api
from specdec.models.hf.positions import Lookup, Scaling
from specdec.pipelines.speech.word_times import attention_maps
from tests.folders import saved_gguf
from tests.models.test_rotary import LONG
from tests.tiny import tiny

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
IDS = torch.tensor([[5, 9, 33, 7]])


def parameters(function: Any) -> set[str]:
    return {*inspect.signature(function).parameters}


def converted(name: str, wanted: str, kept: str) -> bool:
    quantizes = private_api.quantizes(tiny(name))
    return quantizes(wanted) and not quantizes(kept)


def int8_product() -> bool:
    generator = torch.Generator().manual_seed(0)
    rows, scale = torch.randn(3, 32, generator=generator).bfloat16(), torch.rand(16, generator=generator).bfloat16()
    weight = torch.randint(-127, 128, (16, 32), generator=generator, dtype=torch.int8)
    expected = rows.float() @ weight.float().T * scale.float()
    return torch.allclose(private_api.int8_linear(rows, weight, scale).float(), expected, rtol=0.02, atol=1)


def shortened_cache() -> bool:
    cache, first = DynamicCache(), torch.randn(1, 2, 5, 4)
    cache.update(first, first, 0)
    held, before = cache.layers[0].keys, cache.layers[0].keys.clone()
    cache.update(first, first, 0)
    recurrent_state.cut(cache, 3)
    is_cut = cache.get_seq_length() == 3 and torch.equal(cache.layers[0].keys, first[:, :, :3])
    return recurrent_state.is_plain(cache) and torch.equal(held, before) and is_cut


def projected_encoder() -> bool:
    pair, hidden = EncoderDecoderCache(DynamicCache(), DynamicCache()), torch.randn(1, 5, 32)
    given = {"encoder_outputs": BaseModelOutput(last_hidden_state=hidden), "decoder_input_ids": IDS}
    tiny("bart")(**given, past_key_values=pair, use_cache=True)
    return all(layer.keys.shape[2] == 5 for layer in pair.cross_attention_cache.layers) and pair.is_updated[1]


def cache_by_name(name: str) -> bool:
    model = tiny(name)
    keyword = recurrent_state.cache_name(frozenset(parameters(model.forward)))
    return keyword is not None and model(IDS, use_cache=True).get(keyword) is not None


def state_in_modules() -> bool:
    model, names = tiny("recurrent_gemma"), recurrent_state.MODULE_STATE["recurrent_gemma"]
    model(IDS, use_cache=True)
    return {name for _, name, value in recurrent_state.module_state(model, names) if value is not None} == {*names}


def weights_at_hand() -> bool:
    model = cpu_offload(tiny("llama"), execution_device=CPU)
    embeddings = model.get_input_embeddings()
    with device_hooks.at_hand(embeddings):
        is_here = not embeddings.weight.is_meta
    return is_here and embeddings.weight.is_meta and device_hooks.execution_devices(model) == {CPU}


def weights_on_disk(folder: Path) -> bool:
    model = tiny("llama")
    disk_offload(model, folder, execution_device=CPU)
    place = device_hooks.home(model, "lm_head.weight")
    file = Path(place.folder) / f"{place.key}.dat"
    is_known = place.entry["dtype"] == "float32" and file.stat().st_size == 4 * model.lm_head.weight.numel()
    hooked = "forward" in vars(model.lm_head) and not any(map(device_hooks.wrapped_later, model.modules()))
    device_hooks.detach(model)
    return is_known and hooked and not {"forward", "_hf_hook"} & vars(model.lm_head).keys()


def weights_in_a_checkpoint(folder: Path) -> bool:
    tiny("llama").save_pretrained(folder / "model")
    places = {"device_map": {"": "disk"}, "offload_folder": folder / "off"}
    model = AutoModelForCausalLM.from_pretrained(folder / "model", **places)
    entry = device_hooks.home(model, "model.layers.0.self_attn.q_proj.weight").entry
    return Path(entry["safetensors_file"]).parent == folder / "model"


class Scaled(nn.Module):
    def forward(self, x: Tensor, buffer: Tensor) -> Tensor:
        buffer[0].copy_(x.sum(0))
        return 2 * x


def sizes_of_exported_code() -> bool:
    sizes = ({0: torch.export.Dim.DYNAMIC},) * 2
    with _config.patch(backed_size_oblivious=True):
        given = torch.ones(5, 16), torch.zeros(3, 16)
        program = torch.export.export(Scaled(), given, dynamic_shapes=sizes, strict=False)
    return all(len(program.module()(torch.ones(rows, 16), torch.zeros(1, 16))) == rows for rows in (1, 5, 70))


def four_bit_layers() -> bool:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    logger = bitsandbytes.autograd._functions.logger.name
    layer = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float32)
    return layer.compute_dtype == torch.float32 and logger == "bitsandbytes.autograd._functions"


def attention_of_whisper() -> bool:
    model, hidden = tiny("whisper", attn_implementation="eager"), torch.randn(1, 20, 32)
    given = {"encoder_outputs": BaseModelOutput(last_hidden_state=hidden), "decoder_input_ids": IDS}
    own = model(**given, output_attentions=True).cross_attentions
    found = attention_maps(model, hidden, IDS, [(0, 1), (1, 3)])
    return torch.allclose(found, torch.stack([own[0][0, 1], own[1][0, 3]]), atol=1e-5)


def normalized_text() -> bool:
    return BasicTextNormalizer()("A, b") == "a b" and EnglishTextNormalizer({})("it's") == "it is"


CONTRACTS: list[tuple[str, str, str, Callable[[], bool]]] = [
    ("transformers", "`config._attn_implementation`", "models/hf/private_api",
     lambda: private_api.attention_of(tiny("llama", attn_implementation="eager").config) == "eager"),
    ("transformers", "`AutoModelFor…` and its `_model_mapping`", "models/hf/private_api",
     lambda: [private_api.class_of(kind, tiny("whisper").config)
              for kind in (AutoModelForSpeechSeq2Seq, AutoModelForSeq2SeqLM)] == [type(tiny("whisper")), None]),
    ("transformers", "`model._skip_keys_device_placement`", "models/hf/private_api",
     lambda: "past_key_values" in private_api.skipped_keys(tiny("llama"))),
    ("accelerate", "`dispatch_model`'s arguments", "models/loading/placement",
     lambda: {"offload_dir", "offload_index", "skip_keys"} <= parameters(dispatch_model)),
    ("transformers", "`get_keys_to_not_convert` or `should_convert_module`", "models/hf/private_api",
     lambda: converted("llama", "model.layers.0.self_attn.q_proj", "lm_head")),
    ("transformers", "`_keep_in_fp32_modules`", "models/hf/private_api",
     lambda: converted("t5", "decoder.block.0.layer.0.SelfAttention.q",
                       "decoder.block.0.layer.2.DenseReluDense.wo")),
    ("torch", "`torch._weight_int8pack_mm`", "models/hf/private_api", int8_product),
    ("transformers", "`WhisperTokenizer._decode_asr`", "models/hf/private_api",
     lambda: {"model_outputs", "return_timestamps", "return_language", "time_precision"}
     <= parameters(WhisperTokenizer._decode_asr)),
    ("transformers", "`DynamicLayer`", "models/cache/recurrent_state", shortened_cache),
    ("transformers", "`EncoderDecoderCache`", "models/cache/cross_attention", projected_encoder),
    *(("transformers", f"the keyword of the cache of {name!r}", "models/cache/recurrent_state",
       lambda name=name: cache_by_name(name))
      for name in ("llama", "mamba", "falcon_mamba", "rwkv", "jamba", "lfm2")),
    ("transformers", "state in RecurrentGemma's modules", "models/cache/recurrent_state", state_in_modules),
    ("transformers", "`CacheLayerMixin`", "models/cache/buffers",
     lambda: CacheLayerMixin.__abstractmethods__ <= vars(KvLayer).keys()),
    ("transformers", "`embed_positions`, its `weight` and `offset`", "models/hf/positions",
     lambda: len(Lookup(tiny("bart").get_decoder(), "embedding")._methods) == 1),
    ("transformers", "`compute_bias` or `has_relative_attention_bias`", "models/hf/positions",
     lambda: len(Lookup(tiny("t5").get_decoder(), "bias")._methods) > 0),
    ("transformers", "`build_alibi_tensor`", "models/hf/positions",
     lambda: hasattr(tiny("bloom").get_decoder(), "build_alibi_tensor")),
    ("transformers", "`rope_type` of rotary modules", "models/hf/positions",
     lambda: len(Scaling(tiny("llama", **LONG).get_decoder(), 32)._modules) == 1),
    ("accelerate", "`_hf_hook`, `execution_device`, `pre_forward` or `post_forward`", "models/hf/device_hooks",
     weights_at_hand),
    ("torch", "`torch.export.Dim.DYNAMIC` or `_config.backed_size_oblivious`", "models/backends/compiler",
     sizes_of_exported_code),
    ("bitsandbytes", "`Linear4bit.compute_dtype` or its logger", "models/loading/quantizers", four_bit_layers),
    *(("transformers", f"`{count}` of the config of {name!r}", "models/hf/derived",
       lambda name=name, count=count: vars(tiny(name).config)[count] == 2)
      for name, count in (("llama", "num_hidden_layers"), ("gpt2", "n_layer"), ("t5", "num_decoder_layers"))),
    ("transformers", "`encoder_attn`, its projections, `scaling`, `num_heads` or `head_dim`",
     "pipelines/speech/word_times", attention_of_whisper),
    ("transformers", "the convolutions of Whisper's encoder", "pipelines/speech/whisper",
     lambda: tiny("whisper").get_encoder().conv1.stride[0] * tiny("whisper").get_encoder().conv2.stride[0] == 2),
    ("transformers", "the tables of `tokenization_whisper`", "pipelines/speech/whisper",
     lambda: (LANGUAGES["en"], TO_LANGUAGE_CODE["english"], {*TASK_IDS}) == (
         "english", "en", {"transcribe", "translate"})),
    ("transformers", "the normalizers of `english_normalizer`", "pipelines/speech/whisper", normalized_text),
    ("transformers", "`WhisperTimeStampLogitsProcessor` or `detect_language`", "pipelines/speech/whisper",
     lambda: "begin_index" in parameters(WhisperTimeStampLogitsProcessor)
     and {"encoder_outputs", "generation_config"} <= parameters(type(tiny("whisper")).detect_language)),
]  # fmt: skip


def check(library: str, what: str, module: str, trial: Callable[[], bool]) -> None:
    """Fails with the library's release, `what` of it has changed, and the `module` that needs it."""
    try:
        with torch.no_grad():
            cause = "" if trial() else "it gives something else"
    except Exception as error:
        cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if cause:
        pytest.fail(f"{library} {version(library)} has changed {what}, needed by specdec/{module}.py ({cause})")


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract[1])
def test_internals(contract: tuple[str, str, str, Callable[[], bool]]) -> None:
    """They are where they were, and do what they did."""
    check(*contract)


def test_internals_of_offloading(tmp_path: Path) -> None:
    """The same of what writes to disk."""
    what = "`weights_map`, `OffloadedWeightsLoader`, `add_hook_to_module` or `remove_hook_from_module`"
    check("accelerate", what, "models/hf/device_hooks", lambda: weights_on_disk(tmp_path / "own"))
    what = "the offload index of `from_pretrained`"
    check("transformers", what, "models/loading/weight_files", lambda: weights_in_a_checkpoint(tmp_path))


def test_gguf_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All weights become floats, whatever kernels are installed, and no bar is shown where bars are switched off."""
    pytest.importorskip("gguf")
    saved_gguf(tmp_path / "model.gguf")

    def floats() -> bool:
        utils.logging.disable_progress_bar()
        try:
            with private_api.gguf_bars():
                options = {"gguf_file": "model.gguf", "quantization_config": private_api.whole_gguf()}
                model = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        finally:
            utils.logging.enable_progress_bar()
        return type(model.lm_head) is nn.Linear and {p.dtype for p in model.parameters()} == {torch.float32}

    check("transformers", "`GgufConfig`", "models/hf/private_api", floats)
    check(
        "transformers",
        "the bar over GGUF files",
        "models/hf/private_api",
        lambda: "it/s" not in capsys.readouterr().err,
    )
    found = private_api.cached(str(tmp_path), "model.gguf", None)
    check("transformers", "`cached_file`", "models/hf/private_api", lambda: Path(found) == tmp_path / "model.gguf")


def requirements() -> list[Requirement]:
    """What the package needs, of these libraries among others."""
    lines = (ROOT / "pyproject.toml").read_text().split("dependencies = [")[1].split("]")[0].splitlines()
    return [Requirement(line.strip().strip('",')) for line in lines if line.strip()]


def test_tested_releases_are_allowed() -> None:
    """Every dependency has an upper bound, and the releases of constraints.txt lie within all bounds."""
    pins = [line.split("#")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    tested = {pin.name: Version(next(iter(pin.specifier)).version) for pin in map(Requirement, pins)}
    for need in requirements():
        assert any(bound.operator == "<" for bound in need.specifier), f"{need.name} has no upper bound"
        assert tested[need.name] in need.specifier
