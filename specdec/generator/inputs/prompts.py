"""Prompts of every shape as checked rows of token ids without padding, the inputs of an encoder, and predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from specdec.core.work import Pictures
from specdec.errors import OptionError, UnsupportedError
from specdec.generator.extras import Extras
from specdec.generator.inputs.ids import MASKS, Ids, read_ids, read_mask
from specdec.generator.inputs.pictures import PIXELS, chat_ids, has_pictures, with_pictures
from specdec.generator.tokenizers import ids_of
from specdec.models import PICTURES, EncoderOutput, Encoding, LanguageModel, read_pictures
from specdec.models.hf.sides import adds_zero_types, source_width
from specdec.models.pictures import reads_two_ways
from specdec.options.generate import Options
from specdec.options.resolve import warn_of_idle

_NEGATIVES = ("negative_prompt_ids", MASKS["negative_prompt_ids"])
# Inputs of encoders other than ids -> dimensions.
FEATURES = {"input_features": 3, "input_values": 2, "pixel_values": 4, "flattened_patches": 3}
NAMES = frozenset(
    {"inputs", "input_ids", "inputs_embeds", "encoder_outputs", *FEATURES, *PICTURES, *MASKS, *MASKS.values()}
) - {"prompt"}
_OF_PASSES = {  # arguments of forwards that no caller of `generate` passes
    *("labels", "use_cache", "past_key_values", "cache", "cache_position", "return_dict", "logits_to_keep"),
    *("args", "kwargs", "position_ids", "head_mask", "cross_attn_head_mask", "output_router_logits"),
    "mm_encoder_outputs",
}
Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Mapping[str, Any] | Tensor | None


@dataclass(frozen=True)
class RowPrompt:
    """The prompt of one row.

    `tokens`: decoder ids without padding; `padding`: how many columns of the padded prompt they leave free.
    `encoder_ids`: ids that the encoder reads. `embeds` `[length, width]` are read in place of the tokens, which are as
    many, or none where the call has only embeddings. `pictures` are read with the tokens. `negative`: the prompt that
    guidance steers away from. `prediction`: ids that the output may resemble.
    """

    tokens: list[int]
    padding: int = 0
    encoder_ids: list[int] | None = None
    embeds: Tensor | None = None
    pictures: Pictures | None = None
    negative: list[int] | None = None
    prediction: list[int] | None = None


@dataclass(frozen=True)
class Prompts:
    """The prompts of a call.

    `padded` `[rows, width]`: ids with padding, as the result returns them. `is_text`: they were texts or conversations,
    which need a length limit. `encoder`: the encoder's arguments; `encoding`: the encoder's output, where the caller
    passed it. Where the call has only embeddings, `padded` has no columns and `num_embeds_only` is their number:
    lengths count them, but processors, criteria and drafts see the new ids alone, as in transformers. (A draft that
    should see the prompt needs its `input_ids` too.)
    """

    rows: list[RowPrompt]
    padded: Tensor
    is_text: bool = False
    encoder: dict[str, Tensor] | None = None
    num_embeds_only: int = 0
    encoding: Encoding | None = None

    def repeat(self, copies: int) -> Prompts:
        """Each row `copies` times, side by side; the encoder's inputs are not repeated."""
        rows = [row for row in self.rows for _ in range(copies)]
        return replace(self, rows=rows, padded=self.padded.repeat_interleave(copies, 0))


