"""From the rounds of a request, counted one by one, to its `Generation`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.core.outcome import Round, SequenceRound
from specdec.core.sequence import RunningSequence
from specdec.core.stats import Stats
from specdec.generator.build_request import Call
from specdec.generator.generation import Generation, PerToken, PerTokenAndLayer
from specdec.generator.inputs import pad_id
from specdec.models import plain_modes


class Recorder:
    """Collects the rounds of one request; sequences are named by their ids."""

    def __init__(self) -> None:
        self._rounds: dict[int, list[SequenceRound]] = {}
        self._seconds = [0.0, 0.0, 0.0]  # of drafting, verification, selection

    def add(self, round: Round) -> None:
        """Adds one round."""
        for phase, seconds in enumerate((round.draft_seconds, round.verify_seconds, round.select_seconds)):
            self._seconds[phase] += seconds
        for seq in round.seqs:
            self._rounds.setdefault(seq.id, []).append(seq)

    def tokens(self, ids: Sequence[int]) -> list[list[int]]:
        """The new tokens of each sequence."""
        return [[step.token for round in self._rounds.get(id_, ()) for step in round.steps] for id_ in ids]

    def drafted(self, ids: Sequence[int]) -> list[list[bool]]:
        """Which of its new tokens the draft guessed, for each sequence."""
        return [
            [step < round.accepted for round in self._rounds.get(id_, ()) for step in range(len(round.steps))]
            for id_ in ids
        ]

    def finish_reasons(self, ids: Sequence[int]) -> list[str]:
        """Why each sequence ended; "cancelled" where it was cut off."""
        return [_finish_reason(self._rounds.get(id_, ())) for id_ in ids]

    def stats(self, seqs: Sequence[RunningSequence], **known: Any) -> Stats:
        """Statistics of the request and of each sequence; `known` are fields counted elsewhere."""
        per_row = tuple(_stats(self._rounds.get(seq.id, []), seq.cached_prompt_tokens) for seq in seqs)
        draft, verify, select = self._seconds
        drafted = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
        summed = ("num_new_tokens", "cached_prompt_tokens", *drafted)
        joined = ("per_step_drafted", "per_step_accepted")
        counts: dict[str, Any] = {name: sum(getattr(row, name) for row in per_row) for name in summed}
        counts |= {name: tuple(item for row in per_row for item in getattr(row, name)) for name in joined}
        counts |= {"draft_seconds": draft, "verify_seconds": verify, "select_seconds": select}
        return Stats(per_row=per_row, **counts, **known)


def _stats(rounds: Sequence[SequenceRound], cached: int) -> Stats:
    """The statistics of one sequence."""
    drafted = [round.drafted for round in rounds if round.drafted]
    accepted = [round.accepted for round in rounds if round.drafted]
    return Stats(
        num_new_tokens=sum(len(round.steps) for round in rounds),
        cached_prompt_tokens=cached,
        num_target_passes=len(rounds),
        num_spec_steps=len(drafted),
        num_draft_tokens=sum(drafted),
        num_accepted_draft_tokens=sum(accepted),
        per_step_drafted=tuple(drafted),
        per_step_accepted=tuple(accepted),
        finish_reasons=(_finish_reason(rounds),),
    )


def _finish_reason(rounds: Sequence[SequenceRound]) -> str:
    return next((round.finish for round in rounds if round.finish), "cancelled")


@plain_modes()
def finished(call: Call, recorder: Recorder, seconds: float) -> Generation:
    """The result of a call that ran to its end, which took `seconds`."""
    o, seqs, pad = call.options, _best(call), pad_id(call.options)
    new = [text for seq in seqs for text in seq.texts]
    padded = call.prompts.padded[:: o.copies].repeat_interleave(o.returned, 0)
    out = Generation(sequences=_sequences(padded, new, pad).to(seqs[0].device))
    if o.output_scores:
        out.scores = _per_token(seqs, "scores", pad)
    if o.output_logits:
        out.logits = _per_token(seqs, "logits", pad)
    _add_traces(out, call, seqs)
    if o.num_beams > 1:
        _add_beams(out, call)
    if o.num_samples is not None:
        out.sequences_scores = torch.tensor([_score(call, seq) for seq in seqs], device=seqs[0].device)
    reasons = [reason for seq in seqs for reason in seq.finish_reasons]
    return _described(out, call, recorder, seconds, seqs, new, reasons)


@plain_modes()
def unfinished(call: Call, recorder: Recorder, seconds: float) -> Generation:
    """The texts so far of a call that was cancelled; sequences that were cut off have the finish reason "cancelled"."""
    ids = [seq.id for seq in call.seqs]
    new = recorder.tokens(ids)
    out = Generation(sequences=_sequences(call.prompts.padded, new, pad_id(call.options)).to(call.seqs[0].device))
    return _described(out, call, recorder, seconds, call.seqs, new, recorder.finish_reasons(ids))


def _described(
    out: Generation,
    call: Call,
    recorder: Recorder,
    seconds: float,
    seqs: Sequence[RunningSequence],
    new: Sequence[list[int]],
    finish_reasons: Sequence[str],
) -> Generation:
    """`out` with `drafted`, `stats` and `texts` of the `new` tokens of `seqs`."""
    if call.options.num_beams == 1:
        out.drafted = recorder.drafted([seq.id for seq in seqs])
    request, drafter = call.request, call.drafter
    settings = {
        "strategy": call.strategy,
        "schedule": "none" if drafter is None else type(request.pacing.schedule).__name__.lower(),
        "backend": call.target.backend,
    }
    if drafter is not None and drafter.models:
        settings["draft_backend"] = ", ".join(dict.fromkeys(model.backend for model in drafter.models))
    out.stats = recorder.stats(
        call.seqs,
        num_target_passes=request.passes,
        seconds=seconds,
        finish_reasons=tuple(finish_reasons),
        lengths=list(map(len, new)),
        settings=settings,
        exactness=call.exactness,
    )
    if call.extras.tokenizer is not None:
        out.decode(call.extras.tokenizer, call.stops)
    return out


def _best(call: Call) -> list[RunningSequence]:
    """All sequences; of ranked samples the best of each prompt, the earlier of equals first."""
    o, seqs = call.options, call.seqs
    if o.num_samples is None:
        return seqs
    groups = [seqs[i : i + o.copies] for i in range(0, len(seqs), o.copies)]
    ranked = [sorted(group, key=lambda seq: _score(call, seq), reverse=True) for group in groups]
    return [seq for group in ranked for seq in group[: o.returned]]


def _score(call: Call, seq: RunningSequence) -> float:
    """The log-probability of a sample under the target: the mean over its tokens, or their sum with `ranking="sum"`."""
    total = sum(step.log_prob or 0.0 for step in seq.steps)
    return total if call.options.ranking == "sum" else total / len(seq.steps)


def _add_beams(out: Generation, call: Call) -> None:
    """Adds the beams that hypotheses went through, and with `output_scores` their scores, as transformers does."""
    o, searches = call.options, [seq for seq in call.seqs if seq.is_search]
    found = [hypothesis for seq in searches for hypothesis in seq.state.finished[: seq.returned]]
    device = call.seqs[0].device
    out.beam_indices = _beam_indices([h.origins for h in found], o.num_beams, o.returned).to(device)
    if o.output_trace:
        out.trace = [seq.history for seq in searches]
    if o.output_scores:
        out.sequences_scores = torch.tensor([h.score for h in found], device=device)


def _add_traces(out: Generation, call: Call, seqs: list[RunningSequence]) -> None:
    encoding = call.request.encoding
    prefix = "" if encoding is None else "decoder_"
    if call.options.output_hidden_states:
        out[f"{prefix}hidden_states"] = _traces(seqs, "hidden_states")
    if call.options.output_attentions:
        out[f"{prefix}attentions"] = _traces(seqs, "attentions")
        if encoding is not None:
            out.cross_attentions = _traces(seqs, "cross_attentions")
    if encoding is not None:
        for name in ("hidden_states", "attentions"):
            if (layers := getattr(encoding, name)) is not None:
                out[f"encoder_{name}"] = layers


def _sequences(padded: Tensor, new: Sequence[list[int]], pad: int) -> Tensor:
    """`[rows, width + longest]`: prompts as given, each row's new tokens, padding."""
    longest = max(map(len, new))
    return torch.cat([padded, torch.tensor([n + [pad] * (longest - len(n)) for n in new], dtype=torch.long)], 1)


