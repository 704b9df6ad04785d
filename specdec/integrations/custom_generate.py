"""specdec as the decoding method of transformers' `model.generate`.

transformers gives a decoding method prepared inputs, but drops the streamer, the assistant and whether a cache came
from the caller (`GenerationMixin._extract_generation_mode_kwargs`). They are read from the running call's frame.
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, MaxLengthCriteria, PreTrainedModel
from transformers.generation import utils
from transformers.generation.logits_process import WhisperNoSpeechDetection
from transformers.utils import ModelOutput

from specdec.core.stats import Stats
from specdec.errors import OptionError, UnsupportedError
from specdec.generator.checks import check_gathered
from specdec.generator.generator import SpecGenerator
from specdec.generator.inputs.prompts import FEATURES, NAMES, beside_inputs
from specdec.models import PICTURES
from specdec.models.hf.sides import encoder_inputs
from specdec.options.fields import IDLE, REFUSED
from specdec.options.generate import Options, to_list

OPTIONS = frozenset(
    {"schedule", "num_assistant_tokens", "num_assistant_branches", "assistant_confidence_threshold"}
    | {"sampling", "seed", "num_samples", "ranking", "presence_penalty", "frequency_penalty"}
    | {"prefill_chunk_size", "stop_strings", "kv_budget"}
)
"""Options that `generate` lacks, or does not pass to a decoding method (`stop_strings`)."""

_WITHOUT_EFFECT = tuple({**REFUSED, **IDLE})
_GENERATE = inspect.unwrap(GenerationMixin.generate)
_GUESSES = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
_PASSED = ("prefix_allowed_tokens_fn", "negative_prompt_ids", "negative_prompt_attention_mask", "synced_gpus")


def custom_generate(
    draft: Any = None,
    *,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    backend: str = "auto",
    exactness: str = "auto",
    **options: Any,
) -> CustomGenerate:
    """A decoding method for `model.generate(custom_generate=…)`, with the same results in fewer passes.

    Arguments are as in `SpecGenerator`; `options` are `OPTIONS`, which `generate` lacks. Samples have the same
    distribution, with specdec's own seeds: `seed=`, or torch's generator. Arguments of `generate` that cannot be
    honoured raise; with `return_dict_in_generate` the result has no `past_key_values`. Keep one object per model: it
    holds the draft and its statistics.

    Raises OptionError for options that belong to `generate`.
    """
    for name in options:
        if name not in OPTIONS:
            way_out = "pass it to `model.generate`" if name in Options.model_fields else f"one of {sorted(OPTIONS)}"
            raise OptionError(f"`{name}` is not an option of custom_generate: {way_out}")
    tokenizers = {"tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer}
    return CustomGenerate(draft, {**tokenizers, "backend": backend, "exactness": exactness, **options})


class CustomGenerate:
    """A decoding method; `stats`: the statistics of the last finished call."""

    def __init__(self, draft: Any, options: Mapping[str, Any]) -> None:
        self._draft, self._options = draft, dict(options)
        self._lock = threading.Lock()
        self._pair: tuple[PreTrainedModel, SpecGenerator] | None = None
        self.stats: Stats | None = None

    def __repr__(self) -> str:
        draft = type(self._draft).__name__ if isinstance(self._draft, torch.nn.Module) else repr(self._draft)
        return f"custom_generate(draft={draft})"

    def __reduce__(self) -> Any:
        return CustomGenerate, (self._draft, self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> CustomGenerate:
        return self  # transformers copies settings; the draft stays the same

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> ModelOutput | Tensor:
        """Decodes the inputs that `generate` prepared: `input_ids` `[rows, length]`, a row per beam or returned text.

        Raises OptionError or UnsupportedError for arguments of `generate` that cannot be honoured.
        """
        arguments = _arguments()
        check_gathered(model, arguments["synced_gpus"])
        if arguments["assistant_model"] is not None:
            raise OptionError("`assistant_model` beside `custom_generate`: name it there, custom_generate(draft=…)")
        generator = self._generator(model)
        _check_inputs(arguments["kwargs"], generation_config, generator)
        encoder = bool(model.config.is_encoder_decoder)
        beams = generation_config.num_beams or 1
        copies = max(beams, generation_config.num_return_sequences or 1)
        rows = {name: _first_rows(value, copies) for name, value in model_kwargs.items()}
        ids = input_ids[::copies]
        prompts = _encoder_inputs(model, ids, rows, inputs_tensor) if encoder else _decoder_inputs(ids, rows)
        if not encoder:  # unchanged, as transformers repeats pictures for beams in several ways
            prompts |= {name: value for name, value in arguments["kwargs"].items() if name in PICTURES}
        config = _call_config(generation_config, input_ids.shape[1], stopping_criteria.max_length)
        criteria, processors, streamer = (arguments[n] for n in ("stopping_criteria", "logits_processor", "streamer"))
        detectors = [entry for entry in processors if isinstance(entry, WhisperNoSpeechDetection)]
        wants_logits, config.output_logits = config.output_logits, bool(config.output_logits or detectors)
        out = generator.generate(
            **prompts,
            **_idle_fields(generation_config, model.generation_config),
            generation_config=config,
            logits_processor=[entry for entry in processors if entry not in detectors],
            stopping_criteria=[entry for entry in criteria if type(entry) is not MaxLengthCriteria],
            **{name: arguments[name] for name in _PASSED},
            streamer=None if streamer is None else _AfterPrompt(streamer),
        )
        assert out.sequences is not None
        self.stats = out.stats
        if out.logits is not None:
            for detector in detectors:  # they look for silence in whole batches
                first = out.logits[0]
                detector(input_ids, first.log_softmax(-1) if detector.is_scores_logprobs else first)
        out.logits = out.logits if wants_logits else None
        out.sequences = out.sequences.to(input_ids.device)
        if not generation_config.return_dict_in_generate:
            return out.sequences
        side, beam_word = "EncoderDecoder" if encoder else "DecoderOnly", "Beam" if beams > 1 else ""
        kind = getattr(utils, f"Generate{beam_word}{side}Output")
        return kind(**{name: value for name, value in out.items() if name in kind.__dataclass_fields__})

    def _generator(self, model: PreTrainedModel) -> SpecGenerator:
        """The model's generator; a new one if the model or its weights changed."""
        with self._lock:
            if self._pair is None or self._pair[0] is not model or self._pair[1].target.changes():
                self._pair = None  # frees it before the next one is made
                self._pair = (model, _BareGenerator(model, self._draft, **self._options))
            return self._pair[1]


