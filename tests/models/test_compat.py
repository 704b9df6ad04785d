"""What libraries do not promise and this package needs: a failure tells which release has changed what, and who minds.

One test for each internal, through the function that reaches it; what transformers documents is not tried here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from packaging.requirements import Requirement
from packaging.version import Version
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, WhisperTokenizer, utils
from transformers.cache_utils import CacheLayerMixin, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from specdec import kernels
from specdec.models.cache import recurrent_state
from specdec.models.cache.buffers import KvBuffers
from specdec.models.hf import device_hooks, private_api
from specdec.models.hf.positions import Lookup
from specdec.models.hf.rotary import Scaling
from specdec.pipelines.speech.word_times import attention_maps
from tests.folders import saved_gguf
from tests.models.test_rotary import DYNAMIC, LONG
from tests.tiny import tiny, tiny_inputs

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@contextmanager
def contract(library: str, what: str, module: str) -> Iterator[None]:
    """What happens inside needs `what` of a library; whatever goes wrong is told of that and of our `module`."""
    try:
        yield
    except Exception as error:
        cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        pytest.fail(f"{library} {version(library)} has changed {what}, needed by specdec/{module}.py ({cause})")


def ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 60, (1, length), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, name: str, tokens: Tensor) -> Tensor:
    """All logits `[rows, tokens, vocab]`, of an encoder-decoder for some input of its encoder."""
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}  # without a mask Bloom asks nobody
    if model.config.is_encoder_decoder:
        given = {**tiny_inputs(name), "decoder_input_ids": tokens}
    with torch.no_grad():
        return model(**given, use_cache=False).logits


def test_a_contract_tells_who_broke_it() -> None:
    """The message has the release, the attribute, our module and the cause."""
    with (
        pytest.raises(pytest.fail.Exception) as told,
        contract("torch", "`torch._gone`", "models/loading/integer_layers"),
    ):
        _ = torch._gone
    message = str(told.value)
    assert f"torch {version('torch')} has changed `torch._gone`" in message
    assert "specdec/models/loading/integer_layers.py" in message
    assert "AttributeError" in message


# compat.py


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_attention_implementation(kind: str) -> None:
    """A config knows the attention that its model was loaded with."""
    with contract("transformers", "`config._attn_implementation`", "models/hf/private_api"):
        assert private_api.attention_of(tiny("llama", attn_implementation=kind).config) == kind


def test_model_mapping() -> None:
    """An auto class knows for which configs it has models."""
    with contract("transformers", "`AutoModelFor…` and its `_model_mapping`", "models/hf/private_api"):
        assert private_api.loads(AutoModelForSeq2SeqLM, tiny("t5").config)
        assert private_api.loads(AutoModelForSpeechSeq2Seq, tiny("whisper").config)
        assert not private_api.loads(AutoModelForSeq2SeqLM, tiny("whisper").config)


def test_skipped_keys() -> None:
    """A cache stays where it is when accelerate moves the arguments of a module."""
    with contract("transformers", "`model._skip_keys_device_placement`", "models/hf/private_api"):
        assert "past_key_values" in private_api.skipped_keys(tiny("llama"))
    with contract("accelerate", "`dispatch_model`'s arguments", "models/loading/placement"):
        assert {"offload_dir", "offload_index", "skip_keys"} <= inspect.signature(dispatch_model).parameters.keys()


@pytest.mark.parametrize(
    ("name", "converted", "kept"),
    [
        ("llama", "model.layers.0.self_attn.q_proj", "lm_head"),
        ("t5", "decoder.block.0.layer.0.SelfAttention.q", "decoder.block.0.layer.2.DenseReluDense.wo"),
    ],
)
def test_what_quantization_converts(name: str, converted: str, kept: str) -> None:
    """Ordinary layers, but neither the head nor what a model keeps in float32."""
    what = "`get_keys_to_not_convert`, `should_convert_module` or `_keep_in_fp32_modules`"
    with contract("transformers", what, "models/hf/private_api"):
        wanted = private_api.quantizes(tiny(name))
        assert wanted(converted)
        assert not wanted(kept)


def test_int8_kernel() -> None:
    """The kernel multiplies by int8 as it is and scales every channel."""
    with contract("torch", "`torch._weight_int8pack_mm`", "models/hf/private_api"):
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(3, 32, generator=generator).bfloat16()
        weight = torch.randint(-127, 128, (16, 32), generator=generator, dtype=torch.int8)
        scale = torch.rand(16, generator=generator).bfloat16()
        expected = rows.float() @ weight.float().T * scale.float()
        assert torch.allclose(private_api.int8_linear(rows, weight, scale).float(), expected, rtol=0.02, atol=1)


def test_gguf_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All weights become floats, whatever kernels are installed, and no bar is shown where bars are switched off."""
    pytest.importorskip("gguf")
    saved_gguf(tmp_path / "model.gguf")
    with contract("transformers", "`GgufConfig`, or the bar over the tensors of GGUF files", "models/hf/private_api"):
        utils.logging.disable_progress_bar()
        try:
            with private_api.gguf_bars():
                model = AutoModelForCausalLM.from_pretrained(
                    tmp_path, gguf_file="model.gguf", quantization_config=private_api.whole_gguf()
                )
        finally:
            utils.logging.enable_progress_bar()
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert type(model.get_submodule("model.layers.0.mlp.up_proj")) is nn.Linear
        assert "it/s" not in capsys.readouterr().err
    with contract("transformers", "`utils.cached_file`", "models/hf/private_api"):
        assert Path(private_api.cached(str(tmp_path), "model.gguf", None)) == tmp_path / "model.gguf"