def read_prompts(
    prompt: Prompt,
    messages: Sequence[Any] | None,
    inputs: Mapping[str, Any],
    options: Options,
    target: LanguageModel,
    extras: Extras,
    processor: Any = None,
) -> Prompts:
    """The prompts of a call with their predictions; `inputs` are the model inputs among its keyword arguments.

    `prompt` may be the output of a tokenizer or processor, a mapping with `input_ids`. The `processor` puts pictures
    into `messages`. Raises OptionError for prompts that are empty, of a wrong type or shape, outside the vocabulary, or
    passed twice, and for inputs that the target does not read.
    """
    tokenizer = extras.tokenizer
    first = prompt
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if isinstance(first, Mapping) and "role" in first:
        raise OptionError("the prompt is a conversation: pass it as `messages=`, which go through the chat template")
    if isinstance(prompt, Mapping):
        inputs, prompt = _unpacked(prompt, inputs, target), None
    is_guided = options.guidance_scale not in (None, 1)
    if not is_guided and (idle := [name for name in _NEGATIVES if name in inputs]):
        warn_of_idle(f"`{idle[0]}` changes nothing without `guidance_scale`: pass both")
        inputs = {name: value for name, value in inputs.items() if name not in idle}
    _check_sources(prompt, messages, inputs, target)
    value = prompt if prompt is not None else inputs.get("inputs", inputs.get("input_ids"))
    if messages is not None:
        parts = read_messages(messages, tokenizer, processor, fetch=extras.fetch_pictures)
        value, inputs = parts.pop("input_ids"), {**inputs, **parts}
    how = inputs, options, target, tokenizer
    if target.is_encoder_decoder:
        prompts = _encoder_decoder(value, *how)
    elif "inputs_embeds" in inputs:
        prompts = _embedded(value, *how)
    else:
        ids = _read(value, *how)
        prompts = _prompts(ids, options)
        if target.reads_media:
            whole = bool(options.output_hidden_states or options.output_attentions or options.penalty_alpha)
            pictures = read_pictures(target, inputs, ids.unpadded, ids.mask, whole=whole)
            rows = [replace(row, pictures=part) for row, part in zip(prompts.rows, pictures, strict=True)]
            prompts = replace(prompts, rows=rows)
    prompts = replace(prompts, is_text=prompts.is_text or messages is not None)
    prompts = _with_negatives(prompts, inputs, target) if is_guided else prompts
    return prompts if extras.prediction is None else _with_predictions(prompts, extras.prediction, target, tokenizer)


def main_input(target: LanguageModel) -> str:
    """The argument that an encoder reads: ids, or features."""
    name = str(target.model.main_input_name)
    if name == "inputs":  # a composite's word; its encoder has a name for them
        name = str(getattr(target.model.get_encoder(), "main_input_name", name))
    return name


def beside_inputs(target: LanguageModel) -> frozenset[str]:
    """The arguments of a target's encoder, or of the model that makes its input, that are not in `NAMES`."""
    if not target.is_encoder_decoder:
        return frozenset()
    names = {name for name in target.input_names if not name.startswith("decoder_")} | target.source_names
    return frozenset(names - NAMES - _OF_PASSES - Options.model_fields.keys())


def _unpacked(prompt: Mapping[str, Any], inputs: Mapping[str, Any], target: LanguageModel) -> dict[str, Any]:
    """The inputs with the entries of a mapping; raises OptionError for unknown names and names in both."""
    if odd := sorted(map(str, set(prompt) - NAMES - beside_inputs(target))):
        raise OptionError(f"the prompt is a mapping with {odd}, which no model input is called: leave that out")
    if twice := sorted(set(prompt) & set(inputs)):
        raise OptionError(f"`{twice[0]}` was given 2 times, in the prompt and by name: pass one of them")
    return {**inputs, **{name: value for name, value in prompt.items() if value is not None}}


def _check_sources(prompt: Any, messages: Any, inputs: Mapping[str, Any], target: LanguageModel) -> None:
    """Raises OptionError for a prompt passed twice, UnsupportedError for inputs that the target does not read."""
    sources = [name for name, value in (("prompt", prompt), ("messages", messages)) if value is not None]
    sources += [name for name in ("inputs", "input_ids", *_in_place_of_ids(target)) if name in inputs]
    if len(sources) > 1:
        raise OptionError(f"the prompt was given {len(sources)} times ({', '.join(sources)}): pass one of them")
    if not target.is_encoder_decoder:
        _check_beside(inputs, target)
    has_prompt = sources or "inputs_embeds" in inputs or "encoder_outputs" in inputs
    names = {*inputs, "prompt"} if has_prompt else {*inputs}
    for name, mask in MASKS.items():
        if mask in names and name not in names:
            raise OptionError(f"`{mask}` marks tokens that count, but no tokens were given: pass `{name}` with it")


def _in_place_of_ids(target: LanguageModel) -> tuple[str, ...]:
    """The arguments that may stand for an encoder's ids."""
    if not target.is_encoder_decoder:
        return ()
    return ("inputs_embeds", *(FEATURES if main_input(target) != "input_ids" else ()))


