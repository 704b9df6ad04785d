"""Answers the cases of group.json, constrained.json and contrastive.json anew, with transformers 4.49. From the root:

python -m tests.golden.make
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DisjunctiveConstraint, PhrasalConstraint, StoppingCriteria
from transformers.generation import utils
from transformers.generation.beam_search import BeamSearchScorer, ConstrainedBeamSearchScorer

from tests.golden import models

HERE = Path(__file__).parent
VERSION = "4.49.0"
JITTER = 1e-5  # relative noise on every weight; a case that it changes was decided by a near-tie
STEPS, TOP = (0, 1, 4), 3  # of `scores`: which steps, and how many of the largest entries
SCORED = 3  # every third case keeps entries of `scores`
CRASHED = "4.49 raises RuntimeError here (beams with and without indices); made without beam_indices"


def main() -> None:
    if transformers.__version__ != VERSION:
        raise SystemExit(f"make.py needs transformers {VERSION}, this is {transformers.__version__}")
    transformers.logging.set_verbosity_error()
    utils.BeamSearchScorer, utils.ConstrainedBeamSearchScorer = GroupScorer, ConstrainedScorer
    torch.set_num_threads(1)
    plain = {name: models.build(name) for name in models.NAMES}
    shaken = [{name: _shaken(model, seed) for name, model in plain.items()} for seed in range(3)]
    checks: dict[str, list[float]] = {}
    for strategy in ("group", "constrained", "contrastive"):
        kept = []
        for number, case in enumerate(json.loads((HERE / f"{strategy}.json").read_text())["cases"]):
            name = case["model"]
            if name not in checks:
                checks[name] = models.check(plain[name], case)
            result = _run(plain[name], case, strategy)
            again = [_run(side[name], case, strategy) for side in shaken]
            if any(_decisions(other) != _decisions(result) for other in again):
                print(f"{strategy} {number}: a near-tie, dropped")
                continue
            kept.append(_record(case, result, scores=number % SCORED == 0))
        lines = ",\n".join("  " + json.dumps(record, separators=(",", ":")) for record in kept)
        head = json.dumps({"transformers": VERSION, "check": checks})[:-1]
        (HERE / f"{strategy}.json").write_text(f'{head}, "cases": [\n{lines}\n]}}\n')
        print(f"{strategy}: {len(kept)} cases")


class Watch(StoppingCriteria):
    """Never stops; keeps, after every step, the beams, the rows that they came from, and which groups are done."""

    def __init__(self) -> None:
        self.rows: list[list[list[int]]] = []
        self.parents: list[list[int]] = []
        self.done: list[list[bool]] = []
        self.crashed = False

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.rows.append(input_ids.tolist())
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def reorder(self, model: Any, cache: Any, parents: Tensor) -> Any:
        self.parents.append(parents.tolist())
        return type(model)._temporary_reorder_cache(model, cache, parents)


class GroupScorer(BeamSearchScorer):
    watch: Watch

    def process(self, *args: Any, group_index: int = 0, **kwargs: Any) -> Any:
        out = super().process(*args, group_index=group_index, **kwargs)
        if group_index == self.num_beam_groups - 1:
            self.watch.done.append(self._done.tolist())
        return out


class ConstrainedScorer(ConstrainedBeamSearchScorer):
    watch: Watch

    def process(self, *args: Any, **kwargs: Any) -> Any:
        out = super().process(*args, **kwargs)
        self.watch.done.append(self._done.tolist())
        return out

    def finalize(self, *args: Any, beam_indices: Any = None, **kwargs: Any) -> Any:
        """4.49 raises where a beam with indices is returned before one without: then none has them."""
        before = copy.deepcopy(self._beam_hyps)
        try:
            return super().finalize(*args, beam_indices=beam_indices, **kwargs)
        except RuntimeError:
            self.watch.crashed = True
            self._beam_hyps = before
            for hypotheses in before:
                hypotheses.beams = [(score, tokens, None) for score, tokens, _ in hypotheses.beams]
            return super().finalize(*args, beam_indices=None, **kwargs)


def _run(model: Any, case: dict[str, Any], strategy: str) -> dict[str, Any]:
    kwargs = dict(case["kwargs"])
    if "constraints" in kwargs:
        words = kwargs["constraints"]
        phrases = [PhrasalConstraint(ids) for ids in words.get("phrasal", [])]
        kwargs["constraints"] = [*phrases, *(DisjunctiveConstraint(ids) for ids in words.get("disjunctive", []))]
    inputs = models.inputs(case)
    watch = GroupScorer.watch = ConstrainedScorer.watch = Watch()
    model._temporary_reorder_cache = partial(watch.reorder, model)
    if model.config.is_encoder_decoder:
        model.prepare_inputs_for_generation = partial(_masked, model)
    out = model.generate(
        **inputs, **kwargs, stopping_criteria=[watch], do_sample=False, return_dict_in_generate=True, output_scores=True
    )
    start = inputs["input_ids"].shape[1]  # where generated tokens begin
    if model.config.is_encoder_decoder:
        start = inputs["decoder_input_ids"].shape[1] if "decoder_input_ids" in inputs else 1
    eos = kwargs.get("eos_token_id", model.generation_config.eos_token_id)
    eos = [] if eos is None else [eos] if isinstance(eos, int) else eos
    result: dict[str, Any] = {"sequences": out.sequences.tolist(), "scores": out.scores}
    if strategy == "contrastive":
        ends = [[i for i, token in enumerate(row[start:], 1) if token in eos] for row in result["sequences"]]
        result["lengths"] = [min([*found, len(out.scores)]) for found in ends]
        return result
    result["sequences_scores"] = out.sequences_scores.tolist()
    result["crashed"] = watch.crashed
    result["paths"] = _paths(result, watch, start, eos, kwargs, cumulative=strategy == "constrained")
    group = kwargs["num_beams"] // kwargs.get("num_beam_groups", 1)
    running = [sum(not step[row // group] for step in watch.done) for row in range(len(watch.parents[0]))]
    result["lengths"] = [min(steps + 1, len(out.scores)) for steps in running]
    return result


def _masked(model: Any, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> dict[str, Any]:
    """4.49.0 loses the encoder's mask on the way to cross-attention; other versions, and this, pass it on."""
    inputs = type(model).prepare_inputs_for_generation(model, input_ids, attention_mask=attention_mask, **kwargs)
    return {**inputs, "attention_mask": attention_mask}