def test_merging_of_transcripts() -> None:
    """A Whisper tokenizer merges overlapping outputs."""
    with contract("transformers", "`WhisperTokenizer._decode_asr`", "models/hf/private_api"):
        names = inspect.signature(WhisperTokenizer._decode_asr).parameters.keys()
        assert {"model_outputs", "return_timestamps", "return_language", "time_precision"} <= names


# recurrent_state.py, buffers.py


def test_layers_of_a_cache() -> None:
    """Ordinary layers replace their keys and values by longer ones, and take shorter ones that are put there."""
    with contract("transformers", "`DynamicLayer`", "models/cache/recurrent_state"):
        cache = DynamicCache()
        first = torch.randn(1, 2, 5, 4)
        cache.update(first, first, 0)
        held, before = cache.layers[0].keys, cache.layers[0].keys.clone()
        cache.update(first, first, 0)
        assert recurrent_state.is_plain(cache)
        assert torch.equal(held, before)
        recurrent_state.cut(cache, 3)
        assert cache.get_seq_length() == 3
        assert torch.equal(cache.layers[0].keys, first[:, :, :3])


def test_pair_of_caches() -> None:
    """An encoder-decoder notes which layers have projected the encoder's output."""
    with contract("transformers", "`EncoderDecoderCache`", "models/backends/cross_attention"):
        model = tiny("bart")
        pair = EncoderDecoderCache(DynamicCache(), DynamicCache())
        hidden = BaseModelOutput(last_hidden_state=torch.randn(2, 5, 32))
        with torch.no_grad():
            model(encoder_outputs=hidden, decoder_input_ids=ids(3).expand(2, -1), past_key_values=pair, use_cache=True)
        held = [layer.keys for layer in pair.cross_attention_cache.layers]
        assert len(pair.is_updated) == len(held) == 2
        assert all(pair.is_updated.values())
        assert pair.self_attention_cache.get_seq_length() == 3


@pytest.mark.parametrize("name", ["llama", "mamba", "falcon_mamba", "rwkv", "jamba", "lfm2"])
def test_name_of_the_cache(name: str) -> None:
    """A model takes its cache by a name that we know, and returns it by the same."""
    with contract("transformers", f"the keyword of the cache of {name!r}", "models/cache/recurrent_state"):
        model = tiny(name)
        keyword = recurrent_state.cache_name(frozenset(inspect.signature(model.forward).parameters))
        assert keyword is not None
        with torch.no_grad():
            assert model(ids(4), use_cache=True).get(keyword) is not None


def test_state_in_modules() -> None:
    """RecurrentGemma keeps a row's state in its modules."""
    names = recurrent_state.MODULE_STATE["recurrent_gemma"]
    with contract("transformers", f"{' or '.join(names)} of RecurrentGemma's modules", "models/cache/recurrent_state"):
        model = tiny("recurrent_gemma")
        with torch.no_grad():
            model(ids(4), use_cache=True)
        assert {name for _, name, value in recurrent_state.module_state(model, names) if value is not None} == {*names}


