"""Every generative class of transformers, tiny and random, and what becomes of it here beside `model.generate`."""

from __future__ import annotations

import importlib
import pkgutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from specdec import SpecGenerator
from specdec.errors import SpecdecError
from specdec.models.hf.tiny_models import VOCABULARY
from tests.matrix import endless
from tests.oracle import oracle
from tests.shrink import tiny_of

MAPPINGS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
LENGTH = 8  # new tokens
BACKENDS = ("eager", "packed")
CALLS: dict[str, dict[str, Any]] = {"greedy": {}, "beams": {"num_beams": 3}}

# classes with another kind of output than text -> what it is
OTHER_KINDS: dict[str, str] = {
    **dict.fromkeys(
        [
            *("BarkCausalModel", "BarkCoarseModel", "BarkModel", "BarkSemanticModel", "ClvpForCausalLM"),
            *("ClvpModelForConditionalGeneration", "CsmDepthDecoderForCausalLM", "CsmForConditionalGeneration"),
            *("DiaForConditionalGeneration", "GradiumPhononTTSForConditionalGeneration", "MoshiDepthDecoder"),
            *("HiggsAudioV2ForConditionalGeneration", "MoshiForConditionalGeneration", "MusicgenForCausalLM"),
            *("MusicgenForConditionalGeneration", "MusicgenMelodyForCausalLM", "Pop2PianoForConditionalGeneration"),
            *("MusicgenMelodyForConditionalGeneration", "PocketTTSForConditionalGeneration"),
            *("Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniTalkerForConditionalGeneration"),
            *("Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeTalkerForConditionalGeneration"),
            *("Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration", "VibeVoiceForConditionalGeneration"),
            *("SeamlessM4TForSpeechToSpeech", "SeamlessM4TForTextToSpeech", "SeamlessM4TModel"),
            *("SeamlessM4Tv2ForSpeechToSpeech", "SeamlessM4Tv2ForTextToSpeech", "SeamlessM4Tv2Model"),
            *("SeamlessM4TTextToUnitForConditionalGeneration", "SeamlessM4Tv2TextToUnitForConditionalGeneration"),
        ],
        "its output is sound",
    ),
    **dict.fromkeys(
        [
            *("GraniteSpeech5ForCTC", "LasrForCTC", "ParakeetForCTC", "ParakeetForRNNT", "ParakeetForTDT"),
            *("Nemotron3_5AsrForRNNT", "NemotronAsrStreamingForRNNT"),
        ],
        "its text follows the frames of a recording, and is no continuation",
    ),
    "DiffusionGemmaForBlockDiffusion": "it writes blocks by diffusion",
    "PI0ForConditionalGeneration": "its output is movements",
}


def classes() -> dict[str, Any]:
    """The generative classes, by name: those of the mappings for text, and all others that can generate."""
    for module in pkgutil.walk_packages(transformers.models.__path__, "transformers.models."):
        if module.name.rpartition(".")[2].startswith("modeling_"):
            try:
                importlib.import_module(module.name)
            except ImportError:  # a library that is not installed
                continue
    found = {kind.__name__: kind for kind in _below(GenerationMixin) if issubclass(kind, PreTrainedModel)}
    found |= {name: getattr(transformers, name) for name in mapped() - found.keys()}
    return {name: kind for name, kind in sorted(found.items()) if kind.__module__.startswith("transformers.")}


def mapped() -> set[str]:
    """The names of the classes that transformers' mappings for text have."""
    names = set[str]()
    for mapping in MAPPINGS:
        for kinds in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values():
            names.update([kinds] if isinstance(kinds, str) else kinds)
    return names


def _below(kind: type) -> Iterator[type]:
    for child in kind.__subclasses__():
        yield child
        yield from _below(child)


def prompts(model: PreTrainedModel) -> Iterator[list[dict[str, Tensor]]]:
    """Inputs of two rows that a model of this kind may read, of different lengths; the likely ones first."""
    noise = torch.Generator().manual_seed(5)
    sizes = {
        name: _number(model.config, name)
        for name in ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "image_size")
    }
    ids = [torch.randint(3, 30, (1, length), generator=noise) for length in (5, 14)]
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
    shapes = {
        "pixel_values": [(3, sizes["image_size"] or 32, sizes["image_size"] or 32)],
        "input_values": [(400,), (4000,), (16000,)],
        "flattened_patches": [(6, 2 + (_number(model.config, "patch_embed_hidden_size") or 0))],
        "input_features": [
            (width, frames) if turned else (frames, width)
            for width in [size for name, size in sizes.items() if size and name != "image_size"]
            for frames in (2 * (_number(model.config, "max_source_positions") or 20), 40)
            for turned in (True, False)
        ],
    }
    main = "input_values" if model.main_input_name == "inputs" else model.main_input_name
    if main == "input_ids":
        yield rows
    for shape in shapes.get(main, shapes["pixel_values"]):
        name = main if main in shapes else "pixel_values"
        alone = [{name: torch.rand(1, *shape, generator=noise)} for _ in range(2)]
        if main in shapes:
            yield alone
        yield [{**row, **one} for row, one in zip(rows, alone, strict=True)]


def _number(config: Any, name: str) -> int | None:
    """A number of a config or of one of its parts."""
    parts = [config, *(part for part in vars(config).values() if isinstance(part, PreTrainedConfig))]
    return next((value for part in parts if isinstance(value := getattr(part, name, None), int)), None)


class Verdict(NamedTuple):
    """What becomes of a class, and the words for it.

    "equal", or "as its forward" where transformers contradicts itself, with the kind of cache; "refused", with the
    first words of the refusal; "not built" or "not compared" here, and why; and mistakes: "differs" and "fails".
    """

    kind: str
    words: str