def _beam_indices(origins: Sequence[Sequence[int]], beams: int, returned: int) -> Tensor:
    """`[rows, longest]` int32: the beam, numbered over the whole batch, that each token continued; -1 after the end."""
    longest = max(map(len, origins))
    offsets = [row // returned * beams for row in range(len(origins))]
    numbered = [[o + offset for o in own] for own, offset in zip(origins, offsets, strict=True)]
    return torch.tensor([own + [-1] * (longest - len(own)) for own in numbered], dtype=torch.int32)


def _per_token(seqs: Sequence[RunningSequence], name: str, pad: int) -> PerToken:
    """One `[rows, vocab]` per new token; a search has one row per beam.

    A finished sequence is certain of its padding: 0 there and -inf elsewhere.
    """
    values = [[_rows_of(getattr(step, name), 2, seq.width) for step in seq.steps] for seq in seqs]
    filler = torch.full_like(values[0][0], -torch.inf)  # sequences of a call have the same number of rows
    filler[:, pad : pad + 1] = 0.0  # some checkpoints pad with an id beyond their vocabulary
    return tuple(
        torch.cat([value[t] if t < len(value) else filler for value in values]) for t in range(max(map(len, values)))
    )


def _rows_of(value: Tensor, dims: int, width: int) -> Tensor:
    """`value` with rows as its first dimension; before the first token all beams share one."""
    value = value if value.dim() == dims else value[None]
    return value if len(value) == width else value.expand(width, *value.shape[1:])


def _traces(seqs: Sequence[RunningSequence], name: str) -> PerTokenAndLayer | None:
    """One tensor over all rows per new token and layer, aligned on the right and padded with zeros."""
    if getattr(seqs[0].traces[0], name) is None:
        return None
    dims = 3 if name == "hidden_states" else 4
    values = [
        [[_rows_of(layer, dims, seq.width) for layer in getattr(trace, name)] for trace in seq.traces] for seq in seqs
    ]
    longest = max(values, key=len)
    return tuple(
        tuple(
            _stacked([v[t][layer] if t < len(v) else torch.zeros_like(longest[t][layer]) for v in values])
            for layer in range(len(longest[t]))
        )
        for t in range(len(longest))
    )


def _stacked(tensors: list[Tensor]) -> Tensor:
    """Tensors `[rows, ...]` of different sizes one after the other, each aligned on the right in the largest size."""
    size = [max(t.shape[d] for t in tensors) for d in range(1, tensors[0].dim())]
    stacked = tensors[0].new_zeros(sum(map(len, tensors)), *size)
    begin = 0
    for t in tensors:
        corner = tuple(slice(full - part, None) for full, part in zip(size, t.shape[1:], strict=True))
        place = (slice(begin, begin + len(t)), *corner)
        stacked[place] = t
        begin += len(t)
    return stacked