def test_protocol_of_caches() -> None:
    """Our layers have all that the library's layers must have, and answer as it asks."""
    with contract("transformers", "`CacheLayerMixin`", "models/cache/buffers"):
        buffers = KvBuffers(2)
        missing = CacheLayerMixin.__abstractmethods__ - {
            name for kind in type(buffers.layers[0]).__mro__ if kind is not CacheLayerMixin for name in vars(kind)
        }
        assert not missing
        assert buffers.get_seq_length() == 0
        assert tuple(buffers.get_mask_sizes(3, 0)) == (3, 0)
        assert buffers.is_sliding == [False, False]
        assert not buffers.is_compileable


# positions.py, rotary.py

STYLES = {
    **dict.fromkeys(["bart", "mbart", "marian", "pegasus", "blenderbot", "m2m_100"], "embedding"),
    **dict.fromkeys(["t5", "mt5", "umt5"], "bias"),
    "bloom": "alibi",
}
METHODS = {
    "embedding": "`embed_positions`, its `weight` and `offset`, or `weights` and `padding_idx`",
    "bias": "`compute_bias`, `has_relative_attention_bias` or `_relative_position_bucket`",
    "alibi": "`build_alibi_tensor`",
}


@pytest.mark.parametrize("name", STYLES)
def test_positions_that_are_looked_up(name: str) -> None:
    """The positions that a model would take change nothing; others are seen."""
    style = STYLES[name]
    with contract("transformers", f"{METHODS[style]} of {name!r}", "models/hf/positions"):
        model, tokens, ordinary = tiny(name), ids(8), torch.arange(8)[None]
        lookup, expected = Lookup(model.get_decoder(), style), logits(model, name, tokens)
        with lookup.running(ordinary, ordinary):
            assert torch.allclose(logits(model, name, tokens), expected, atol=2e-4)
        with lookup.running(3 * ordinary, 3 * ordinary):
            assert (logits(model, name, tokens) - expected).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_modules(kind: str) -> None:
    """A module that has seen a long text can be asked for the angles of a short one."""
    with contract("transformers", "`rope_type`, `original_inv_freq` or `max_seq_len_cached`", "models/hf/rotary"):
        options = DYNAMIC if kind == "dynamic" else LONG
        boundary = 26 if kind == "dynamic" else 32
        expected, used = logits(tiny("llama", **options), "llama", ids(20)), tiny("llama", **options)
        logits(used, "llama", ids(60))
        scaling = Scaling(used.get_decoder(), boundary)
        with scaling.running(torch.arange(1, 21)[None]):
            assert torch.allclose(logits(used, "llama", ids(20)), expected, atol=2e-4)
        with scaling.running(torch.full((1, 20), 80)):
            assert (logits(used, "llama", ids(20)) - expected).abs().max() > 0.01


# offload.py


def test_hooks_bring_weights_in() -> None:
    """A hook says where its module computes, and has the weights there between `pre_forward` and `post_forward`."""
    with contract(
        "accelerate", "`_hf_hook`, `execution_device`, `pre_forward` or `post_forward`", "models/hf/device_hooks"
    ):
        model = tiny("llama")
        cpu_offload(model, execution_device=CPU)
        embeddings = model.get_input_embeddings()
        assert device_hooks.is_offloaded(model)
        assert device_hooks.execution_device(embeddings) == CPU
        assert device_hooks.execution_devices(model) == {CPU}
        with device_hooks.at_hand(embeddings):
            assert not embeddings.weight.is_meta
        assert embeddings.weight.is_meta


def test_weights_in_files_of_their_own(tmp_path: Path) -> None:
    """What accelerate writes to disk is `KEY.dat` in a folder, with type and shape in an index."""
    with contract("accelerate", "`weights_map` or `OffloadedWeightsLoader`", "models/hf/device_hooks"):
        model = tiny("llama")
        shape = list(model.lm_head.weight.shape)
        disk_offload(model, tmp_path, execution_device=CPU)
        place = device_hooks.home(model, "lm_head.weight")
        assert place is not None
        assert place.entry is not None
        assert place.entry["dtype"] == "float32"
        assert list(place.entry["shape"]) == shape
        assert (Path(place.folder) / f"{place.key}.dat").stat().st_size == 4 * shape[0] * shape[1]
        assert place.key in set(place.loader)


