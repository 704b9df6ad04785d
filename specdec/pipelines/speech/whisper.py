"""What only Whisper models have: windows, prompts of language and task, a token for silence, times of words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TASK_IDS, TO_LANGUAGE_CODE

from specdec.decoding.processors import Timestamps
from specdec.errors import OptionError, UnsupportedError
from specdec.models.encoding import Encoding
from specdec.models.language_model import LanguageModel

TOKEN_SECONDS = 0.02  # seconds of audio between two timestamp tokens
FRAME_SECONDS = 0.01


class Evidence(NamedTuple):
    """A window's probability of no speech, and the mean log-probability of its text."""

    silence: float
    log_prob: float


class SpeechConfig:
    """What a checkpoint's generation config, `settings`, says of speech; `vocab_size` tokens."""

    def __init__(self, settings: Any, vocab_size: int) -> None:
        self.settings, self.vocab_size = settings, vocab_size

    def setting(self, name: str) -> Any:
        """A value of the checkpoint's generation config; None where it is not set."""
        return getattr(self.settings, name, None)

    def check(self, language: str | None, task: str | None, timestamps: Any, multilingual: bool | None) -> None:
        """Raises OptionError for options that the checkpoint cannot serve."""
        multilingual = self.setting("is_multilingual") if multilingual is None else multilingual
        if multilingual is False:
            for name, value, only in (("language", language, ("en", "english")), ("task", task, ("transcribe",))):
                if value is not None and value not in only:
                    raise OptionError(f"`{name}` {value!r} does not apply to an English-only model: leave it out")
            language = task = None
        if task is not None and task not in TASK_IDS:
            raise OptionError.of("task", " or ".join(sorted(TASK_IDS)), task)
        for name, value, table in (("language", language, "lang_to_id"), ("task", task, "task_to_id")):
            if value is not None and self.setting(table) is None:
                raise UnsupportedError(
                    f"`{name}` needs a checkpoint whose generation config has `{table}`: leave it out"
                )
        if language is not None:
            self.language_id(language)
        if timestamps == "word" and self.setting("alignment_heads") is None:
            raise UnsupportedError(
                "`return_timestamps='word'` needs a checkpoint whose generation config has `alignment_heads`: "
                "pass True for whole segments"
            )

    def language_id(self, language: str) -> int:
        """The token of a language, by its name, code or token; raises OptionError for an unknown one."""
        ids: dict[str, int] = self.setting("lang_to_id")
        word = language.lower()
        token = word if word in ids else f"<|{TO_LANGUAGE_CODE.get(word, word)}|>"
        if token not in ids:
            choices = ", ".join(LANGUAGES.get(name[2:-2], name) for name in ids)
            raise OptionError.of("language", f"one that the model knows ({choices})", language)
        return ids[token]


