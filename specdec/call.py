"""One call of `generate`: its parts put together, run, and gathered into a result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter as clock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import MaxTimeCriteria, StopStringCriteria

from specdec.config import Options
from specdec.engine import Engine, RunningRow
from specdec.errors import OptionError
from specdec.inputs import Prompts
from specdec.logits import build_processors
from specdec.models import Encoding, LanguageModel
from specdec.output import Generation, Recorder, per_token, sequences, traces
from specdec.schedule import Schedule
from specdec.select import Block, Coupled, Greedy, Match, PerRow, Rejection, Stopping, fold
from specdec.types import BatchDrafter, Call

STRATEGIES = {"coupled": Coupled, "match": Match, "rejection": Rejection, "block": Block}
DEFAULT_LENGTH = 20  # transformers' own, for ids without any limit


@dataclass(frozen=True)
class Extras:
    """What a caller hands in as objects: processors, criteria, a streamer, a prefix function, a negative prompt."""

    logits_processor: Sequence[Any] = ()
    stopping_criteria: Sequence[Any] = ()
    streamer: Any = None
    prefix_allowed_tokens_fn: Any = None
    negative_prompt_ids: Tensor | None = None
    negative_prompt_attention_mask: Tensor | None = None
    tokenizer: Any = None


class News(NamedTuple):
    """What one round brought to one row."""

    row: int
    token_ids: list[int]
    accepted: int
    last: bool


class Running:
    """A call under way: `rounds` runs it, `result` gathers what came."""

    def __init__(
        self, engine: Engine, rows: list[RunningRow], options: Options, prompts: Prompts, extras: Extras, began: float
    ) -> None:
        self.engine, self.rows, self.options = engine, rows, options
        self._prompts, self._extras, self._began = prompts, extras, began
        self._recorder = Recorder(len(rows))

    def rounds(self) -> Iterator[list[News]]:
        """Every round's news, after the streamer has had them."""
        streamer = self._extras.streamer
        if streamer is not None:
            streamer.put(self._prompts.padded)
        for round_ in self.engine.run():
            self._recorder.add(round_)
            news = [News(r.key, [s.token for s in r.steps], r.accepted, r.finish is not None) for r in round_.rows]
            if streamer is not None:
                streamer.put(torch.tensor(news[0].token_ids))
            yield news
        if streamer is not None:
            streamer.end()

    def result(self) -> Generation:
        """The finished call."""
        o, rows, pad = self.options, self.rows, pad_id(self.options)
        out = Generation(sequences=sequences(self._prompts.padded, rows, pad).to(self.rows[0].device))
        if o.output_scores:
            out.scores = per_token(rows, "scores", pad)
        if o.output_logits:
            out.logits = per_token(rows, "logits", pad)
        self._add_traces(out)
        tokenizer = self._extras.tokenizer
        if tokenizer is not None:
            new = [row.tokens[row.prompt_length :] for row in rows]
            out.texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in new]
        settings = {
            "strategy": type(rows[0].selector).__name__.lower(),
            "schedule": type(self.engine.schedule).__name__.lower() if self.engine.draft is not None else "none",
        }
        out.stats = self._recorder.stats(self.engine.target.passes, clock() - self._began, settings)
        return out

    def _add_traces(self, out: Generation) -> None:
        prefix = "" if self._prompts.encoder is None else "decoder_"
        if self.options.output_hidden_states:
            out[f"{prefix}hidden_states"] = traces(self.rows, "hidden_states")
        if self.options.output_attentions:
            out[f"{prefix}attentions"] = traces(self.rows, "attentions")
            if prefix:
                out.cross_attentions = traces(self.rows, "cross_attentions")