def verdicts(kind: Any) -> dict[str, Verdict]:
    """The verdict of each backend."""
    other = OTHER_KINDS.get(kind.__name__, "")
    try:
        model = tiny_of(kind)
    except Exception as error:  # whatever a class raises
        return dict.fromkeys(BACKENDS, Verdict("not built", other or said(error)))
    every, expected, why = list(prompts(model)), dict[str, list[list[int]]](), other
    for rows in [] if other else every:
        try:
            expected["greedy"] = [_reference(model, row) for row in rows]
            break
        except Exception as error:
            why = why or f"`generate` fails: {said(error)}"
    if not expected:
        return {backend: _not_compared(model, every[0], backend, why) for backend in BACKENDS}
    with suppress(Exception):  # some classes have no beams
        expected["beams"] = [_reference(model, row, **CALLS["beams"]) for row in rows]
    return {backend: _verdict(model, rows, expected, backend) for backend in BACKENDS}


def _not_compared(model: Any, rows: list[dict[str, Tensor]], backend: str, why: str) -> Verdict:
    """The verdict on a class with nothing to compare with: its refusal, if there is one."""
    try:
        SpecGenerator(model, backend=backend).generate(**_batch(rows), **endless(LENGTH))
    except SpecdecError as error:
        return _refused(error)
    except Exception as error:
        return _failed(error)
    return Verdict("not compared", why)


def _refused(error: SpecdecError) -> Verdict:
    return Verdict("refused", str(error).partition(": ")[0])


def _failed(error: Exception) -> Verdict:
    return Verdict("fails", f"{said(error)} ({_place(error)})")


@torch.no_grad()
def _reference(model: Any, row: dict[str, Tensor], **options: Any) -> list[int]:
    """The new tokens of `model.generate`; Whisper's method cuts recordings, and here tokens are compared."""
    generate = GenerationMixin.generate if model.config.model_type == "whisper" else type(model).generate
    found = generate(model, **row, max_new_tokens=LENGTH, do_sample=False, **options)
    text: list[int] = found[0, -LENGTH:].tolist()
    return text


@torch.no_grad()
def _forward(model: Any, row: dict[str, Tensor]) -> list[int]:
    """The new greedy tokens by the model's forward, without a cache and without what `generate` adds."""
    given: dict[str, Any] = {"use_cache": False, **row}
    ids = given.pop("input_ids", None)
    given.pop("attention_mask", None)
    name = "input_ids"
    if model.config.is_encoder_decoder:
        given |= {} if ids is None else {"input_ids": ids}
        name, ids = "decoder_input_ids", torch.tensor([[model.generation_config.decoder_start_token_id]])
    for _ in range(LENGTH):
        last = model(**given, **{name: ids}).logits[:, -1:]
        ids = torch.cat([ids, last.argmax(-1)], 1)
    text: list[int] = ids[0, -LENGTH:].tolist()
    return text


def _contradicts(model: Any, rows: list[dict[str, Tensor]], call: str, texts: list[list[int]]) -> bool:
    """Whether these are the model's texts without a cache, or by its forward alone."""
    ways: list[Callable[[dict[str, Tensor]], list[int]]] = [
        partial(_reference, model, use_cache=False, **CALLS[call]),
        *([partial(_forward, model)] if call == "greedy" else []),
    ]
    for way in ways:
        with suppress(Exception):
            if [way(row) for row in rows] == texts:
                return True
    return False


def _verdict(model: Any, rows: list[dict[str, Tensor]], expected: dict[str, list[list[int]]], backend: str) -> Verdict:
    """The verdict of one backend: plain, with a draft that is always right, and one that is always wrong."""
    kind, starts = "equal", _starts(model, rows)
    try:
        for call, texts in expected.items():
            for draft in (None, "perfect", "wrong"):
                answers = [start + text for start, text in zip(starts, texts, strict=True)]
                guess = draft and oracle(draft, answers, VOCABULARY)
                generator = SpecGenerator(model, guess, backend=backend, schedule="constant", num_assistant_tokens=3)
                out = generator.generate(**_batch(rows), **endless(LENGTH, **CALLS[call]))
                found = [row[-LENGTH:] for row in out.sequences.tolist()]
                if found != texts and draft is None and (kind != "equal" or _contradicts(model, rows, call, found)):
                    kind, texts = "as its forward", found
                if found != texts:
                    return Verdict("differs", f"{call}, {draft or 'no'} draft")
    except SpecdecError as error:
        return _refused(error)
    except Exception as error:
        return _failed(error)
    return Verdict(kind, generator.target.capability.cache_kind)


def _starts(model: Any, rows: list[dict[str, Tensor]]) -> list[list[int]]:
    """The ids that each row's text begins with."""
    if model.config.is_encoder_decoder:
        return [[1]] * len(rows)
    return [row["input_ids"][0].tolist() if "input_ids" in row else [1] for row in rows]


def _batch(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    """The inputs of one call: rows of ids are padded on the left, those of an encoder on the right."""
    ids = {"prompt": [row["input_ids"][0].tolist() for row in rows]} if "input_ids" in rows[0] else {}
    others = rows[0].keys() - {"input_ids", "attention_mask"}
    return {**ids, **{name: torch.cat([row[name] for row in rows]) for name in others}}


def said(error: Exception) -> str:
    """An error in a line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:90]


def _place(error: Exception) -> str:
    """Where the package called what failed."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "/specdec/" in frame.filename]
    return f"{ours[-1].filename.rpartition('/specdec/')[2]}:{ours[-1].lineno}" if ours else "not here"
