"""One call of `generate`: a request put together, run, and gathered into a result."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter as clock
from time import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import MaxTimeCriteria, StopStringCriteria

from specdec.core.draft_schedules import Schedule
from specdec.core.drafts import BatchDrafter, DraftTask
from specdec.core.rounds import Context
from specdec.core.sequence import RunningSequence, SearchSequence, TextSequence
from specdec.core.strategies import Search, Selector
from specdec.core.tree import Step
from specdec.decoding.noise import fold
from specdec.decoding.processors import build_processors
from specdec.decoding.stopping import Stopping
from specdec.decoding.strategies import StrategySetup, make_strategy
from specdec.engine.driver import Driver
from specdec.engine.request import Request
from specdec.errors import CancelledError, OptionError
from specdec.generator.drafts_by_name import Draft
from specdec.generator.inputs import (
    Prompts,
    RowPrompt,
    check_least,
    check_tokenizer,
    check_vocabulary,
    length_limit,
    pad_id,
)
from specdec.generator.output import Generation, Recorder, beam_indices, per_token, sequences, traces
from specdec.models import Encoding, LanguageModel, ModelState, digest, plain_modes
from specdec.models.exactness import Exactness
from specdec.options.generate import Options

_SERIAL = count()  # of calls
_NO_RULE: Any = None


@dataclass(frozen=True)
class Extras:
    """What a caller hands in as objects: processors and criteria (one or several), a streamer, a prefix function.

    `prediction` is text or ids that the output may resemble, or one per prompt; drafts that copy look there first.
    Calls of different `cache_salt` continue none of each other's prompts. A processor with a method
    `allowed(text, tokens)`, how many of some tokens may follow a text, shortens what drafts propose.
    """

    logits_processor: Any = ()
    stopping_criteria: Any = ()
    streamer: Any = None
    prefix_allowed_tokens_fn: Any = None
    tokenizer: Any = None
    prediction: Any = None
    cache_salt: Any = None

    def __post_init__(self) -> None:
        check_tokenizer("tokenizer", self.tokenizer)
        for name, arguments in (("logits_processor", "(ids, logits)"), ("stopping_criteria", "(ids, scores)")):
            value = getattr(self, name)
            # A LogitsProcessorList can be called, but its items are wanted.
            items = list(value) if isinstance(value, Iterable) else [value]
            for item in items:
                if not callable(item):
                    raise OptionError.of(name, f"callables of {arguments}", item)
            object.__setattr__(self, name, items)
        if self.prefix_allowed_tokens_fn is not None and not callable(self.prefix_allowed_tokens_fn):
            raise OptionError.of("prefix_allowed_tokens_fn", "a function of (row, ids)", self.prefix_allowed_tokens_fn)
        if not isinstance(self.cache_salt, str | None):
            raise OptionError.of("cache_salt", "text", type(self.cache_salt).__name__)
        if self.streamer is not None and not (hasattr(self.streamer, "put") and hasattr(self.streamer, "end")):
            raise OptionError.of("streamer", "an object with `put` and `end`", self.streamer)


class News(NamedTuple):
    """What one round brought to one row: its steps, the first `accepted` from the draft; why it ended, if it did."""

    row: int
    steps: list[Step]
    accepted: int
    finish: str | None

    @property
    def token_ids(self) -> list[int]:
        """The new tokens."""
        return [step.token for step in self.steps]


@dataclass
class Call:
    """One call: everything it needs, checked when it is put together, its request for the engine, and its result.

    `result` is that of a call that came to its end, `seconds` are those that it ran, however it ended.
    """

    target: LanguageModel
    options: Options
    prompts: Prompts
    extras: Extras
    draft: Draft
    drafter: BatchDrafter | None
    make_schedule: Callable[[Schedule | None], Schedule]
    state: ModelState  # of the target
    exactness: Exactness
    reuses_prefixes: bool = False
    request: Request = field(init=False)
    result: Generation | None = field(init=False, default=None)
    seconds: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._check()
        limit = length_limit(self.options, self.prompts, self.target)
        check_least(self.options, limit, self.prompts, self.target)
        # Embeddings without ids count in these lengths, but processors will not see them.
        least = max((self.options.min_length or 0) - self.prompts.unseen, 0)
        settled = {"max_length": limit, "min_length": least, "do_sample": self.options.samples}
        o = self.options = self.options.model_copy(update=settled)
        self._time_limit = None if o.max_time is None else MaxTimeCriteria(o.max_time)
        self._criteria = self._make_criteria()
        self._recorder = Recorder()
        pacing = self.draft.pacing(o, self.make_schedule)
        seeds, serial = row_seeds(o, len(self.prompts.rows)), next(_SERIAL)
        self._strategies: list[Selector | Search] = []
        seqs: list[RunningSequence] = []
        for r, prompt in enumerate(self.prompts.rows):
            stop = Stopping(frozenset(o.eos_ids), limit - prompt.padding, self._criteria)
            strategy = self._make_strategy(r, prompt, seeds[r], stop)
            branching = strategy.branching if strategy.is_search or pacing.schedule.max_branches > 1 else None
            place = r // o.copies
            task = DraftTask(
                strategy.rule or _NO_RULE,  # never asked of a strategy without a draft
                branching,
                frozenset(o.eos_ids),
                (serial, place),
                self.prompts.encoder,
                place,
                next((p.allowed for p in self.extras.logits_processor if hasattr(p, "allowed")), None),
            )
            self._strategies.append(strategy)
            seqs.append(self._sequence(prompt, strategy, stop, task))
        check_vocabulary(o, self.target)
        self._in_step = self._step()
        self.request = Request(
            seqs=seqs,
            pacing=pacing,
            drafter=self.drafter,
            encode=self._encode if self.target.is_encoder_decoder else None,
            prefill_chunk=o.prefill_chunk_size,
            output_hidden_states=bool(o.output_hidden_states),
            output_attentions=bool(o.output_attentions),
            last_hidden=any(strategy.needs_hidden for strategy in self._strategies),
            frames=self._frames(),
            model_state=self.state.digest,
        )
        for r, (seq, prompt) in enumerate(zip(seqs, self.prompts.rows, strict=True)):
            self._share(seq, prompt, r // o.copies)

    @property
    def seqs(self) -> list[RunningSequence]:
        """The sequences of its request."""
        return self.request.seqs

    @property
    def stops(self) -> Sequence[str]:
        """The strings before which its texts end."""
        strings = self.options.stop_strings
        if strings is None or not self.options.cuts_stop_strings:
            return ()
        return [strings] if isinstance(strings, str) else strings

    def run(self, driver: Driver, *, stream: bool = False) -> Generator[list[News], None, Generation]:
        """Every round's news, after the streamer has had them; the value is the result."""
        began, streamer = clock(), self.extras.streamer
        if self._time_limit is not None:
            self._time_limit.initial_timestamp = time()
        if streamer is not None:
            streamer.put(self.prompts.padded)
        index: dict[int, int] = {}
        told = driver.rounds(self.request, stream=stream or streamer is not None)
        try:
            with self._in_step, closing(told) as rounds:
                for round_ in rounds:
                    self._recorder.add(round_)
                    index = index or {seq.id: i for i, seq in enumerate(self.seqs)}
                    news = [News(index[r.id], r.steps, r.accepted, r.finish) for r in round_.seqs if r.steps]
                    if streamer is not None and news:
                        streamer.put(torch.tensor(news[0].token_ids))
                    if stream:
                        yield news
        finally:
            self.seconds = clock() - began
        if streamer is not None:
            streamer.end()
        self.result = self._result()
        return self.result

    def _step(self) -> AbstractContextManager[None]:
        """What keeps the target's passes in step with those of other processes, where they wait for one another."""
        if not (dist.is_available() and dist.is_initialized()):
            if self.options.synced_gpus:
                way = "start the script with torchrun or accelerate, or leave it out"
                raise OptionError(
                    f"`synced_gpus`=True needs processes in a group of torch.distributed, got none: {way}"
                )
            return nullcontext()
        if self.options.synced_gpus is False:
            return nullcontext()
        from specdec.parallel.synced import InStep, waits_for_others

        if not waits_for_others(self.target, self.options.synced_gpus):
            return nullcontext()
        drafter = self.drafter
        return (
            InStep(self.target)
            if drafter is None
            else InStep(self.target, drafter.models, reading=bool(drafter.hidden_layers))
        )

    @plain_modes()
    def so_far(self) -> Generation | None:
        """The texts of a call that has ended, as far as they came; None of choices that only its end would have made.

        A sequence that was cut off has the finish reason "cancelled".
        """
        if self.options.at_the_end:
            return None
        keys = [seq.id for seq in self.seqs]
        new = self._recorder.tokens(keys)
        out = Generation(sequences=sequences(self.prompts.padded, new, pad_id(self.options)).to(self.seqs[0].device))
        return self._told(out, self.seqs, new)

    @plain_modes()
    def _result(self) -> Generation:
        """What came of the finished request."""
        o, seqs, pad = self.options, self._best(), pad_id(self.options)
        new = [text for seq in seqs for text in seq.texts]
        padded = self.prompts.padded[:: o.copies].repeat_interleave(self._returned, 0)
        out = Generation(sequences=sequences(padded, new, pad).to(seqs[0].device))
        if o.output_scores:
            out.scores = per_token(seqs, "scores", pad)
        if o.output_logits:
            out.logits = per_token(seqs, "logits", pad)
        self._add_traces(out, seqs)
        self._add_beams(out)
        if o.num_samples is not None:
            out.sequences_scores = torch.tensor([self._rank(seq) for seq in seqs], device=seqs[0].device)
        return self._told(out, seqs, new)

    def _told(self, out: Generation, seqs: Sequence[RunningSequence], new: Sequence[list[int]]) -> Generation:
        """`out` with what is known of its `new` texts beside their tokens: origins, statistics, words."""
        if self.options.beams == 1:
            out.drafted = self._recorder.drafted([seq.id for seq in seqs])
        schedule = self.request.pacing.schedule
        out.stats = self._recorder.stats(
            [seq.id for seq in self.seqs],
            cached_prompt_tokens=self.request.cached_prompt_tokens,
            num_target_passes=self.request.passes,
            seconds=self.seconds,
            lengths=list(map(len, new)),
            settings={
                "strategy": self._strategies[0].name,
                "schedule": type(schedule).__name__.lower() if self.drafter is not None else "none",
                "backend": self.target.backend,
                **self._draft_backend(),
            },
            exactness=self.exactness,
        )
        if self.extras.tokenizer is not None:
            out.word(self.extras.tokenizer, self.stops)
        return out

    def _draft_backend(self) -> dict[str, str]:
        """The backend of the draft's models, where it has some."""
        models = [] if self.drafter is None else self.drafter.models
        return {"draft_backend": ", ".join(dict.fromkeys(model.backend for model in models))} if models else {}

    @property
    def _returned(self) -> int:
        """How many texts come of every prompt."""
        o = self.options
        return (o.num_return_sequences or 1) if o.at_the_end else o.copies

    def _best(self) -> list[RunningSequence]:
        """All sequences; of samples that are ranked, the best of every prompt, the earlier of equals first."""
        if self.options.num_samples is None:
            return self.seqs
        groups = [self.seqs[i : i + self.options.copies] for i in range(0, len(self.seqs), self.options.copies)]
        return [seq for group in groups for seq in sorted(group, key=self._rank, reverse=True)[: self._returned]]

    def _rank(self, seq: RunningSequence) -> float:
        """The log-probability of a sample under the target, per token unless the ranking is "sum"."""
        total = sum(step.log_prob or 0.0 for step in seq.steps)
        return total if self.options.ranking == "sum" else total / len(seq.steps)

    def _add_beams(self, out: Generation) -> None:
        """Scores of hypotheses and the beams that they went through; as in transformers, where scores are asked for."""
        if self.options.beams == 1:
            return
        found = [h for seq in self.seqs if isinstance(seq, SearchSequence) for h in seq.state.finished[: seq.returned]]
        device = self.seqs[0].device
        beams, returned = self.options.beams, self._returned
        out.beam_indices = beam_indices([h.origins for h in found], beams, returned).to(device)
        if self.options.output_trace:
            out.trace = [seq.history for seq in self.seqs if isinstance(seq, SearchSequence)]
        if self.options.output_scores:
            out.sequences_scores = torch.tensor([h.score for h in found], device=device)

    def _add_traces(self, out: Generation, seqs: list[RunningSequence]) -> None:
        prefix = "" if self.request.encoding is None else "decoder_"
        if self.options.output_hidden_states:
            out[f"{prefix}hidden_states"] = traces(seqs, "hidden_states")
        if self.options.output_attentions:
            out[f"{prefix}attentions"] = traces(seqs, "attentions")
            if prefix:
                out.cross_attentions = traces(seqs, "cross_attentions")
        if self.request.encoding is not None:
            for name in ("hidden_states", "attentions"):
                if (layers := getattr(self.request.encoding, name)) is not None:
                    out[f"encoder_{name}"] = layers

    def _check(self) -> None:
        """Raises for a draft beside a strategy that takes none, and for attentions that cannot be had."""
        branched = self.options.beams > 1 or self.options.contrastive
        if self.drafter is not None and self.options.contrastive:
            raise OptionError(
                "`penalty_alpha` selects contrastive search, which looks at the target's own candidates and takes no "
                "draft: use a SpecGenerator without one, or leave out `penalty_alpha`"
            )
        if self.options.output_attentions:
            self.target.check_attentions(drafted=self.drafter is not None, branched=branched)

    def _encode(self) -> Encoding:
        """What the encoder makes of its inputs, unless the caller has that already."""
        o, inputs = self.options, self.prompts.encoder
        if self.prompts.encoding is not None:
            return self.prompts.encoding
        assert inputs is not None
        traced = {name: bool(getattr(o, name)) for name in ("output_hidden_states", "output_attentions")}
        return self.target.encode(inputs, **traced)

    def _share(self, seq: RunningSequence, prompt: RowPrompt, place: int) -> None:
        """Lets the sequence continue what was read before, and be continued, unless nobody knows what its
        encoder read.
        """
        if not self.reuses_prefixes or self.request.traced or self.prompts.encoding is not None:
            return
        model, salt = self.state.digest, self.extras.cache_salt or ""
        inputs = [value[place] for _, value in sorted((self.prompts.encoder or {}).items())]
        if prompt.embeds is not None:
            inputs = [prompt.embeds]
        seq.context = Context(model, salt, b"".join(map(digest, inputs)))
        if seq.unconditional is not None:
            seq.unconditional.context = Context(model, salt)

    def _frames(self) -> int:
        """The most positions that the encoder's output has."""
        if self.prompts.encoding is not None:
            return self.prompts.encoding.hidden.shape[1]
        most = getattr(self.target.model.config, "max_source_positions", None) or 2**31
        lengths = [tensor.shape[-1] for tensor in (self.prompts.encoder or {}).values()]
        return min(max(lengths, default=0), most)

    def _sequence(
        self, prompt: RowPrompt, strategy: Selector | Search, stop: Stopping, task: DraftTask
    ) -> RunningSequence:
        common: dict[str, Any] = {"max_length": stop.max_length, "device": self.target.device, "task": task}
        unconditional = None if prompt.negative is None else RunningSequence(tokens=list(prompt.negative), **common)
        common |= {"encoder_tokens": prompt.encoder_ids, "prediction": prompt.prediction}
        common |= {"embeds": prompt.embeds, "unconditional": unconditional, "tokens": list(prompt.tokens)}
        if strategy.is_search:
            returned = self.options.num_return_sequences or 1
            common["history"] = [] if self.options.output_trace else None
            return SearchSequence(search=strategy, state=strategy.begin(), returned=returned, **common)
        return TextSequence(selector=strategy, stop=stop, **common)

    def _make_strategy(self, key: int, prompt: RowPrompt, seed: int, stop: Stopping) -> Selector | Search:
        o, device = self.options, self.target.device
        source = prompt.encoder_ids if self.target.is_encoder_decoder else prompt.tokens
        if prompt.embeds is not None:
            source = None  # as in transformers
        processors = build_processors(
            o,
            prompt_length=len(prompt.tokens) + prompt.padding,
            padding=prompt.padding,
            eos_ids=o.eos_ids,
            encoder_ids=None if source is None else torch.tensor([source], device=device),
            extra=self.extras.logits_processor,
            prefix_allowed_tokens_fn=self.extras.prefix_allowed_tokens_fn,
            row=key,
            device=device,
            vocab_size=self.target.model.config.get_text_config().vocab_size,
        )
        setup = StrategySetup(
            options=o,
            processors=processors,
            stop=stop,
            width=self.target.vocab_size,
            seed=seed,
            prompt=[*self.prompts.padded[key, : prompt.padding].tolist(), *prompt.tokens],
            padding=prompt.padding,
            pad_id=pad_id(o),
            guidance_scale=None if prompt.negative is None else o.guidance_scale,
        )
        return make_strategy(setup)

    def _make_criteria(self) -> list[Any]:
        """transformers' criteria that look at more than the last token, then the caller's own."""
        o, tokenizer = self.options, self.extras.tokenizer
        made: list[Any] = [] if self._time_limit is None else [self._time_limit]
        if o.stop_strings is not None:
            if tokenizer is None:
                raise OptionError("`stop_strings` needs a tokenizer: pass `tokenizer=`")
            made.append(StopStringCriteria(stop_strings=o.stop_strings, tokenizer=tokenizer))
        return [*made, *self.extras.stopping_criteria]