def test_weights_in_checkpoints(tmp_path: Path) -> None:
    """What transformers leaves in a checkpoint has its file in the index."""
    with contract("transformers", "the offload index of `from_pretrained`", "models/loading/weight_files"):
        tiny("llama").save_pretrained(tmp_path / "model")
        places = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "off"}
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **places)
        place = device_hooks.home(model, "model.layers.0.self_attn.q_proj.weight")
        assert place is not None
        assert place.entry is not None
        assert Path(place.entry["safetensors_file"]).parent == tmp_path / "model"


def test_hooks_come_off(tmp_path: Path) -> None:
    """A hooked forward is a partial, and `detach` leaves modules as they were."""
    with contract("accelerate", "`add_hook_to_module` or `remove_hook_from_module`", "models/hf/device_hooks"):
        model = tiny("llama")
        before = {name: {*vars(module)} for name, module in model.named_modules()}
        disk_offload(model, tmp_path, execution_device=CPU)
        assert "forward" in vars(model.lm_head)
        assert not any(map(device_hooks.wrapped_later, model.modules()))
        device_hooks.detach(model)
        left = {name: {*vars(module)} - before[name] for name, module in model.named_modules()}
        assert not {name for names in left.values() for name in names} & {"forward", "_hf_hook", "_old_forward"}


# quantize.py, compiled.py, flat.py, early_exit.py, reader.py


def test_layers_of_bitsandbytes() -> None:
    """4-bit layers say in which type they compute, and int8 layers cast their inputs aloud."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    with contract("bitsandbytes", "`Linear4bit.compute_dtype`", "models/loading/quantizers"):
        layer = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float32)
        assert layer.compute_dtype == torch.float32
    with contract("bitsandbytes", "the logger of `bitsandbytes.autograd._functions`", "models/loading/quantizers"):
        assert bitsandbytes.autograd._functions.logger.name == "bitsandbytes.autograd._functions"


class Scaled(nn.Module):
    """Writes to what it is given, and has a weight that the compiler does not write into its code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16), requires_grad=False)

    def forward(self, x: Tensor, buffer: Tensor) -> Tensor:
        buffer[0].copy_(x.sum(0))
        return x * self.weight


def test_exporter() -> None:
    """Sizes may change without a range, and one is a size like others."""
    with contract("torch", "`torch.export.Dim.DYNAMIC` or `_config.backed_size_oblivious`", "models/backends/compiled"):
        from torch.export import Dim
        from torch.fx.experimental import _config

        sizes = ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC})
        with torch.no_grad(), _config.patch(backed_size_oblivious=True):
            program = torch.export.export(
                Scaled(), (torch.ones(5, 16), torch.zeros(3, 16)), dynamic_shapes=sizes, strict=False
            )
        for rows in (1, 5, 70):
            assert torch.equal(program.module()(torch.ones(rows, 16), torch.zeros(1, 16)), torch.ones(rows, 16))
        assert isinstance(program.constants, dict)


@pytest.mark.slow
@pytest.mark.usefixtures("built")
def test_compiler() -> None:
    """Code without weights is packed into a file, reads a model's own where they are, and writes to its arguments."""
    with contract("torch", "`aoti_compile_and_package` or what loads its packages", "models/backends/compiled"):
        from torch.export import Dim

        from specdec.models.backends.compiled import _OPTIONS

        model, x, buffer = Scaled(), torch.ones(5, 16), torch.zeros(3, 16)
        sizes = ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC})
        program = torch.export.export(model, (x, buffer), dynamic_shapes=sizes, strict=False)
        passes = kernels.passes(torch._inductor.aoti_compile_and_package(program, inductor_configs=_OPTIONS))
        assert passes.names() == ["weight"]
        passes.load({"weight": model.weight})
        model.weight.mul_(3)
        assert torch.equal(passes.run([x, buffer])[0], torch.full((5, 16), 3.0))
        assert torch.equal(buffer[0], torch.full((16,), 5.0))


def test_attention_by_name() -> None:
    """Layers find attention of ours by its name, and are handed what is in the mask's place as it is."""
    with contract("transformers", "`AttentionInterface` or `AttentionMaskInterface`", "models/backends/ragged"):
        from transformers import AttentionInterface, AttentionMaskInterface

        seen: list[Tensor | None] = []

        def attention(module: Any, query: Tensor, *others: Any, **_: Any) -> tuple[Tensor, None]:
            seen.append(others[2])
            return query.transpose(1, 2), None

        AttentionInterface.register("specdec-contract", attention)
        AttentionMaskInterface.register("specdec-contract", lambda *_, **__: None)
        model, table = tiny("llama"), torch.zeros(1, 1, 4, 6, dtype=torch.int32)
        model.config._attn_implementation = "specdec-contract"
        model(input_ids=ids(4), attention_mask=table, use_cache=False)
        assert len(seen) == 2
        assert all(mask is table for mask in seen)