def _check_beside(inputs: Mapping[str, Any], target: LanguageModel) -> None:
    """Raises for inputs that a target without an encoder does not read beside its text."""
    if target.reads_media and "inputs_embeds" in inputs and (odd := sorted(PICTURES & inputs.keys())):
        raise OptionError(f"`{odd[0]}` and `inputs_embeds` both stand for parts of the prompt: pass ids and pictures")
    types = inputs.get("token_type_ids") if "token_type_ids" in target.input_names else None
    if not target.reads_media and (odd := sorted(PICTURES - FEATURES.keys() & inputs.keys())):
        if types is None or len(odd) > 1:
            raise UnsupportedError(f"`{odd[0]}` is for models that see pictures; this target does not: leave it out")
        if not adds_zero_types(target.model) or bool(_tensor("token_type_ids", types).any()):
            name = type(target.model).__name__
            raise UnsupportedError(f"`token_type_ids` other than the zeros that {name} adds are not read: leave it out")
    features = () if target.reads_media else FEATURES
    for name in (*features, "encoder_outputs", "decoder_input_ids", "decoder_attention_mask"):
        if name in inputs:
            kinds = "models that see or hear, or have an encoder" if name in PICTURES else "models with an encoder"
            raise UnsupportedError(f"`{name}` is for {kinds}; this target continues `input_ids`")


def read_messages(
    messages: Sequence[Any], tokenizer: Any, processor: Any, *, fetch: bool = False, pixels: int = PIXELS, **how: Any
) -> dict[str, Any]:
    """The model's inputs for one conversation or several, by the chat template, whose arguments are `how`.

    Pictures as in `with_pictures`. Raises OptionError without a template, and for messages that it refuses.
    """
    if has_pictures(messages):
        parts = with_pictures(messages, processor, fetch=fetch, pixels=pixels, **how)
        return {name: value for name, value in parts.items() if name in NAMES}
    if not hasattr(tokenizer, "apply_chat_template"):
        raise OptionError("`messages` needs a tokenizer with a chat template: pass `tokenizer=` to SpecGenerator")
    if getattr(tokenizer, "chat_template", "") is None and getattr(processor, "chat_template", None) is None:
        raise OptionError("`messages` needs a chat template, and this tokenizer has none: pass the text as a prompt")
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise OptionError.of("messages", 'a list of messages such as {"role": "user", "content": "Hello"}', messages)
    conversations = [messages] if isinstance(messages[0], Mapping) else messages
    try:
        return {"input_ids": [chat_ids(c, tokenizer, processor, **how) for c in conversations]}
    except OptionError:
        raise
    except Exception as error:  # whatever a template raises
        raise OptionError(f"the tokenizer's chat template refused `messages`: {error}") from error


def _embedded(
    value: Any, inputs: Mapping[str, Any], options: Options, target: LanguageModel, tokenizer: Any
) -> Prompts:
    """Prompts from embeddings `[rows, length, width]`, alone or with the ids `[rows, length]` that they stand for."""
    embeds, width = inputs["inputs_embeds"], target.model.get_input_embeddings().embedding_dim
    if "inputs_embeds" not in target.input_names:
        raise UnsupportedError(f"{type(target.model).__name__} does not read `inputs_embeds`: pass `input_ids`")
    if not isinstance(embeds, Tensor) or embeds.dim() != 3 or not embeds.numel() or embeds.shape[2] != width:
        got = list(embeds.shape) if isinstance(embeds, Tensor) else type(embeds).__name__
        raise OptionError.of("inputs_embeds", f"a tensor of shape [rows, length, {width}] that is not empty", got)
    count, length = embeds.shape[:2]
    mask = read_mask(inputs.get("attention_mask"), [length] * count, "attention_mask")
    unpadded = [row[torch.tensor(keep)].to(target.device, target.dtype) for row, keep in zip(embeds, mask, strict=True)]
    if not all(map(len, unpadded)):
        raise OptionError("`attention_mask` leaves a row of `inputs_embeds` empty: keep at least one position")
    if value is None:
        rows = [RowPrompt([], embeds=row) for row in unpadded]
        return Prompts(rows, torch.empty(count, 0, dtype=torch.long), num_embeds_only=length)
    ids = _read(value, inputs, options, target, tokenizer)
    if list(map(len, ids.unpadded)) != list(map(len, unpadded)):
        raise UnsupportedError(
            "`inputs_embeds` and the ids that they stand for must be equally long: pass the embeddings alone"
        )
    prompts = _prompts(ids, options)
    return replace(prompts, rows=[replace(row, embeds=e) for row, e in zip(prompts.rows, unpadded, strict=True)])


