"""`Summarizer`: summaries of texts of any length, with the results of transformers 4's pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.core.stats import Stats, total
from specdec.decoding.noise import fold
from specdec.errors import OptionError, SpecdecError
from specdec.generator.generator import SpecGenerator
from specdec.generator.inputs.pictures import chat_ids, has_template
from specdec.generator.tokenizers import decode, ids_of
from specdec.options.fields import check_whole
from specdec.options.generate import Options
from specdec.options.load import AUTO
from specdec.pipelines.checks import check_function, refuse_outputs
from specdec.pipelines.summaries.chunks import cut_text, whole_sentences

BATCH = 8  # prompts decoded together
NEW_TOKENS = 128  # the length limit of programs, for checkpoints without one
TASK = "summarization"
PLACE, WORDS = "{text}", "{words}"
INSTRUCTION = f"Summarize the following text in at most {WORDS} words.\n\n{PLACE}"
_WORDS_PER_TOKEN = 0.6  # fewer than there are, so that a summary ends before its limit
_POSITIONS = ("max_encoder_position_embeddings", "max_position_embeddings", "n_positions", "max_seq_len")
_UNKNOWN = 10**9  # tokenizers without a limit return a larger number

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Summary:
    """One text's summaries; `finish_reasons`: why each ended; `parts`: the number of pieces that each pass read."""

    texts: list[str]
    token_ids: list[Tensor]
    finish_reasons: list[str]
    parts: list[int]


@dataclass(frozen=True)
class Summaries:
    """The summaries of several texts, and the statistics of all their calls."""

    documents: list[Summary]
    stats: Stats


@dataclass(frozen=True)
class _Plan:
    """A call's options, as they were read and as `arguments` of `generate`.

    A pass has at most `room` input tokens (None: any number) and `limit` new tokens.
    """

    options: Options
    arguments: dict[str, Any]
    room: int | None
    limit: int
    truncate: bool
    batch_size: int
    progress: Callable[[int, int], None] | None