@dataclass(frozen=True)
class Plan:
    """Everything that a call needs, checked; `start` begins the work."""

    target: LanguageModel
    options: Options
    prompts: Prompts
    extras: Extras
    drafter: BatchDrafter | None
    schedule: Schedule

    def start(self) -> Running:
        """The call, ready to run its rounds."""
        began = clock()
        o, prompts = self.options, self.prompts
        rows = self._rows()
        encoding = None if prompts.encoder is None else self.target.encode(prompts.encoder)
        draft = None
        if self.drafter is not None:
            rule = PerRow({row.key: row.selector.rule for row in rows})  # type: ignore[attr-defined]
            draft = self.drafter.start(Call(rule, self.target.vocab_size, encoding, prompts.encoder))
        engine = Engine(
            self.target.session(),
            draft,
            self.schedule,
            prefill_chunk=o.prefill_chunk_size or 2048,
            output_hidden_states=bool(o.output_hidden_states),
            output_attentions=bool(o.output_attentions),
        )
        engine.add(rows, _with_shadows(encoding, rows))
        return Running(engine, rows, o, prompts, self.extras, began)

    def _rows(self) -> list[RunningRow]:
        o, prompts, extras = self.options, self.prompts, self.extras
        width = max(map(len, prompts.rows))
        limit = length_limit(o, width if prompts.embeds is None else 0, prompts, self.target)
        o = o.model_copy(update={"max_length": limit, "do_sample": o.samples})
        seeds = row_seeds(o.seed, len(prompts.rows))
        criteria = self._criteria()
        rows = []
        for r, tokens in enumerate(prompts.rows):
            selector = self._selector(o, r, width, seeds[r])
            padding = width - len(tokens)
            own_limit = limit - padding if prompts.embeds is None else limit + len(tokens)
            stop = Stopping(frozenset(o.eos_ids), own_limit, criteria)
            rows.append(
                RunningRow(
                    r,
                    list(tokens),
                    selector,
                    stop,
                    own_limit,
                    self.target.device,
                    None if prompts.encoder_rows is None else prompts.encoder_rows[r],
                    None if prompts.embeds is None else prompts.embeds[r],
                    self._shadow(o, r, selector, stop, own_limit, extras),
                )
            )
        return rows

    def _selector(self, o: Options, r: int, width: int, seed: int) -> Greedy | Coupled:
        device = self.target.device
        readable = self.prompts.rows if self.prompts.encoder is None else self.prompts.encoder_rows
        processors = build_processors(
            o,
            prompt_length=width,
            padding=width - len(self.prompts.rows[r]),
            eos_ids=o.eos_ids,
            encoder_ids=None if readable is None else torch.tensor([readable[r]], device=device),
            extra=list(self.extras.logits_processor),
            prefix_allowed_tokens_fn=self.extras.prefix_allowed_tokens_fn,
            row=r,
            device=device,
        )
        common: dict[str, Any] = {
            "width": self.target.vocab_size,
            "guidance_scale": o.guidance_scale if _guides(o) else None,
            "keep_scores": bool(o.output_scores),
            "keep_logits": bool(o.output_logits),
        }
        if not o.samples:
            return Greedy(processors, **common)
        return STRATEGIES[o.sampling or "coupled"](processors, seed, **common)

    def _criteria(self) -> list[Any]:
        """transformers' criteria that look at more than the last token, then the caller's own."""
        o, made = self.options, []
        if o.max_time is not None:
            made.append(MaxTimeCriteria(o.max_time))
        if o.stop_strings is not None:
            if self.extras.tokenizer is None:
                raise OptionError("`stop_strings` needs a tokenizer: pass `tokenizer=`")
            made.append(StopStringCriteria(stop_strings=o.stop_strings, tokenizer=self.extras.tokenizer))
        return [*made, *self.extras.stopping_criteria]

    def _shadow(
        self, o: Options, r: int, selector: Greedy | Coupled, stop: Stopping, limit: int, extras: Extras
    ) -> RunningRow | None:
        """The row without its condition: the negative prompt, or the prompt's last token."""
        if not _guides(o):
            return None
        tokens = self.prompts.rows[r][-1:]
        if extras.negative_prompt_ids is not None:
            ids, mask = extras.negative_prompt_ids, extras.negative_prompt_attention_mask
            row = ids[r if len(ids) > 1 else 0]
            tokens = row.tolist() if mask is None else row[mask[r if len(ids) > 1 else 0].bool()].tolist()
        return RunningRow(r, tokens, selector, stop, limit, self.target.device)


def _guides(o: Options) -> bool:
    return o.guidance_scale is not None and o.guidance_scale != 1


def _with_shadows(encoding: Encoding | None, rows: Sequence[RunningRow]) -> Encoding | None:
    """Encoder outputs for the rows, then for those of them that have a shadow."""
    shadows = [i for i, row in enumerate(rows) if row.shadow is not None]
    return encoding if encoding is None or not shadows else encoding.select([*range(len(rows)), *shadows])


def pad_id(o: Options) -> int:
    """The padding id; 0 is one as good as any other."""
    return o.pad_token_id if o.pad_token_id is not None else (o.eos_ids or [0])[0]


def row_seeds(seed: int | Sequence[int] | None, count: int) -> list[int]:
    """One seed per row: as given, or folded from one; None takes one from torch's global generator."""
    if isinstance(seed, Sequence):
        if len(seed) != count:
            raise OptionError.of("seed", f"one number, or one for each of {count} rows", list(seed))
        return list(seed)
    base = int(torch.randint(2**62, ())) if seed is None else seed
    return [fold(base, r) for r in range(count)]


def length_limit(o: Options, prompt: int, prompts: Prompts, target: LanguageModel) -> int:
    """The most tokens of a row, padding included, as transformers counts them.

    Raises OptionError where text has no limit at all, where the prompt fills the limit, and where the limit is beyond
    the positions that the model knows.
    """
    if o.max_new_tokens is not None:
        limit = prompt + o.max_new_tokens
    elif o.max_length is not None:
        limit = o.max_length
    elif prompts.is_text:
        raise OptionError("a text prompt needs a length limit: pass `max_new_tokens=`")
    else:
        limit = prompt + DEFAULT_LENGTH
    if limit <= prompt:
        raise OptionError(f"`max_length`={limit} leaves no room after a prompt of {prompt} tokens: raise it")
    longest = max(map(len, prompts.rows)) + limit - prompt
    if target.max_positions is not None and longest > target.max_positions:
        raise OptionError(
            f"the prompt and its continuation may reach {longest} tokens, but the target has {target.max_positions} "
            "positions: shorten the prompt or lower `max_new_tokens`"
        )
    return limit


def expand(options: Options, prompts: Prompts) -> Prompts:
    """Every prompt `num_return_sequences` times, copies side by side."""
    n = options.num_return_sequences or 1
    if n == 1:
        return prompts
    repeat = [r for r in range(len(prompts.rows)) for _ in range(n)]
    return Prompts(
        [prompts.rows[r] for r in repeat],
        prompts.padded[repeat],
        prompts.is_text,
        None if prompts.encoder is None else {k: v[repeat] for k, v in prompts.encoder.items()},
        None if prompts.encoder_rows is None else [prompts.encoder_rows[r] for r in repeat],
        None if prompts.embeds is None else [prompts.embeds[r] for r in repeat],
    )


__all__ = ["Extras", "Mapping", "News", "Plan", "Running", "expand"]
