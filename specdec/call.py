"""One call of `generate`: its parts put together, run, and gathered into a result."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter as clock
from typing import Any, NamedTuple

import torch
from transformers import MaxTimeCriteria, StopStringCriteria

from specdec.config import Options
from specdec.draft import Leading
from specdec.engine import Engine
from specdec.errors import OptionError
from specdec.inputs import (
    Prompts,
    RowPrompt,
    check_least,
    check_tokenizer,
    check_vocabulary,
    length_limit,
    pad_id,
)
from specdec.logits import build_processors
from specdec.models import Encoding, LanguageModel
from specdec.output import Generation, Recorder, beam_indices, per_token, sequences, traces
from specdec.rows import RunningRow, SearchRow, TextRow
from specdec.schedule import Cost, Schedule
from specdec.select import (
    BeamSearch,
    Block,
    ConstrainedSearch,
    Contrastive,
    Coupled,
    Greedy,
    GroupSearch,
    Match,
    PerRow,
    Progress,
    Rejection,
    Stopping,
    fold,
    wanted,
)
from specdec.types import BatchDrafter, Call

Strategy = Greedy | Coupled | BeamSearch | GroupSearch | ConstrainedSearch | Contrastive
STRATEGIES = {"coupled": Coupled, "match": Match, "rejection": Rejection, "block": Block}
PREFILL_CHUNK = 2048  # prompt tokens of one pass


@dataclass(frozen=True)
class Extras:
    """What a caller hands in as objects: processors and criteria (one or several), a streamer, a prefix function.

    `prediction` is text or ids that the output may resemble, or one per prompt; drafts that copy look there first.
    """

    logits_processor: Any = ()
    stopping_criteria: Any = ()
    streamer: Any = None
    prefix_allowed_tokens_fn: Any = None
    tokenizer: Any = None
    prediction: Any = None

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
        if self.streamer is not None and not (hasattr(self.streamer, "put") and hasattr(self.streamer, "end")):
            raise OptionError.of("streamer", "an object with `put` and `end`", self.streamer)


class News(NamedTuple):
    """What one round brought to one row."""

    row: int
    token_ids: list[int]
    accepted: int
    last: bool


class Running:
    """A call under way: `rounds` runs it, `result` gathers what came."""

    def __init__(self, prepared: Prepared, engine: Engine, encoding: Encoding | None, began: float) -> None:
        self.engine, self.rows, self.options = engine, prepared.rows, prepared.options
        self._prompts, self._extras = prepared.prompts, prepared.extras
        self._encoding, self._began = encoding, began
        self._recorder = Recorder(len(self.rows))
        self._strategy, self._exactness = prepared.strategy, prepared.target.exactness
        self._costs = prepared.costs

    def rounds(self) -> Generator[list[News]]:
        """Every round's news, after the streamer has had them."""
        streamer = self._extras.streamer
        if streamer is not None:
            streamer.put(self._prompts.padded)
        try:
            for round_ in self.engine.run():
                self._recorder.add(round_)
                news = [
                    News(r.key, [s.token for s in r.steps], r.accepted, r.finish is not None)
                    for r in round_.rows
                    if r.steps
                ]
                if streamer is not None and news:
                    streamer.put(torch.tensor(news[0].token_ids))
                yield news
        finally:  # a stream that is closed early has learned too
            if self.options.schedule == "cost" and isinstance(self.engine.schedule, Cost):
                self._costs[self.options.family] = self.engine.schedule
        if streamer is not None:
            streamer.end()

    def result(self) -> Generation:
        """The finished call."""
        o, rows, pad = self.options, self._best_rows(), pad_id(self.options)
        new = [text for row in rows for text in row.texts]
        padded = self._prompts.padded[:: self.options.copies].repeat_interleave(self._returned, 0)
        out = Generation(sequences=sequences(padded, new, pad).to(rows[0].device))
        if o.output_scores:
            out.scores = per_token(rows, "scores", pad)
        if o.output_logits:
            out.logits = per_token(rows, "logits", pad)
        self._add_traces(out, rows)
        self._add_beams(out)
        if o.num_samples is not None:
            out.sequences_scores = torch.tensor([self._rank(row) for row in rows], device=rows[0].device)
        tokenizer = self._extras.tokenizer
        if tokenizer is not None:
            out.texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in new]
        settings = {
            "strategy": self._strategy,
            "schedule": type(self.engine.schedule).__name__.lower() if self.engine.draft is not None else "none",
        }
        seconds = clock() - self._began
        stats = self._recorder.stats(self.engine.target.passes, seconds, list(map(len, new)), settings)
        out.stats = replace(stats, exactness=self._exactness)
        return out

    @property
    def _returned(self) -> int:
        """How many texts come of every prompt."""
        o = self.options
        return (o.num_return_sequences or 1) if o.at_the_end else o.copies

    def _best_rows(self) -> list[RunningRow]:
        """All rows; of samples that are ranked, the best of every prompt, the earlier of equals first."""
        if self.options.num_samples is None:
            return self.rows
        groups = [self.rows[i : i + self.options.copies] for i in range(0, len(self.rows), self.options.copies)]
        return [row for group in groups for row in sorted(group, key=self._rank, reverse=True)[: self._returned]]

    def _rank(self, row: RunningRow) -> float:
        """The log-probability of a sample under the target, per token unless the ranking is "sum"."""
        total = sum(step.log_prob or 0.0 for step in row.steps)
        return total if self.options.ranking == "sum" else total / len(row.steps)

    def _add_beams(self, out: Generation) -> None:
        """Scores of hypotheses and the beams that they went through; as in transformers, where scores are asked for."""
        if self.options.beams == 1:
            return
        found = [h for row in self.rows if isinstance(row, SearchRow) for h in row.state.finished[: row.returned]]
        device = self.rows[0].device
        beams, returned = self.options.beams, self._returned
        out.beam_indices = beam_indices([h.origins for h in found], beams, returned).to(device)
        if self.options.output_trace:
            out.trace = [row.history for row in self.rows if isinstance(row, SearchRow)]
        if self.options.output_scores:
            out.sequences_scores = torch.tensor([h.score for h in found], device=device)

    def _add_traces(self, out: Generation, rows: list[RunningRow]) -> None:
        prefix = "" if self._encoding is None else "decoder_"
        if self.options.output_hidden_states:
            out[f"{prefix}hidden_states"] = traces(rows, "hidden_states")
        if self.options.output_attentions:
            out[f"{prefix}attentions"] = traces(rows, "attentions")
            if prefix:
                out.cross_attentions = traces(rows, "cross_attentions")
        if self._encoding is not None:
            for name in ("hidden_states", "attentions"):
                if (layers := getattr(self._encoding, name)) is not None:
                    out[f"encoder_{name}"] = layers