class Summarizer:
    """Summarises texts with a target and a draft; the target alone would write the same summaries.

    `target`, `draft`, `options`: as in `SpecGenerator`, but by default the draft copies from the text; `target` may
    also be a `SpecGenerator`. The checkpoint's settings for the task apply (`task_specific_params["summarization"]`:
    lengths, beams, T5's prefix). `template`: the target's input, with `{text}` in it, and perhaps `{words}`, a number
    of words that stays within the length limit; by default the prefix and the text, or without an encoder an
    instruction, sent as a user's message where the tokenizer has a chat template.

    A text longer than the target's context, or than `chunk_tokens` (template included), is summarised in pieces of
    whole sentences; then their summaries are summarised together, until one piece is left. A piece's summary that the
    length limit cuts ends with its last whole sentence.
    """

    def __init__(
        self,
        target: Any,
        draft: Any = AUTO,
        *,
        template: str | None = None,
        chunk_tokens: int | None = None,
        **options: Any,
    ) -> None:
        if template is not None and (not isinstance(template, str) or PLACE not in template):
            raise OptionError.of("template", f"text with {PLACE} in it", template)
        if chunk_tokens is not None:
            check_whole("chunk_tokens", chunk_tokens)
        if isinstance(target, SpecGenerator):
            draft = None if draft == AUTO else draft
            if names := [name for name, value in {"draft": draft, **options}.items() if value is not None]:
                raise OptionError(f"`{names[0]}` belongs to the SpecGenerator: set it there, or pass the model")
            self.generator = target
        else:
            self.generator = SpecGenerator(target, draft, task=TASK, **options)
        if self.generator.tokenizer is None:
            raise OptionError("a Summarizer reads and writes text: pass `tokenizer=`")
        self._target, self._tokenizer = self.generator.target, self.generator.tokenizer
        self._chat = not self._target.is_encoder_decoder and has_template(self._tokenizer, self.generator.processor)
        self.template = template or self._default_template()
        self._chunk_tokens = chunk_tokens

    @classmethod
    def from_pretrained(cls, target: str, draft: Any = AUTO, **options: Any) -> Summarizer:
        """`Summarizer(target, draft, **options)`, by the name that transformers' users know."""
        return cls(target, draft, **options)

    def with_limit(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a call, with a limit of 128 new tokens unless they or the checkpoint have a limit."""
        limits = self.generator.options(**options)
        has_limit = limits.max_new_tokens is not None or limits.max_length is not None
        return {**options} if has_limit else {**options, "max_new_tokens": NEW_TOKENS}

    def __call__(self, documents: str | Iterable[str], **options: Any) -> list[Any]:
        """One dict per text, `[{"summary_text": …}]`, also for a single text; `options`: as in `summarize`.

        With `num_return_sequences` above 1, several texts return a list of lists. Raises OptionError.
        """
        texts = [documents] if isinstance(documents, str) else documents
        summaries = self.summarize(texts, **options).documents
        records = [[{"summary_text": text} for text in summary.texts] for summary in summaries]
        if isinstance(documents, str):
            return records[0]
        return [row[0] for row in records] if all(len(row) == 1 for row in records) else records

    def summarize(
        self,
        documents: Iterable[str],
        *,
        batch_size: int = BATCH,
        truncation: bool = False,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> Summaries:
        """The summaries of several texts, with their ids, parts and statistics.

        `options`: as in `SpecGenerator.generate`; `max_length` and `min_length` count the summary alone for any target.
        `truncation` reads only the beginning of a long text. `progress(done, whole)` hears of pieces before each batch,
        and anew of their summaries, which are pieces of a shorter text. Raises OptionError before any pass for empty
        texts and wrong options, SpecdecError where the summaries of a text's pieces are no shorter than the text.
        """
        texts = _check_documents(documents)
        if not isinstance(truncation, bool):
            raise OptionError.of("truncation", "True or False", truncation)
        check_whole("batch_size", batch_size)
        check_function("progress", progress, "done, whole")
        if options.get("prediction") is not None:
            raise OptionError(
                "`prediction` goes with one prompt, a Summarizer makes its own: call SpecGenerator for it"
            )
        refuse_outputs("Summarizer", options)
        plan = self._plan(options, truncation, batch_size, progress)
        if name := next((name for name in ("min_length", "min_new_tokens") if options.get(name)), None):
            for number, length in enumerate(self._count(texts, plan.limit)):
                if options[name] > length:
                    raise OptionError(
                        f"`{name}`={options[name]} asks for more tokens than text {number} has ({length}): lower it"
                    )
        parts = [self._parts(text, plan) for text in texts]
        most, room = max(map(len, parts), default=1), plan.room
        if most > 1 and room is not None and self._count([""], plan.limit)[0] + 2 * plan.limit > room:
            raise OptionError(
                f"a text is read in {most} pieces, but of their summaries, {plan.limit} tokens each, two do not fit "
                f"into the {room} tokens of one piece: lower `max_new_tokens`, or pass `truncation=True`"
            )
        return self._reduce(parts, plan)

    def _reduce(self, parts: list[list[str]], plan: _Plan) -> Summaries:
        """Summarises parts, then their joined summaries, and so on until each text has one part."""
        counts, stats = [[len(pieces)] for pieces in parts], []
        seeds = batch_seeds(plan.options, len(parts))
        while long := [d for d, pieces in enumerate(parts) if len(pieces) > 1]:
            pieces = [piece for d in long for piece in parts[d]]
            piece_seeds = None
            if seeds is not None:  # by a piece's text and its number in it
                firsts = [fold(seeds[d * plan.options.copies], i + 1) for d in long for i in range(len(parts[d]))]
                samples = range(plan.options.num_samples or 1)
                piece_seeds = [fold(seed, sample) for seed in firsts for sample in samples]
            out = self._decode(pieces, {**plan.arguments, "num_return_sequences": 1}, plan, piece_seeds)
            stats.append(out.stats)
            _log_cuts(out.stats, "summaries of parts", plan.limit)
            pairs = ((summary.texts[0].strip(), summary.finish_reasons[0]) for summary in out.documents)
            summaries = (whole_sentences(text) if reason == "length" else text for text, reason in pairs)
            for d in long:
                parts_after = self._parts(" ".join(next(summaries) for _ in parts[d]), plan)
                if len(parts_after) >= len(parts[d]):
                    raise SpecdecError(
                        f"the summaries of the {len(parts[d])} parts of text {d} fill {len(parts_after)} parts again: "
                        "lower `max_new_tokens`, or pass `truncation=True` to read the first part alone"
                    )
                parts[d] = parts_after
                counts[d].append(len(parts_after))
        out = self._decode([pieces[0] for pieces in parts], plan.arguments, plan, seeds)
        _log_cuts(out.stats, "summaries", plan.limit)
        documents = [replace(summary, parts=count) for summary, count in zip(out.documents, counts, strict=True)]
        return Summaries(documents, total([*stats, out.stats]))

    def _decode(
        self, texts: list[str], arguments: Mapping[str, Any], plan: _Plan, seeds: list[int] | None
    ) -> Summaries:
        """Summarises `batch_size` texts at a time, each in one part; `seeds` of all rows, and the call's `arguments`.

        The ids of an encoder-decoder's summaries begin with the decoder's start.
        """
        prompts = self._ids(texts, plan.limit, plan.room if plan.truncate else None)
        documents, stats = list[Summary](), list[Stats]()
        rows = len(seeds) // len(prompts) if seeds else 0
        for first in range(0, len(prompts), plan.batch_size):
            if plan.progress is not None:
                plan.progress(first, len(prompts))
            batch = prompts[first : first + plan.batch_size]
            part_seeds = seeds[first * rows : (first + len(batch)) * rows] if seeds else None
            out = self.generator.generate(batch, **{**arguments, "seed": part_seeds})
            assert out.sequences is not None
            assert out.stats is not None
            new = out.new_tokens()
            start = out.sequences.shape[1] - max(map(len, new)) if self._target.is_encoder_decoder else 0
            ids = [
                torch.tensor([*row[:start], *tokens]) for row, tokens in zip(out.sequences.tolist(), new, strict=True)
            ]
            summaries = [decode(self._tokenizer, tokens, plan.options.cut_before) for tokens in new]
            copies = len(new) // len(batch)
            for copy in (slice(i, i + copies) for i in range(0, len(new), copies)):
                reasons = list(out.stats.finish_reasons[copy])
                documents.append(Summary(summaries[copy], ids[copy], reasons, [1]))
            stats.append(out.stats)
        return Summaries(documents, total(stats))

    def _default_template(self) -> str:
        if not self._target.is_encoder_decoder:
            return INSTRUCTION if self._chat else f"{INSTRUCTION}\n\nSummary:"
        config = self._target.model.config
        tasks = getattr(config, "task_specific_params", None) or {}
        prefix = tasks.get(TASK, {}).get("prefix", getattr(config, "prefix", None))
        return f"{prefix or ''}{PLACE}"

    def _ids(self, texts: Sequence[str], limit: int, most: int | None = None) -> list[list[int]]:
        """The target's input ids for each text, for summaries of `limit` tokens; an encoder's are cut to `most`."""
        template = self.template.replace(WORDS, str(int(limit * _WORDS_PER_TOKEN) or 1))
        inputs = [template.replace(PLACE, text) for text in texts]
        if not self._chat:
            is_cut = most is not None and self._target.is_encoder_decoder
            cut = {"truncation": True, "max_length": most} if is_cut else {}
            return [ids_of(self._tokenizer, text, verbose=False, **cut) for text in inputs]
        chats = [[{"role": "user", "content": text}] for text in inputs]
        processor = self.generator.processor
        options = {} if processor else {"tokenizer_kwargs": {"verbose": False}}
        return [chat_ids(chat, self._tokenizer, processor, **options) for chat in chats]

    def _plan(self, arguments: dict[str, Any], truncate: bool, batch_size: int, progress: Any) -> _Plan:
        """The call's options; lengths count the summary alone."""
        options = self.generator.options(**arguments)
        limit = options.max_new_tokens or options.max_length
        if limit is None:
            raise OptionError("a summary needs a length limit: pass `max_new_tokens=`")
        room = _context(self._target, self._tokenizer)
        if self._target.is_encoder_decoder:
            limit -= options.max_new_tokens is None  # `max_length` counts the decoder's start id
        else:
            arguments = {**arguments, "max_length": None, "min_length": None, "max_new_tokens": limit}
            arguments["min_new_tokens"] = options.min_new_tokens or options.min_length or None
            room = None if room is None else room - limit
        room = min((n for n in (room, self._chunk_tokens) if n is not None), default=None)
        if room is not None and room < 1:
            raise OptionError(
                f"{limit} new tokens leave no room for a text before them, since the target reads {room + limit} at "
                "most: lower `max_new_tokens`"
            )
        return _Plan(options, arguments, room, limit, truncate, batch_size, progress)

    def _count(self, texts: Sequence[str], limit: int) -> list[int]:
        return list(map(len, self._ids(texts, limit)))

    def _parts(self, text: str, plan: _Plan) -> list[str]:
        """The pieces of a text; only the first when it is truncated, which for an encoder its tokenizer does."""
        if plan.room is None or (plan.truncate and self._target.is_encoder_decoder):
            return [text]
        count = partial(self._count, limit=plan.limit)
        if count([text])[0] <= plan.room:  # as it is, with the whitespace around it
            return [text]
        parts = cut_text(text, plan.room, count, even=not plan.truncate)
        return parts[:1] if plan.truncate else parts


def _log_cuts(stats: Stats, what: str, limit: int) -> None:
    """Logs how many texts the length limit cut."""
    reasons = stats.finish_reasons
    if cut := reasons.count("length"):
        _log.warning("%d of %d %s are cut at %d tokens: raise `max_new_tokens=`", cut, len(reasons), what, limit)


def _check_documents(documents: Any) -> list[str]:
    """The texts as a list; raises OptionError for other types and for empty texts."""
    if isinstance(documents, str | bytes | Mapping) or not isinstance(documents, Iterable):
        raise OptionError.of("documents", "text, or texts one after the other", type(documents).__name__)
    texts = list(documents)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise OptionError.of(f"documents[{number}]", "text", type(text).__name__)
        if not text.strip():
            raise OptionError(f"text {number} is empty: there is nothing to summarize")
    return texts


def _context(target: Any, tokenizer: Any) -> int | None:
    """The target's context in tokens, by its config and tokenizer; None where neither names it."""
    config = target.config
    if target.is_encoder_decoder:
        config = getattr(target.model.config, "encoder", config)
    positions = [n for name in _POSITIONS if (n := getattr(config, name, None)) is not None]
    lengths = [*positions[:1], getattr(tokenizer, "model_max_length", None) or _UNKNOWN]
    return min((int(n) for n in lengths if n < _UNKNOWN), default=None)


def batch_seeds(options: Options, prompts: int) -> list[int] | None:
    """One seed per row of all batches, so that a text does not depend on its batch; None without a seed."""
    if options.seed is None:
        return None
    rows = prompts * options.copies
    if isinstance(options.seed, int):
        return [fold(options.seed, row) for row in range(rows)]
    if len(options.seed) != rows:
        raise OptionError.of("seed", f"one number, or one for each of {rows} rows", options.seed)
    return options.seed