def _encoder_decoder(
    value: Any, inputs: Mapping[str, Any], options: Options, target: LanguageModel, tokenizer: Any
) -> Prompts:
    """Encoder inputs as the caller passed them, padding included, and decoder prompts that begin with the start id.

    Where an encoder's positions count columns (BART and similar), padding on the left changes its output, as in
    transformers. Drafts and processors see the ids without padding.
    """
    main = main_input(target)
    if main in FEATURES and value is not None:
        if isinstance(value[0] if isinstance(value, list | tuple) and value else value, str):
            raise OptionError(
                f"the prompt is text, and {type(target.model).__name__} reads `{main}`: for recordings there are "
                "specdec.Transcriber and `specdec transcribe`"
            )
        inputs, value = {**inputs, main: value}, None  # transformers, too, takes features as the first argument
    features = next((name for name in _in_place_of_ids(target) if name in inputs), None)
    if features is not None and features not in target.input_names & (target.source_names | FEATURES.keys()):
        raise UnsupportedError(f"the encoder of {type(target.model).__name__} does not read `{features}`: leave it out")
    ids, encoder = None, {}
    if features is not None:
        encoder = _features(features, inputs)
    elif value is not None:
        ids = _read(value, inputs, options, target, tokenizer)
        encoder = _encoder_ids(ids, options, target)
    elif "encoder_outputs" not in inputs:
        raise OptionError("this target has an encoder, which got nothing to read: pass a prompt or its features")
    encoder |= _beside(inputs, encoder, target)
    encoder = {name: tensor.to(target.device) for name, tensor in encoder.items()}
    encoding = _encoding(inputs, encoder, target)
    count = len(next(iter(encoder.values()))) if encoding is None else len(encoding)
    prompts = _prompts(_decoder_ids(count, inputs, options, target), options)
    prompts = replace(prompts, encoder=encoder or None, encoding=encoding)
    if ids is None:
        return prompts
    rows = [replace(row, encoder_ids=row_ids) for row, row_ids in zip(prompts.rows, ids.unpadded, strict=True)]
    return replace(prompts, rows=rows, is_text=ids.is_text)


def _beside(inputs: Mapping[str, Any], encoder: Mapping[str, Tensor], target: LanguageModel) -> dict[str, Tensor]:
    """The encoder's inputs beside its ids or features, with one entry per row: pictures, boxes, further masks.

    None where it reads neither ids nor features, as the caller passed its output.
    """
    count = len(next(iter(encoder.values()), ()))
    tensors = {}
    for name in sorted(inputs.keys() & (beside_inputs(target) | PICTURES | FEATURES.keys()) - encoder.keys()):
        if name not in target.input_names | target.source_names:
            raise UnsupportedError(f"{type(target.model).__name__} does not read `{name}`: leave it out")
        tensors[name] = tensor = _tensor(name, inputs[name])
        if encoder and (not tensor.dim() or len(tensor) != count):
            raise OptionError.of(name, f"one entry for each of {count} rows", list(tensor.shape))
    return tensors if encoder else {}


def _moved(output: Mapping[str, Any], target: LanguageModel) -> Any:
    """The caller's encoder output on the target's device, in its type; a plain output gets all decoders' fields."""
    kind = EncoderOutput if type(output) in (dict, BaseModelOutput) else type(output)
    return kind(
        **{
            name: value.to(target.device, target.dtype if value.is_floating_point() else None)
            if isinstance(value, Tensor)
            else value
            for name, value in output.items()
        }
    )


def _encoding(inputs: Mapping[str, Any], encoder: Mapping[str, Tensor], target: LanguageModel) -> Encoding | None:
    """The caller's `encoder_outputs`, an `Encoding` or as transformers returns them, with their mask."""
    outputs = inputs.get("encoder_outputs")
    if outputs is None:
        return None
    way_out, mask = "pass what the encoder returned", None
    if not isinstance(outputs, Encoding):
        is_output = isinstance(outputs, ModelOutput) and "last_hidden_state" in outputs
        first = outputs[0] if isinstance(outputs, tuple | list | ModelOutput) and len(outputs) else outputs
        hidden = outputs.get("pooler_output", first) if is_output and first.dim() > 3 else first
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            expected = "hidden states [rows, frames, width]"
            raise OptionError.of("encoder_outputs", expected, type(hidden).__name__, way_out)
        mask = encoder.get("attention_mask") if encoder else _encoder_mask(inputs, len(hidden))
        outputs = target.encoding_of(_moved(outputs if is_output else {"last_hidden_state": hidden}, target), mask)
    width = source_width(target.model)
    rows, frames = outputs.hidden.shape[:2]
    if outputs.hidden.shape[-1] != width or not frames:
        expected = f"hidden states [rows, frames, {width}] of at least one frame"
        raise OptionError.of("encoder_outputs", expected, list(outputs.hidden.shape), way_out)
    if encoder and rows != (count := len(next(iter(encoder.values())))):
        raise OptionError.of("encoder_outputs", f"{count} rows, one per encoder input", rows)
    if mask is not None and outputs.mask is None and target.num_source_ids is not None:  # each id has a frame
        raise OptionError.of("attention_mask", f"of shape [{rows}, {frames}], as `encoder_outputs`", list(mask.shape))
    return outputs


