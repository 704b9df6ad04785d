"""specdec as the decoding method of `model.generate`: for scripts, pipelines and trainers that call it already."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from specdec.core.stats import Stats
from specdec.errors import OptionError, UnsupportedError
from specdec.generator.generator import SpecGenerator
from specdec.generator.inputs import FEATURES, NAMES
from specdec.integrations import generate_arguments
from specdec.options.fields import IDLE, REFUSED
from specdec.options.generate import Options

OPTIONS = frozenset(
    {"schedule", "num_assistant_tokens", "num_assistant_branches", "assistant_confidence_threshold"}
    | {"sampling", "seed", "num_samples", "ranking", "presence_penalty", "frequency_penalty"}
    | {"prefill_chunk_size", "stop_strings", "kv_budget"}
)
"""What `generate` has no argument for, or none that reaches a decoding method (`stop_strings`)."""

_NEGATIVE = ("negative_prompt_ids", "negative_prompt_attention_mask")
_WITHOUT_EFFECT = tuple({**REFUSED, **IDLE})
_PASSED = ("prefix_allowed_tokens_fn", *_NEGATIVE)


def custom_generate(
    draft: Any = None,
    *,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    backend: str = "auto",
    exactness: str = "auto",
    **options: Any,
) -> CustomGenerate:
    """A decoding method for `model.generate(custom_generate=…)`: it returns what `generate` returns, in fewer passes.

    `draft` and the rest are as in `SpecGenerator`; `options` are those that `generate` has no argument for (`OPTIONS`).
    Sampled text has the same distribution, and its seeds are specdec's own: `seed=`, or torch's generator. Everything
    that `generate` was given is honoured or refused with an error; with `return_dict_in_generate` the result has no
    `past_key_values`. Make one for each model and keep it: it holds the draft, and what was learned about it.

    Raises OptionError for options that belong to `generate`.
    """
    for name in options:
        if name not in OPTIONS:
            way_out = "pass it to `model.generate`" if name in Options.model_fields else f"one of {sorted(OPTIONS)}"
            raise OptionError(f"`{name}` is not an option of custom_generate: {way_out}")
    tokenizers = {"tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer}
    return CustomGenerate(draft, {**tokenizers, "backend": backend, "exactness": exactness, **options})


class CustomGenerate:
    """The decoding method that `custom_generate` makes. `stats` are those of the last call that ended."""

    def __init__(self, draft: Any, options: Mapping[str, Any]) -> None:
        self._draft, self._options = draft, dict(options)
        self._lock = threading.Lock()
        self._made: tuple[PreTrainedModel, SpecGenerator] | None = None
        self.stats: Stats | None = None

    def __repr__(self) -> str:
        draft = type(self._draft).__name__ if isinstance(self._draft, torch.nn.Module) else repr(self._draft)
        return f"custom_generate(draft={draft})"

    def __reduce__(self) -> Any:
        return CustomGenerate, (self._draft, self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> CustomGenerate:
        return self  # whoever copies settings means the same draft

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
        """Decodes what `generate` prepared: `input_ids` `[rows, length]`, each prompt once per beam or returned text.

        Raises OptionError or UnsupportedError for what `generate` was given and specdec cannot honour.
        """
        asked = generate_arguments.generate_arguments()
        _check(model, asked, generation_config)
        encoder = bool(model.config.is_encoder_decoder)
        beams = (generation_config.num_beams or 1) > 1
        copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        rows = {name: _first(value, copies) for name, value in model_kwargs.items()}
        read = _encoder_inputs if encoder else _decoder_inputs
        prompts = read(model, input_ids[::copies], rows, inputs_tensor)
        config = _settled(generation_config, input_ids.shape[1], stopping_criteria.max_length)
        criteria = generate_arguments.own_criteria(asked["stopping_criteria"], config)
        detectors, processors = generate_arguments.split_detectors(asked["logits_processor"])
        wants_logits, config.output_logits = config.output_logits, bool(config.output_logits or detectors)
        streamer = asked["streamer"]
        out = self._generator(model).generate(
            **prompts,
            **_unsupported(generation_config, model.generation_config),
            generation_config=config,
            logits_processor=processors,
            stopping_criteria=criteria,
            **{name: asked[name] for name in _PASSED},
            streamer=None if streamer is None else _AfterPrompt(streamer),
        )
        assert out.sequences is not None
        self.stats = out.stats
        if detectors and out.logits is not None:
            generate_arguments.detect_silence(detectors, input_ids, out.logits[0])
        if not wants_logits:
            out.logits = None
        out.sequences = out.sequences.to(input_ids.device)
        if not generation_config.return_dict_in_generate:
            return out.sequences
        return generate_arguments.as_transformers(out, encoder=encoder, beams=beams)

    def _generator(self, model: PreTrainedModel) -> SpecGenerator:
        """The generator of the model, as it is now; its texts may come with other weights the next time."""
        with self._lock:
            if self._made is None or self._made[0] is not model or self._made[1].target.look()[1]:
                self._made = None  # before another one is made in its place
                self._made = (model, _Following(model, self._draft, prefix_cache=False, **self._options))
            return self._made[1]


class _Following(SpecGenerator):
    """A generator whose calls bring complete settings: what the checkpoint says is among them, or was overruled."""

    def _inherited(self) -> dict[str, Any]:
        return {}


class _AfterPrompt:
    """A streamer that has the prompt already."""

    def __init__(self, streamer: Any) -> None:
        self._streamer, self._began = streamer, False

    def put(self, value: Tensor) -> None:
        """Passes on all but the first."""
        if self._began:
            self._streamer.put(value)
        self._began = True

    def end(self) -> None:
        """The end of the text."""
        self._streamer.end()


def _first(value: Any, copies: int) -> Any:
    """Every prompt's first row of a tensor that holds each prompt so many times."""
    if isinstance(value, Tensor) and value.dim():
        return value[::copies]
    if isinstance(value, ModelOutput):  # the encoder's: only its tensors were repeated
        return type(value)(**{name: _first(part, copies) for name, part in value.items()})
    return value