class _BareGenerator(SpecGenerator):
    """A generator that inherits nothing from the checkpoint: transformers has merged its settings into each call."""

    _inherits = False


class _AfterPrompt:
    """Drops the prompt, which `generate` has passed to the streamer already."""

    def __init__(self, streamer: Any) -> None:
        self._streamer, self._has_begun = streamer, False

    def put(self, value: Tensor) -> None:
        """Passes on all but the first value."""
        if self._has_begun:
            self._streamer.put(value)
        self._has_begun = True

    def end(self) -> None:
        """Ends the stream."""
        self._streamer.end()


def _first_rows(value: Any, copies: int) -> Any:
    """Every `copies`-th row: the first of each prompt."""
    if isinstance(value, Tensor) and value.dim():
        return value[::copies]
    if isinstance(value, ModelOutput):  # the encoder's, whose tensors are repeated
        return type(value)(**{name: _first_rows(part, copies) for name, part in value.items()})
    return value


def _arguments() -> dict[str, Any]:
    """The arguments of the innermost running `GenerationMixin.generate`, free ones in `kwargs`.

    Raises OptionError if none runs.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _GENERATE.__code__:
        frame = frame.f_back
    if frame is None:
        raise OptionError("`custom_generate` decodes for transformers: pass it to `model.generate(custom_generate=…)`")
    return {name: frame.f_locals[name] for name in inspect.signature(_GENERATE).parameters}


def _check_inputs(arguments: Mapping[str, Any], config: Any, generator: SpecGenerator) -> None:
    """Raises UnsupportedError for free arguments of `generate` that neither the passes nor the encoder read."""
    names = {*NAMES, "labels", *beside_inputs(generator.target)}
    for name, value in arguments.items():
        if value is not None and name not in names and not hasattr(config, name):
            raise UnsupportedError(f"`{name}` is not supported with specdec's `custom_generate`: leave it out")


def _decoder_inputs(ids: Tensor, rows: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a decoder-only model."""
    embeds, mask = rows.get("inputs_embeds"), rows.get("attention_mask")
    inputs = ids if embeds is None else embeds
    return {
        "input_ids": ids if ids.shape[1] else None,
        "inputs_embeds": embeds,
        "attention_mask": torch.ones(inputs.shape[:2], dtype=torch.long) if mask is None else mask,
    }


def _encoder_inputs(
    model: PreTrainedModel, ids: Tensor, rows: Mapping[str, Any], inputs: Tensor | None
) -> dict[str, Any]:
    """Encoder outputs, decoder prompts, and encoder inputs for drafts, unless transformers' -100 stands for them."""
    sources: dict[str, Tensor] = {}
    if inputs is not None and inputs.is_floating_point():
        sources = {name: inputs for name in FEATURES if name in encoder_inputs(model)}
    elif inputs is not None and not bool((inputs < 0).any()):
        sources = {"input_ids": inputs}
    names = ("attention_mask", "encoder_outputs", "decoder_attention_mask")
    return {**sources, **{name: rows.get(name) for name in names}, "decoder_input_ids": ids}


def _call_config(config: Any, width: int, limit: int) -> Any:
    """A copy of `config` with lengths as new tokens after prompts of `width` tokens.

    transformers' defaults for draft lengths become specdec's.
    """
    result = copy.copy(config)
    result.max_new_tokens, result.max_length = limit - width, None
    result.min_new_tokens = min(max((config.min_length or 0) - width, 0), result.max_new_tokens)
    result.min_length = None
    result.decoder_start_token_id = []
    if (config.num_beams or 1) > 1 and config.pad_token_id == 0 and (ends := to_list(config.eos_token_id)):
        result.pad_token_id = ends[0]  # as transformers fills beams
    if not config.return_dict_in_generate:
        for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
            setattr(result, name, None)
    for name in _WITHOUT_EFFECT:
        setattr(result, name, None)
    defaults = GenerationConfig()._get_default_generation_params()
    for name in _GUESSES:
        value = getattr(config, name, None)
        setattr(result, name, None if value == defaults.get(name) else value)
    return result


def _idle_fields(config: Any, checkpoint: Any) -> dict[str, Any]:
    """Fields without effect in specdec whose values the call itself has set."""
    defaults = GenerationConfig()._get_default_generation_params()
    return {
        name: value
        for name in _WITHOUT_EFFECT
        if (value := getattr(config, name, None)) not in (None, defaults.get(name), getattr(checkpoint, name, None))
    }