def _with_negatives(prompts: Prompts, inputs: Mapping[str, Any], target: LanguageModel) -> Prompts:
    """The rows with their negative prompts, by default the prompt's last token."""
    if target.is_encoder_decoder:
        raise UnsupportedError("`guidance_scale` is not supported for a target with an encoder: leave it out")
    if reads_two_ways(target, inputs):
        name = type(target.model).__name__
        raise UnsupportedError(f"{name} reads prompts in both directions, without `guidance_scale`: leave it out")
    count, negatives = len(prompts.rows), [row.tokens[-1:] for row in prompts.rows]
    if "negative_prompt_ids" in inputs:
        negatives = read_ids("negative_prompt_ids", inputs["negative_prompt_ids"], inputs, target.num_ids).unpadded
        negatives = negatives * count if len(negatives) == 1 else negatives
    if len(negatives) != count:
        raise OptionError.of("negative_prompt_ids", f"one row, or one for each of {count} prompts", len(negatives))
    if not all(negatives):
        raise OptionError("`guidance_scale` with `inputs_embeds` alone needs text to begin from: `negative_prompt_ids`")
    rows = [replace(row, negative=negative) for row, negative in zip(prompts.rows, negatives, strict=True)]
    return replace(prompts, rows=rows)


def _prompts(ids: Ids, options: Options) -> Prompts:
    """Prompts of rows of ids, padded on the left to equal length."""
    width, pad = max(map(len, ids.rows)), pad_id(options)
    padded = torch.tensor([[pad] * (width - len(row)) + row for row in ids.rows], dtype=torch.long)
    return Prompts([RowPrompt(row, width - len(row)) for row in ids.unpadded], padded, ids.is_text)


def pad_id(options: Options) -> int:
    """The padding id: the pad id, else the first end id, else 0."""
    return options.pad_token_id if options.pad_token_id is not None else (options.eos_ids or [0])[0]


def _encoder_ids(ids: Ids, options: Options, target: LanguageModel) -> dict[str, Tensor]:
    """An encoder's ids and mask `[rows, length]`; shorter rows are padded on the right."""
    width, pad = max(map(len, ids.rows)), options.pad_token_id or 0
    most = math.inf if target.num_source_ids is None else target.num_source_ids
    pad = pad if pad < most else 0  # the decoder's may be none of the encoder's ids, and is never read
    masked = [[token if 0 <= token < most else pad for token in row] for row in ids.rows]
    return {
        "input_ids": torch.tensor([row + [pad] * (width - len(row)) for row in masked]),
        "attention_mask": torch.tensor([[*map(int, row)] + [0] * (width - len(row)) for row in ids.mask]),
    }