@dataclass
class Prepared:
    """Everything that a call needs, checked when it is put together; `start` begins the work, once.

    `costs` is where the cost rule leaves what it found out, for the next call of the same family.
    """

    target: LanguageModel
    options: Options
    prompts: Prompts
    extras: Extras
    drafter: BatchDrafter | None
    schedule: Schedule
    costs: dict[Hashable, Cost] = field(default_factory=dict)
    rows: list[RunningRow] = field(init=False)
    strategies: list[Strategy] = field(init=False)

    def __post_init__(self) -> None:
        branched = self.options.beams > 1 or self.options.contrastive
        if self.drafter is not None and self.options.contrastive:
            raise OptionError(
                "`penalty_alpha` selects contrastive search, which looks at the target's own candidates and takes no "
                "draft: use a SpecGenerator without one, or leave out `penalty_alpha`"
            )
        if self.options.output_attentions:
            self.target.check_attentions(drafted=self.drafter is not None, branched=branched)
        limit = length_limit(self.options, self.prompts, self.target)
        check_least(self.options, limit, self.prompts, self.target)
        # Embeddings without ids count in these lengths, but processors will not see them.
        least = max((self.options.min_length or 0) - self.prompts.unseen, 0)
        settled = {"max_length": limit, "min_length": least, "do_sample": self.options.samples}
        self.options = self.options.model_copy(update=settled)
        self._criteria = self._make_criteria()
        seeds = row_seeds(self.options, len(self.prompts.rows))
        self.rows, self.strategies = [], []
        for r, prompt in enumerate(self.prompts.rows):
            stop = Stopping(frozenset(self.options.eos_ids), limit - prompt.padding, self._criteria)
            self.strategies.append(self._make_strategy(r, prompt, seeds[r], stop))
            self.rows.append(self._row(prompt, self.strategies[r], stop, r))
        check_vocabulary(self.options, self.target)

    @property
    def strategy(self) -> str:
        """The strategy's name, for the result."""
        return type(self.strategies[0]).__name__.lower()

    def start(self) -> Running:
        """The call, ready to run its rounds."""
        began = clock()
        o, inputs, rows = self.options, self.prompts.encoder, self.rows
        if o.max_time is not None:
            self._criteria.insert(0, MaxTimeCriteria(o.max_time))  # its time begins now
        traced = {"output_hidden_states": bool(o.output_hidden_states), "output_attentions": bool(o.output_attentions)}
        encoding = self.prompts.encoding
        if encoding is None and inputs is not None:
            encoding = self.target.encode(inputs, **traced)
        draft = None
        if self.drafter is not None:
            rules = PerRow({key: s.rule for key, s in enumerate(self.strategies) if not isinstance(s, Contrastive)})
            call = Call(
                rules,
                self.target.vocab_size,
                branching=self._branching(rules),
                encoding=encoding,
                draft_inputs=inputs,
                sources=[row.source or 0 for row in rows],
                ends=frozenset(o.eos_ids),
            )
            draft = self.drafter.start(call)
            if o.beams > 1 and not getattr(draft, "branches", False):
                draft = Leading(draft)
        chunk = o.prefill_chunk_size or PREFILL_CHUNK
        engine = Engine(
            self.target.session(),
            draft,
            self.schedule,
            prefill_chunk=chunk,
            last_hidden=any(strategy.needs_hidden for strategy in self.strategies),
            **traced,
        )
        engine.add(rows, encoding)
        return Running(self, engine, encoding, began)

    def _branching(self, rules: PerRow) -> PerRow | None:
        """How a draft may look ahead with branches, where there are any."""
        if self.options.beams > 1:
            return PerRow(dict(enumerate(self.strategies)))
        widest = [getattr(self.schedule, name, None) or 1 for name in ("branches", "widest")]
        return rules if max(widest) > 1 else None

    def _row(self, prompt: RowPrompt, strategy: Any, stop: Stopping, key: int) -> RunningRow:
        common: dict[str, Any] = {"key": key, "source": key // self.options.copies}
        common |= {"max_length": stop.max_length, "device": self.target.device}
        shadow = None if prompt.negative is None else RunningRow(tokens=list(prompt.negative), **common)
        common |= {"encoder_tokens": prompt.encoder_ids, "prediction": prompt.prediction}
        common |= {"embeds": prompt.embeds, "shadow": shadow}
        tokens = list(prompt.tokens)
        if isinstance(strategy, BeamSearch | GroupSearch | ConstrainedSearch | Contrastive):
            returned = self.options.num_return_sequences or 1
            common["history"] = [] if self.options.output_trace else None
            return SearchRow(tokens=tokens, search=strategy, state=strategy.begin(), returned=returned, **common)
        return TextRow(tokens=tokens, selector=strategy, stop=stop, **common)

    def _make_strategy(self, key: int, prompt: RowPrompt, seed: int, stop: Stopping) -> Strategy:
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
        )
        common: dict[str, Any] = {
            "guidance_scale": None if prompt.negative is None else o.guidance_scale,
            "keep_scores": bool(o.output_scores),
            "keep_logits": bool(o.output_logits),
        }
        if o.contrastive:
            common["keep_traces"] = bool(o.output_hidden_states or o.output_attentions)
            alpha, top_k = o.penalty_alpha or 0.0, o.top_k or 2
            return Contrastive(processors=processors, stop=stop, penalty_alpha=alpha, top_k=top_k, **common)
        common["width"] = self.target.vocab_size
        if o.beams > 1:
            return self._make_search(key, prompt, seed, {"processors": processors, "stop": stop, **common})
        if not o.samples:
            return Greedy(processors, **common)
        return STRATEGIES[o.sampling or "coupled"](processors, seed, ranked=o.num_samples is not None, **common)

    def _make_search(self, key: int, prompt: RowPrompt, seed: int, parts: dict[str, Any]) -> Strategy:
        """A search over beams."""
        o = self.options
        parts |= {
            "num_beams": o.beams,
            "max_new_tokens": (parts["stop"].max_length or 0) - len(prompt.tokens),
            "length_penalty": 1.0 if o.length_penalty is None else o.length_penalty,
            "early_stopping": o.early_stopping or False,
        }
        end, returned = (o.eos_ids or [0])[0], o.num_return_sequences or 1
        if o.groups > 1:
            penalty = o.diversity_penalty or 0.0
            return GroupSearch(groups=o.groups, diversity_penalty=penalty, pad_id=pad_id(o), end_id=end, **parts)
        if o.constrained:
            # As in transformers, padding counts towards the constraints.
            padding = self.prompts.padded[key, : prompt.padding].tolist()
            progress = Progress.of(wanted(o.constraints, o.force_words_ids)).after([*padding, *prompt.tokens])
            return ConstrainedSearch(progress=progress, returned=returned, end_id=end, **parts)
        return BeamSearch(seed=seed if o.samples else None, **parts)

    def _make_criteria(self) -> list[Any]:
        """transformers' criteria that look at more than the last token, then the caller's own."""
        strings, tokenizer = self.options.stop_strings, self.extras.tokenizer
        if strings is None:
            return list(self.extras.stopping_criteria)
        if tokenizer is None:
            raise OptionError("`stop_strings` needs a tokenizer: pass `tokenizer=`")
        return [StopStringCriteria(stop_strings=strings, tokenizer=tokenizer), *self.extras.stopping_criteria]


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