class Whisper(SpeechConfig):
    """A model of the Whisper family with its tokenizer and the speech settings of its generation config.

    A window has `frames` frames of features; `stride` frames are one position of the encoder and one timestamp token.
    Raises UnsupportedError for other models.
    """

    def __init__(self, model: LanguageModel, tokenizer: Any) -> None:
        if model.config.model_type != "whisper" or not model.is_encoder_decoder:
            raise UnsupportedError(f"`target` must be a Whisper model, got {type(model.model).__name__}")
        super().__init__(model.model.generation_config, model.vocab_size)
        self.model, self.tokenizer = model, tokenizer
        encoder = model.model.get_encoder()
        self.stride = int(encoder.conv1.stride[0] * encoder.conv2.stride[0])
        self.positions = int(model.config.max_source_positions)
        self.frames = self.stride * self.positions
        self.mels = int(model.config.num_mel_bins)
        self.end = int(self.settings.eos_token_id)

    @property
    def timestamp_begin(self) -> int:
        """The token of 0.00 seconds; an id beyond the vocabulary where the checkpoint does not name it."""
        without = self.setting("no_timestamps_token_id")
        return self.model.vocab_size + 1 if without is None else int(without) + 1

    @property
    def languages(self) -> dict[int, str]:
        """The English names of the languages by their tokens."""
        codes = {token: name[2:-2] for name, token in (self.setting("lang_to_id") or {}).items()}
        return {token: LANGUAGES.get(code, code) for token, code in codes.items()}

    def language_token(self, prompt: Sequence[int]) -> list[int]:
        """The language token of a prompt, as a list of at most one."""
        languages = self.languages
        return [token for token in prompt if token in languages][:1]

    def language(self, prompt: Sequence[int]) -> str | None:
        """The English name of a prompt's language; None without a language token, but for English-only models."""
        only = "english" if self.setting("is_multilingual") is False else None
        return next((self.languages[token] for token in self.language_token(prompt)), only)

    def prompt(self, encoding: Encoding, *, language: str | None, task: str | None, timestamps: bool) -> list[int]:
        """The decoder's prompt of a row: start, language, task, and without `timestamps` the token for that.

        A language that neither the call nor the checkpoint names is detected, as in transformers. The default task is
        to transcribe: without a task, models repeat words or write nothing.
        """
        language, task = language or self.setting("language"), task or self.setting("task")
        if self.setting("is_multilingual") is False:
            language = task = None
        begin: list[int | None] = [self.settings.decoder_start_token_id]
        if language is None and task is None:  # older checkpoints force the tokens after the start
            forced = self.setting("forced_decoder_ids") or getattr(self.model.config, "forced_decoder_ids", None) or []
            begin += [token for _, token in sorted(forced, key=lambda pair: pair[0])]
        spoken = begin[1] if len(begin) > 1 else None
        if language is not None:
            spoken = self.language_id(language)
        if spoken is None and self.setting("lang_to_id") is not None:
            hidden = BaseModelOutput(last_hidden_state=encoding.hidden)
            spoken = int(self.model.model.detect_language(encoder_outputs=hidden, generation_config=self.settings))
        row = [*begin[:1], spoken, *begin[2:]]
        tasks = {} if self.setting("is_multilingual") is False else self.setting("task_to_id") or {}
        if task is not None:
            row.append(tasks[task])
        elif tasks and not set(row) & set(tasks.values()):
            row.append(tasks["transcribe"])
        without = self.setting("no_timestamps_token_id")
        if timestamps and row[-1] == without:
            row.pop()
        elif not timestamps and without is not None and row[-1] != without:
            row.append(without)
        return [token for token in row if token is not None]

    @torch.no_grad()
    def evidence(self, encoding: Encoding, prompt: Sequence[int], start: int, tokens: Sequence[int]) -> Evidence:
        """How likely one row's `tokens` are, timestamps not counted, and silence in their place.

        `start`: how many tokens before the prompt's end the start token is.
        """
        ids = torch.tensor([[*prompt, *tokens]], device=self.model.device)
        hidden = BaseModelOutput(last_hidden_state=encoding.hidden)
        logits = self.model.model(encoder_outputs=hidden, decoder_input_ids=ids[:, :-1]).logits[0].float()
        silence = logits[len(prompt) - start].softmax(-1)[self.timestamp_begin - 2]
        logits[:, self.setting("suppress_tokens") or []] = -torch.inf
        logits[len(prompt) - 1, self.setting("begin_suppress_tokens") or []] = -torch.inf
        words = [i for i, token in enumerate(tokens, len(prompt)) if token < self.timestamp_begin]
        log_probs = logits[[i - 1 for i in words]].log_softmax(-1)[range(len(words)), ids[0, words]]
        return Evidence(float(silence), float(log_probs.mean()))

    def timestamp_rules(self, begin: int) -> Timestamps:
        """The processor that keeps timestamps in pairs and in order, for text that begins after `begin` tokens.

        Raises UnsupportedError where the checkpoint does not name its timestamps.
        """
        if self.setting("no_timestamps_token_id") is None:
            raise UnsupportedError(
                "timestamps, and so sound longer than a window, need a checkpoint whose generation config has "
                "`no_timestamps_token_id`: pass `chunk_length_s` and no `return_timestamps`"
            )
        return Timestamps(
            self.timestamp_begin,
            begin,
            self.end,
            most_initial=self.setting("max_initial_timestamp_index"),
            by_probability=getattr(self.settings, "_detect_timestamp_from_logprob", True),
        )

    def times(self, encoding: Encoding, prompt: Sequence[int], tokens: Sequence[int], frames: int) -> list[float]:
        """The second at which each of one row's `tokens` ends, by the alignment heads, within `frames` of sound."""
        heads = self.setting("alignment_heads")
        ids = torch.tensor([[*prompt, *tokens[:-1]]], device=self.model.device)
        maps = attention_maps(self.model.model, encoding.hidden, ids, heads)[:, len(prompt) :, : max(frames // 2, 1)]
        times = token_times(maps, self.model.config.median_filter_width) * TOKEN_SECONDS
        return [*times.tolist(), *([times[-1]] if len(times) else [0.0])] if len(tokens) else []

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without timestamps and special tokens."""
        text: str = self.tokenizer.decode([token for token in tokens if token < self.end])
        return text


@torch.no_grad()
def attention_maps(model: Any, hidden: Tensor, ids: Tensor, heads: Sequence[Sequence[int]]) -> Tensor:
    """Cross-attention `[heads, tokens, positions]` of `(layer, head)` pairs in a pass over `ids` `[1, tokens]`.

    `hidden`: the encoder's output. Hooks compute it, since not every attention implementation returns attentions.
    """
    layers = model.get_decoder().layers
    maps: dict[int, Tensor] = {}

    def read(layer: int, module: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        maps[layer] = _attention(module, args[0] if args else arguments["hidden_states"], hidden)

    hooks = [
        layers[layer].encoder_attn.register_forward_pre_hook(partial(read, layer), with_kwargs=True)
        for layer in {layer for layer, _ in heads}
    ]
    try:
        model(encoder_outputs=BaseModelOutput(last_hidden_state=hidden), decoder_input_ids=ids, use_cache=False)
    finally:
        for handle in hooks:
            handle.remove()
    return torch.stack([maps[layer][head] for layer, head in heads])


def _attention(module: nn.Module, states: Tensor, hidden: Tensor) -> Tensor:
    """The weights `[heads, tokens, positions]` with which `states` `[1, tokens, width]` attend to `hidden`."""
    attend: Any = module
    query = (attend.q_proj(states) * attend.scaling).view(-1, attend.num_heads, attend.head_dim).transpose(0, 1)
    key = attend.k_proj(hidden).view(-1, attend.num_heads, attend.head_dim).transpose(0, 1)
    return (query @ key.transpose(1, 2)).softmax(-1)


def token_times(maps: Tensor, width: int) -> np.ndarray[Any, Any]:
    """The position of each token, from attention `[heads, tokens, positions]` smoothed over `width` positions."""
    if maps.shape[1] == 0:
        return np.empty(0)
    maps = maps.float()
    maps = (maps - maps.mean(-2, keepdim=True)) / maps.std(-2, keepdim=True, unbiased=False)
    if maps.shape[-1] > (side := width // 2):  # the median of each value and its neighbours, mirrored at the ends
        beside = functional.pad(maps, (side, side, 0, 0), mode="reflect").unfold(-1, width, 1)
        maps = beside.sort(-1).values[..., side]
    tokens, positions = _warped(-maps.mean(0).cpu().double().numpy())
    first = np.diff(tokens, prepend=-1).astype(bool)
    return positions[first]


def _warped(costs: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The cheapest monotonic path through `costs` `[tokens, positions]` (dynamic time warping), as pairs of indices.

    Computed diagonal by diagonal; of equal paths the step along the positions is taken, as in Whisper.
    """
    rows, columns = costs.shape
    total = np.full((rows + 1, columns + 1), np.inf, dtype=np.float32)
    total[0, 0] = 0
    directions = np.zeros((rows + 1, columns + 1), dtype=np.int8)
    directions[0], directions[:, 0] = 2, 1
    for diagonal in range(2, rows + columns + 1):
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        corner, up, left = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        direction = np.where((corner < up) & (corner < left), 0, np.where((up < corner) & (up < left), 1, 2))
        total[i, j] = costs[i - 1, j - 1] + np.choose(direction, (corner, up, left))
        directions[i, j] = direction
    path, i, j = [], rows, columns
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        direction = directions[i, j]
        i, j = i - (direction != 2), j - (direction != 1)
    steps = np.array(path[::-1])
    return steps[:, 0], steps[:, 1]
