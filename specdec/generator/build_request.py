"""From options and prompts to the engine's `Request`."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria

from specdec.core.draft_schedules import make_schedule, schedule_kind
from specdec.core.drafts import Draft, DraftTask
from specdec.core.sequence import Context, RunningSequence
from specdec.core.strategies import Strategy
from specdec.decoding.noise import fold
from specdec.decoding.processors import build_processors
from specdec.decoding.processors.grammar import Grammar
from specdec.decoding.stopping import Stopping, StopTexts
from specdec.decoding.strategies import StrategySetup, make_strategy
from specdec.engine.request import Pacing, Request
from specdec.errors import UnsupportedError
from specdec.generator import cost_files
from specdec.generator.checks import check_call
from specdec.generator.extras import Extras
from specdec.generator.inputs.prompts import Prompts, RowPrompt, pad_id
from specdec.generator.tokenizers import decode
from specdec.models import Encoding, LanguageModel
from specdec.models.exactness import Exactness
from specdec.options.generate import Options, to_list

_SERIAL = count()  # numbers of calls


@dataclass(eq=False)
class ScheduledDraft:
    """A draft of one target, and its schedules that learn, by kind, `Options.family` and number of draft tokens.

    `save_learned` saves what they learned for the next program; so does the end of the draft's use.
    """

    target: LanguageModel
    draft: Draft | None
    _pacings: dict[Hashable, Pacing] = field(default_factory=dict)
    _last: cost_files.LastPacings = field(default_factory=dict)  # by family and backends
    _lock: Any = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.save_learned = partial(cost_files.write_costs, self._last, cost_files.odds_of(self.draft))
        weakref.finalize(self, self.save_learned)

    @property
    def models(self) -> Sequence[LanguageModel]:
        """The language models of the draft."""
        return () if self.draft is None else self.draft.models

    def pacing(self, options: Options, *, predicted: bool = False, lookup_tokens: int | None = None) -> Pacing:
        """The pacing of a request: a new one, or its family's where the schedule learns.

        Calls whose texts are `predicted` learn apart: their drafts are right far more often. `lookup_tokens`: as in
        `make_schedule`.

        A new schedule of a family begins with what the family's last one has learned in the same backends, here or in
        an earlier program.
        """
        kind, draft, target = schedule_kind(options), self.draft, self.target
        trees = draft is not None and draft.guesses_trees and target.capability.cache_kind == "kv"
        make = partial(make_schedule, options, offloaded=target.is_offloaded, trees=trees, lookup_tokens=lookup_tokens)
        if kind is None or not kind.learns:
            return Pacing(make())
        of_options = (*options.family, "predicted") if predicted else options.family
        family = (of_options, *(model.backend for model in (target, *self.models)))
        key = (kind, family, options.num_assistant_tokens)
        with self._lock:
            pacing, last = self._pacings.get(key), self._last.get(family)
            file = cost_files.place(target, draft, of_options) if last is None else last[0]
            if pacing is None or not pacing.users:
                learned = cost_files.read_costs(file, cost_files.odds_of(draft)) if last is None else last[1].schedule
                schedule = make(learned=learned)
                pacing = self._pacings.setdefault(key, Pacing(schedule))
                pacing.schedule = schedule
            self._last[family] = file, pacing
        return pacing


@dataclass
class Call:
    """A checked call, and the `request` that the engine runs for it, with its sequences `seqs`.

    `pacing`: its schedule. `exactness` is the target's. `shares_prefixes`: its sequences share the beginnings of texts
    that they read with one another, and `across_calls` also with other calls.
    """

    target: LanguageModel
    options: Options
    prompts: Prompts
    extras: Extras
    draft: Draft | None
    pacing: Pacing
    exactness: Exactness
    shares_prefixes: bool = False
    across_calls: bool = False
    request: Request = field(init=False)
    seqs: list[RunningSequence] = field(init=False)
    time_limit: MaxTimeCriteria | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        target, prompts, extras, draft = self.target, self.prompts, self.extras, self.draft
        # As in transformers, a criterion of the caller replaces the built-in criterion of its kind.
        kinds = {type(criterion) for criterion in extras.stopping_criteria}
        if MaxLengthCriteria in kinds:
            length = min(c.max_length for c in extras.stopping_criteria if type(c) is MaxLengthCriteria)
            self.options = self.options.model_copy(update={"max_length": length, "max_new_tokens": None})
        if EosTokenCriteria in kinds and to_list(self.options.eos_token_id):
            raise UnsupportedError("`stopping_criteria` with an EosTokenCriteria: pass its ids as `eos_token_id=`")
        limit = check_call(self.options, prompts, extras.streamer, extras.tokenizer, target, drafted=draft is not None)
        encodes = draft is not None and draft.needs_encoder_inputs
        if encodes and (prompts.encoder is None or "inputs_embeds" in prompts.encoder):
            raise UnsupportedError(
                "`draft` is an encoder-decoder model, which needs encoder inputs, and embeddings are the target's: "
                "use a decoder-only draft"
            )
        # Embeddings without ids count in these lengths, but processors will not see them.
        least = max((self.options.min_length or 0) - prompts.num_embeds_only, 0)
        resolved = {"max_length": limit, "min_length": least, "do_sample": self.options.samples}
        o = self.options = self.options.model_copy(update=resolved)
        if o.max_time is not None and MaxTimeCriteria not in kinds:
            self.time_limit = MaxTimeCriteria(o.max_time)
        # transformers' criteria that look at more than the last token come before the caller's.
        criteria: list[Any] = [c for c in extras.stopping_criteria if type(c) is not MaxLengthCriteria]
        stops = None if o.stop_strings is None else _stops(to_list(o.stop_strings), extras.tokenizer)
        count, serial = len(prompts.rows), next(_SERIAL)
        seeds = row_seeds(o.seed, count) if o.samples or o.seed is not None else [0] * count
        self.seqs = []
        for r, (seed, row) in enumerate(zip(seeds, prompts.rows, strict=True)):
            built_in = [] if self.time_limit is None else [self.time_limit]
            built_in += [] if stops is None else [stops(len(row.tokens))]
            self.seqs.append(self._sequence(r, serial, seed, [*built_in, *criteria]))
        self.request = Request(
            seqs=self.seqs,
            pacing=self.pacing,
            draft=draft,
            encode=self._encode if target.is_encoder_decoder else None,
            prefill_chunk=o.prefill_chunk_size,
            output_hidden_states=bool(o.output_hidden_states),
            output_attentions=bool(o.output_attentions),
            last_hidden=any(seq.strategy.needs_hidden for seq in self.seqs),
            frames=self._frames() if target.is_encoder_decoder else 0,
        )
        if self.shares_prefixes and not self.request.traced and prompts.encoding is None:
            context = Context(
                target.epoch,
                call=None if self.across_calls else serial,
                salt=extras.cache_salt or "",
                exactness=self.exactness,
            )
            for r, seq in enumerate(self.seqs):
                self._share(seq, context, prompts.rows[r], r // o.copies)

    def _encode(self) -> Encoding:
        """The encoder's output: the caller's, or a new one."""
        if self.prompts.encoding is not None:
            return self.prompts.encoding
        assert self.prompts.encoder is not None
        traced = {name: bool(getattr(self.options, name)) for name in ("output_hidden_states", "output_attentions")}
        return self.target.encode(self.prompts.encoder, **traced)

    def _frames(self) -> int:
        """The most positions that the encoder's output has."""
        if self.prompts.encoding is not None:
            return self.prompts.encoding.hidden.shape[1]
        most = getattr(self.target.model.config, "max_source_positions", None) or 2**31
        lengths = [max(tensor.shape[1:]) for tensor in (self.prompts.encoder or {}).values()]
        return min(max(lengths, default=0), most)

    def _share(self, seq: RunningSequence, context: Context, prompt: RowPrompt, place: int) -> None:
        """Lets the sequence fork from other texts, and they from it, within the same context and inputs."""
        inputs = [value[place] for _, value in sorted((self.prompts.encoder or {}).items())]
        if prompt.embeds is not None:
            inputs = [prompt.embeds]
        if prompt.pictures is not None:
            inputs = [value for _, value in sorted(prompt.pictures.inputs.items())]
        seq.context = context._replace(inputs=b"".join(map(tensor_fingerprint, inputs)))
        if seq.unconditional is not None:
            seq.unconditional.context = context

    def _sequence(self, r: int, serial: int, seed: int, criteria: Sequence[Any]) -> RunningSequence:
        """The sequence of row `r`, with its strategy and its draft's instructions."""
        o, prompt = self.options, self.prompts.rows[r]
        forced = frozenset(to_list(o.forced_eos_token_id))
        stop = Stopping(frozenset(o.eos_ids), (o.max_length or 0) - prompt.padding, criteria, forced)
        processors = [
            processor.copy(len(prompt.tokens), o.num_beams) if isinstance(processor, Grammar) else processor
            for processor in self.extras.logits_processor
        ]
        strategy = self._strategy(r, prompt, seed, stop, processors)
        sampler: Any = strategy.sampler  # None: the strategy takes no draft
        task = DraftTask(
            sampler,
            ends=stop.eos_ids,
            source=(serial, r // o.copies),
            inputs=self.prompts.encoder,
            encoder_row=r // o.copies,
            pictures=None if prompt.pictures is None or prompt.pictures.before else prompt.pictures,
            salt=self.extras.cache_salt or "",
            allowed=[*methods(processors, "allowed")],
            forced=[*methods(processors, "forced")],
        )
        common: dict[str, Any] = {"max_length": stop.max_length, "task": task}
        return RunningSequence(
            tokens=list(prompt.tokens),
            strategy=strategy,
            returned=o.num_return_sequences,
            history=[] if strategy.is_search and o.output_trace else None,
            encoder_tokens=prompt.encoder_ids,
            prediction=prompt.prediction,
            embeds=prompt.embeds,
            pictures=prompt.pictures,
            unconditional=None if prompt.negative is None else RunningSequence(tokens=list(prompt.negative), **common),
            **common,
        )

    def _strategy(self, row: int, prompt: RowPrompt, seed: int, stop: Stopping, extra: Sequence[Any]) -> Strategy:
        o = self.options
        source = prompt.encoder_ids if self.target.is_encoder_decoder else prompt.tokens
        if prompt.embeds is not None:
            source = None  # as in transformers
        processors = build_processors(
            o,
            prompt_length=len(prompt.tokens) + prompt.padding,
            padding=prompt.padding,
            encoder_ids=None if source is None else torch.tensor([source]),
            extra=extra,
            prefix_allowed_tokens_fn=self.extras.prefix_allowed_tokens_fn,
            row=row,
            vocab_size=self.target.vocab_size,
            watermark_size=self.target.config.vocab_size,
        )
        setup = StrategySetup(
            options=o,
            processors=processors,
            stop=stop,
            seed=seed,
            prompt=[*self.prompts.padded[row, : prompt.padding].tolist(), *prompt.tokens],
            padding=prompt.padding,
            pad_id=pad_id(o),
        )
        return make_strategy(setup)


def methods(processors: Sequence[Any], name: str) -> Iterator[Any]:
    """The methods of this name that processors have."""
    return (getattr(processor, name) for processor in processors if callable(getattr(type(processor), name, None)))


def _stops(strings: list[str], tokenizer: Any) -> Callable[[int], Any]:
    """A function that makes a row's criterion from the length of its prompt: transformers' criterion, or one that
    decodes where transformers' cannot read the vocabulary, such as WordPiece's.
    """
    try:
        criterion = StopStringCriteria(stop_strings=strings, tokenizer=tokenizer)
    except (AttributeError, TypeError, ValueError):
        return lambda length: StopTexts(partial(decode, tokenizer), strings, lambda _: length)
    return lambda _: criterion


def row_seeds(seed: int | Sequence[int] | None, count: int) -> list[int]:
    """One seed per row: the caller's, or folded from one number, which torch's generator draws for None."""
    if isinstance(seed, Sequence):
        return list(seed)
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    return [fold(seed, row) for row in range(count)]


def tensor_fingerprint(tensor: Tensor) -> bytes:
    """A fingerprint of a tensor's shape, type and content."""
    plain = tensor.detach().cpu().contiguous()
    head = f"{plain.dtype} {tuple(plain.shape)}".encode()
    return hashlib.blake2b(head + plain.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