def _paths(
    result: dict[str, Any], watch: Watch, start: int, eos: list[int], kwargs: dict[str, Any], *, cumulative: bool
) -> list[list[int]]:
    """For each returned sequence, the row of `scores[step]` each token came from.

    4.49's own beam_indices are wrong for groups. Here the beams are followed through the reordering of the cache,
    and of the beams that spell the sequence the one is taken whose scores give its sequence score.
    """
    beams, width = kwargs["num_beams"], kwargs.get("num_return_sequences", 1)
    group = beams // kwargs.get("num_beam_groups", 1)
    paths, taken = [], []
    for number, (sequence, score) in enumerate(zip(result["sequences"], result["sequences_scores"], strict=True)):
        first = number // width * beams
        options = []
        for path, tokens in _spelling(watch, range(first, first + beams), sequence[start:], start, eos, group):
            rows = zip(path, tokens, strict=True)
            entries = [float(result["scores"][step][row, token]) for step, (row, token) in enumerate(rows)]
            total = entries[-1] if cumulative else sum(entries)
            total /= len(path) ** kwargs.get("length_penalty", 1.0)
            error = 0.0 if total == score else abs(total - score)  # both may be -inf
            if (path, tokens) not in taken:
                options.append((round(error, 4), -path[-1], path, tokens))
        error, _, path, tokens = min(options)  # of equal beams, those of later groups are returned first
        if error:
            raise AssertionError(f"no beam spells {sequence} with the score {score}")
        taken.append((path, tokens))
        paths.append(path)
    return paths


def _spelling(
    watch: Watch, rows: range, generated: list[int], start: int, eos: list[int], group: int
) -> Iterator[tuple[list[int], list[int]]]:
    """The beams among `rows` that may have become `generated`, as (path, tokens): open at the end, or ended by EOS."""
    paths: list[list[list[int]]] = [[[] for _ in watch.parents[0]]]  # after each step, for each row
    for step in watch.parents:
        paths.append([[*paths[-1][parent], parent] for parent in step])
    for row in rows:
        if len(watch.rows) == len(watch.parents) and watch.rows[-1][row][start:] == generated:
            yield paths[-1][row], generated
        for length, token in enumerate(generated):
            before = watch.rows[length - 1][row][start:] if length else []
            real = length > 0 or row % group == 0  # at first the beams of a group are copies
            if real and token in eos and before == generated[:length]:
                for ending in eos:
                    yield [*paths[length][row], row], [*before, ending]


def _record(case: dict[str, Any], result: dict[str, Any], scores: bool) -> dict[str, Any]:
    asked = ("model", "kwargs", "prompt", "attention_mask", "decoder_prompt", "comment")
    record: dict[str, Any] = {key: case[key] for key in asked if key in case}
    if result.get("crashed") and CRASHED not in case.get("comment", ""):
        record["comment"] = "; ".join([*([case["comment"]] if "comment" in case else []), CRASHED])
    for key in ("sequences", "sequences_scores", "paths"):
        if key in result:
            record[key] = _rounded(result[key])
    if scores:
        record["scores"] = _top(result["scores"], result["lengths"])
    return record


def _top(scores: tuple[Tensor, ...], lengths: list[int]) -> list[list[Any]]:
    """[step, row, ids, values] of the largest entries, where the row still runs and is not a copy of the first."""
    entries = []
    for step in (step for step in STEPS if step < len(scores)):
        for row, values in enumerate(scores[step]):
            top = values.topk(TOP)
            if step < lengths[row] and top.values[0] > -1e8:
                entries.append([step, row, top.indices.tolist(), _rounded(top.values.tolist())])
    return entries


def _shaken(model: Any, seed: int) -> Any:
    """The same model in float64 (seed 0), or with noise on its weights."""
    if seed == 0:
        config = model.config  # 4.49's sdpa masks overflow in float64 for GPT-2, its eager ones for Llama
        attention = "eager" if config.model_type == "gpt2" else config._attn_implementation
        double = type(model)._from_config(config, attn_implementation=attention).double().eval()
        double.load_state_dict(model.state_dict())
        double.generation_config = model.generation_config
        double.register_forward_hook(_single)
        return double
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + JITTER * torch.randn(parameter.shape, generator=generator))
    return model


def _single(model: Any, inputs: Any, outputs: Any) -> None:
    outputs.logits = outputs.logits.float()


def _decisions(result: dict[str, Any]) -> tuple[Any, ...]:
    return result["sequences"], result.get("paths")


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 6) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