def _check(model: PreTrainedModel, asked: Mapping[str, Any], config: Any) -> None:
    """Raises for arguments of `generate` that have no place here."""
    generate_arguments.check_sharding(model, asked["synced_gpus"])
    if asked["assistant_model"] is not None:
        raise OptionError("`assistant_model` beside `custom_generate`: name it there, custom_generate(draft=…)")
    for name, value in asked["kwargs"].items():
        if value is not None and name not in (*NAMES, "labels") and not hasattr(config, name):
            raise UnsupportedError(f"`{name}` is not supported with specdec's `custom_generate`: leave it out")


def _decoder_inputs(model: PreTrainedModel, ids: Tensor, rows: Mapping[str, Any], _: Any) -> dict[str, Any]:
    """The prompts of a decoder-only model."""
    embeds = rows.get("inputs_embeds")
    read = ids if embeds is None else embeds
    mask = rows.get("attention_mask")
    return {
        "input_ids": ids if ids.shape[1] else None,
        "inputs_embeds": embeds,
        "attention_mask": torch.ones(read.shape[:2], dtype=torch.long) if mask is None else mask,
    }


def _encoder_inputs(
    model: PreTrainedModel, ids: Tensor, rows: Mapping[str, Any], inputs: Tensor | None
) -> dict[str, Any]:
    """What the encoder made of its inputs, these where drafts can read them too, and decoder prompts."""
    return {
        **_readable(model, inputs),
        "attention_mask": rows.get("attention_mask"),
        "encoder_outputs": rows.get("encoder_outputs"),
        "decoder_input_ids": ids,
        "decoder_attention_mask": rows.get("decoder_attention_mask"),
    }


def _readable(model: PreTrainedModel, inputs: Tensor | None) -> dict[str, Tensor]:
    """Ids or features under their name; transformers gives -100 for inputs that nobody knows."""
    if inputs is None or not inputs.is_floating_point():
        return {} if inputs is None or bool((inputs < 0).any()) else {"input_ids": inputs}
    name = model.get_encoder().main_input_name
    return {name: inputs} if name in FEATURES else {}


def _settled(config: Any, width: int, limit: int) -> Any:
    """`config` with its lengths as numbers of new tokens after prompts of `width`, which are complete.

    Where transformers' defaults stand for how much to draft, specdec's own do.
    """
    settled = copy.copy(config)
    settled.max_new_tokens, settled.max_length = limit - width, None
    settled.min_new_tokens = min(max((config.min_length or 0) - width, 0), settled.max_new_tokens)
    settled.min_length = None
    settled.decoder_start_token_id = []
    if (config.num_beams or 1) > 1:
        settled.pad_token_id = generate_arguments.beam_filler(config)
    if not config.return_dict_in_generate:
        for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
            setattr(settled, name, None)
    for name in _WITHOUT_EFFECT:
        setattr(settled, name, None)
    for name in generate_arguments.GUESSES:
        setattr(settled, name, generate_arguments.chosen_guesses(config).get(name))
    return settled


def _unsupported(config: Any, own: Any) -> dict[str, Any]:
    """Fields without an effect in specdec that the call has set, to other values than checkpoint and defaults."""
    defaults = generate_arguments.transformers_defaults()
    return {
        name: value
        for name in _WITHOUT_EFFECT
        if (value := getattr(config, name, None)) not in (None, defaults.get(name), getattr(own, name, None))
    }
