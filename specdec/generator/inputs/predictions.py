"""`prediction`: texts that outputs may resemble, for drafts that copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.errors import OptionError
from specdec.generator.inputs.prompts import Prompts
from specdec.generator.inputs.token_ids import read_ids
from specdec.models import LanguageModel


def with_predictions(prompts: Prompts, prediction: Any, target: LanguageModel, tokenizer: Any) -> Prompts:
    """The prompts with their predictions: one text or row of ids, or a list with one or None for each prompt.

    Raises OptionError for another type or number of predictions, and for text without a tokenizer.
    """
    if prediction is None:
        return prompts
    mixed = isinstance(prediction, list | tuple) and any(item is None or isinstance(item, str) for item in prediction)
    items = (
        [prediction] if isinstance(prediction, str) else prediction if mixed else _prediction_ids(prediction, target)
    )
    if len(items) != len(prompts.rows):
        expected = f"one text or list of ids for each of {len(prompts.rows)} prompts"
        raise OptionError.of("prediction", expected, len(items), "pass None for a prompt without one")
    found = [item if item is None else _prediction(item, target, tokenizer) for item in items]
    rows = [replace(row, prediction=ids) for row, ids in zip(prompts.rows, found, strict=True)]
    return replace(prompts, rows=rows)


def _prediction(item: Any, target: LanguageModel, tokenizer: Any) -> list[int]:
    if not isinstance(item, str):
        [ids] = _prediction_ids(item, target)
        return ids
    if tokenizer is None:
        raise OptionError("a text `prediction` needs a tokenizer: pass `tokenizer=` to SpecGenerator, or token ids")
    ids = list(tokenizer.encode(item, add_special_tokens=False))
    if not ids:
        raise OptionError("`prediction` is an empty text: leave it out, or pass None for a prompt without one")
    return ids


def _prediction_ids(value: Any, target: LanguageModel) -> list[list[int]]:
    return read_ids("prediction", value, {}, target).kept