def row_seeds(options: Options, count: int) -> list[int]:
    """One seed per row: as given, or folded from one; None takes one from torch's global generator, to sample only."""
    seed = options.seed
    if isinstance(seed, Sequence):
        if len(seed) != count:
            raise OptionError.of("seed", f"one number, or one for each of {count} rows", list(seed))
        return list(seed)
    if seed is None:
        seed = int(torch.randint(2**62, ())) if options.samples else 0
    return [fold(seed, r) for r in range(count)]


@dataclass(frozen=True)
class Job:
    """A call that one thread follows round by round and any other may end; `SpecGenerator.submit` makes it."""

    call: Call
    driver: Driver

    def follow(self, *, stream: bool = True) -> Generator[list[News], None, Generation]:
        """Runs the call: every round's news with `stream`, none where only its end tells the text; then the result.

        Raises what ended it early, CancelledError after `cancel`; `result` has the texts so far. Closing the iterator
        ends the call.
        """
        return self.call.run(self.driver, stream=stream and not self.call.options.at_the_end)

    @property
    def result(self) -> Generation | None:
        """What came of the call, once `follow` has ended; of one that was cancelled or closed, the texts so far.

        Those have no scores and traces, and the finish reason "cancelled" where they were cut off. None before, where
        the call failed, and of cancelled beams and ranked samples, whose texts are chosen at the end.
        """
        call = self.call
        if call.result is not None or call.seconds is None:
            return call.result
        failed = call.request.error is not None and not isinstance(call.request.error, CancelledError)
        return None if failed else call.so_far()

    def cancel(self) -> None:
        """Ends the call within a round; nothing where it is over."""
        self.driver.cancel(self.call.request)