def test_modules_hold_their_parts() -> None:
    """Weights, buffers and children are in dictionaries of a module, where they can be put without a copy."""
    with contract("torch", "`nn.Module._parameters`, `_buffers` or `_modules`", "models/loading/weight_reader"):
        layer = nn.Sequential(nn.BatchNorm1d(2))
        assert "0" in layer._modules
        assert "weight" in layer[0]._parameters
        assert "running_mean" in layer[0]._buffers


@pytest.mark.parametrize(
    ("name", "count"), [("llama", "num_hidden_layers"), ("gpt2", "n_layer"), ("t5", "num_decoder_layers")]
)
def test_fields_of_configs(name: str, count: str) -> None:
    """Counts of layers are ordinary attributes of a config, under the name that is checked nowhere."""
    with contract("transformers", f"`{count}` of the config of {name!r}", "models/hf/layer_subset"):
        assert vars(tiny(name).config)[count] == 2


# whisper.py, alignment.py


def test_modules_of_whisper() -> None:
    """The attention of a decoder to the sound is what its projections make of it."""
    with contract(
        "transformers",
        "`encoder_attn`, its projections, `scaling`, `num_heads` or `head_dim`",
        "pipelines/speech/word_times",
    ):
        model, tokens, hidden = tiny("whisper", attn_implementation="eager"), ids(6), torch.randn(1, 20, 32)
        maps = attention_maps(model, hidden, tokens, [(0, 1), (1, 3)])
        given = {"encoder_outputs": BaseModelOutput(last_hidden_state=hidden), "decoder_input_ids": tokens}
        with torch.no_grad():
            own = model(**given, output_attentions=True).cross_attentions
        assert torch.allclose(maps, torch.stack([own[0][0, 1], own[1][0, 3]]), atol=1e-5)
    with contract("transformers", "the convolutions of Whisper's encoder", "pipelines/speech/whisper"):
        encoder = tiny("whisper").get_encoder()
        assert encoder.conv1.stride[0] * encoder.conv2.stride[0] == 2


def test_helpers_of_whisper() -> None:
    """Languages, normalizers, timestamp rules and the search for a language are where they were."""
    with contract("transformers", "the tables of `tokenization_whisper`", "pipelines/speech/whisper"):
        from transformers.models.whisper.tokenization_whisper import LANGUAGES, TASK_IDS, TO_LANGUAGE_CODE

        assert LANGUAGES["en"] == "english"
        assert TO_LANGUAGE_CODE["english"] == "en"
        assert {"transcribe", "translate"} == {*TASK_IDS}
    with contract("transformers", "the normalizers of `english_normalizer`", "pipelines/speech/whisper"):
        from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

        assert BasicTextNormalizer()("A, b") == "a b"
        assert EnglishTextNormalizer({})("it's") == "it is"
    with contract("transformers", "`WhisperTimeStampLogitsProcessor` or `detect_language`", "pipelines/speech/whisper"):
        from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

        assert "begin_index" in inspect.signature(WhisperTimeStampLogitsProcessor).parameters
        names = inspect.signature(type(tiny("whisper")).detect_language).parameters.keys()
        assert {"encoder_outputs", "generation_config"} <= names


# pyproject.toml


def requirements() -> list[Requirement]:
    """What the package needs, of these libraries among others."""
    lines = (ROOT / "pyproject.toml").read_text().split("dependencies = [")[1].split("]")[0].splitlines()
    return [Requirement(line.strip().strip('",')) for line in lines if line.strip()]


def test_tested_releases_are_allowed() -> None:
    """Every dependency has an upper bound, and the releases of constraints.txt lie within all bounds."""
    pinned = [
        Requirement(line.split("#")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    ]
    tested = {pin.name: Version(next(iter(pin.specifier)).version) for pin in pinned}
    for need in requirements():
        assert any(bound.operator == "<" for bound in need.specifier), f"{need.name} has no upper bound"
        assert tested[need.name] in need.specifier