def _features(name: str, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """An encoder's features, or embeddings, one entry per row, and their mask `[rows, length]`."""
    features, dimensions = _tensor(name, inputs[name]), FEATURES.get(name, 3)
    count = len(features) if features.dim() == dimensions else 0
    if not features.numel() or not count:
        shape = list(features.shape)
        raise OptionError.of(name, f"a tensor of {dimensions} dimensions, rows first, that is not empty", shape)
    mask = _encoder_mask(inputs, count)
    return {name: features} if mask is None else {name: features, "attention_mask": mask}


def _encoder_mask(inputs: Mapping[str, Any], count: int) -> Tensor | None:
    """The mask of the `count` rows that an encoder has read, or will read."""
    if "attention_mask" not in inputs:
        return None
    mask = _tensor("attention_mask", inputs["attention_mask"])
    if mask.dim() != 2 or len(mask) != count:
        raise OptionError.of("attention_mask", f"of shape [{count}, length]", list(mask.shape))
    return mask


def _tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError.of(name, "a tensor, or lists of equal lengths", type(value).__name__, str(error)) from None


def _decoder_ids(count: int, inputs: Mapping[str, Any], options: Options, target: LanguageModel) -> Ids:
    """Decoder prompts: the start id of each row, before the caller's `decoder_input_ids` where they all lack it.

    Padding marked by `decoder_attention_mask` is removed, so that a row's text equals the text of the row alone. (In
    transformers most decoders count its columns as positions, and the start id precedes it.)
    """
    starts = options.start_ids
    if len(starts) not in (0, 1, count):
        raise OptionError.of("decoder_start_token_id", f"one id, or one for each of {count} rows", starts)
    starts = starts * count if len(starts) == 1 else starts
    if "decoder_input_ids" not in inputs:
        if not starts:
            raise OptionError("the model has neither `decoder_start_token_id` nor `bos_token_id`: pass one of them")
        return read_ids("decoder_start_token_id", [[start] for start in starts], {}, target.num_ids)
    ids = read_ids("decoder_input_ids", inputs["decoder_input_ids"], inputs, target.num_ids)
    if len(ids.rows) != count:
        raise OptionError.of("decoder_input_ids", f"{count} rows, one per encoder input", len(ids.rows))
    are_started = target.config.model_type == "whisper" or any(
        row[0] == start for row, start in zip(ids.rows, starts, strict=False)
    )
    if are_started or not starts:
        return ids
    read_ids("decoder_start_token_id", [starts], {}, target.num_ids)
    rows, unpadded = ([[start, *row] for start, row in zip(starts, side, strict=True)] for side in ids[:2])
    return Ids(rows, unpadded, [[True, *row] for row in ids.mask])


def _read(value: Any, inputs: Mapping[str, Any], options: Options, target: LanguageModel, tokenizer: Any) -> Ids:
    """The prompt's ids: a text's, or the caller's; the start id without a prompt, or for an empty text."""
    start = [options.bos_token_id] if isinstance(options.bos_token_id, int) else []
    size = target.num_source_ids if target.is_encoder_decoder else target.num_ids
    if value is None:
        if not start:
            raise OptionError("no prompt was given, and the model has no `bos_token_id` to start from: pass a prompt")
        value = start
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
        # As in transformers, only a tensor that came without its mask, and not for an encoder, is searched for padding.
        pad = options.pad_token_id if isinstance(value, Tensor) and not target.is_encoder_decoder else None
        return read_ids("prompt", value, inputs, size, None if pad in options.eos_ids else pad)
    if tokenizer is None:
        raise OptionError("a text prompt needs a tokenizer: pass `tokenizer=` to SpecGenerator, or token ids")
    if "attention_mask" in inputs:
        raise OptionError("`attention_mask` goes with token ids: text is never padded, leave it out")
    rows = [ids_of(tokenizer, text) or start for text in texts]
    return read_ids("prompt", rows, {}, size)._replace(is_text=True)


def _with_predictions(prompts: Prompts, prediction: Any, target: LanguageModel, tokenizer: Any) -> Prompts:
    """The prompts with their predictions: one text or row of ids, or a list with one or None for each prompt.

    Raises OptionError for another type or number of predictions, and for text without a tokenizer.
    """
    mixed = isinstance(prediction, list | tuple) and any(item is None or isinstance(item, str) for item in prediction)
    items = prediction if mixed else [prediction]
    if not mixed and not isinstance(prediction, str):
        items = read_ids("prediction", prediction, {}, target.vocab_size).unpadded
    if len(items) != len(prompts.rows):
        expected = f"one text or list of ids for each of {len(prompts.rows)} prompts"
        raise OptionError.of("prediction", expected, len(items), "pass None for a prompt without one")
    predictions = [item if item is None else _prediction(item, target, tokenizer) for item in items]
    rows = [replace(row, prediction=ids) for row, ids in zip(prompts.rows, predictions, strict=True)]
    return replace(prompts, rows=rows)


def _prediction(item: Any, target: LanguageModel, tokenizer: Any) -> list[int]:
    if not isinstance(item, str):
        [ids] = read_ids("prediction", item, {}, target.vocab_size).unpadded
        return ids
    if tokenizer is None:
        raise OptionError("a text `prediction` needs a tokenizer: pass `tokenizer=` to SpecGenerator, or token ids")
    if target.is_encoder_decoder and isinstance(tokenizer, PreTrainedTokenizerBase):  # may have words for each side
        ids = list(tokenizer(text_target=item, add_special_tokens=False)["input_ids"])
    else:
        ids = list(tokenizer.encode(item, add_special_tokens=False))
    if not ids:
        raise OptionError("`prediction` is an empty text: leave it out, or pass None for a prompt without one")
    return ids
