"""A model for EleutherAI's lm-evaluation-harness: the target's scores, generative tasks in fewer passes.

    python -m specdec.integrations.lm_eval run --model specdec --model_args pretrained=TARGET,draft=DRAFT --tasks gsm8k

`model_args` are `draft`, the arguments of the harness' `hf` model and the options of `specdec.custom_generate`.
The `hf` model computes log-likelihoods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.core.stats import Stats
from specdec.decoding.stopping import StopTexts
from specdec.errors import SpecdecError
from specdec.integrations.custom_generate import OPTIONS, custom_generate
from specdec.options import bundled_models
from specdec.options.fields import pop_fields

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    reason = f"the harness is not complete ({error}): pip install -c constraints.txt -e '.[harness]'"
    if __name__ == "__main__":
        raise SystemExit(f"error: {reason}") from None
    raise SpecdecError(reason) from error

_LOADING = ("backend", "exactness")


@register_model("specdec")
class SpecdecLM(HFLM):  # type: ignore[misc]
    """The harness' `hf` model, decoding with a draft.

    `pretrained`, `draft`: models, ids, folders or zoo:NAME; `options`: of `specdec.custom_generate` and `hf`.
    `runs`: the statistics of every decoded batch.
    """

    def __init__(self, pretrained: Any, draft: Any = None, **options: Any) -> None:
        hook_options = pop_fields(options, (*OPTIONS, *_LOADING))
        if isinstance(pretrained, str):
            pretrained = bundled_models.locate(pretrained, "target", "pretrained")
        super().__init__(pretrained=pretrained, **options)
        self._hook = custom_generate(draft, tokenizer=self.tokenizer, **hook_options)
        self.runs: list[Stats] = []

    def _model_generate(self, context: Tensor, max_length: int, stop: Sequence[str], **options: Any) -> Tensor:
        """`context` and new tokens, `[rows, length]`, until one of `stop` occurs; the harness cuts there."""
        if options.setdefault("temperature", 0.0) == 0.0:
            options["do_sample"] = False
            del options["temperature"]
        mask = options.setdefault("attention_mask", torch.ones_like(context))
        prompts = [row[row_mask.bool()].tolist() for row, row_mask in zip(context, mask, strict=True)]
        sequences: Tensor = self.model.generate(
            input_ids=context,
            max_length=max_length,
            stopping_criteria=[stop_texts(self.tokenizer, stop, prompts)],
            pad_token_id=self.tokenizer.pad_token_id,
            custom_generate=self._hook,
            **options,
        )
        if self._hook.stats is not None:
            self.runs.append(self._hook.stats)
        return sequences


def stop_texts(tokenizer: Any, strings: Sequence[str], prompts: Sequence[list[int]]) -> StopTexts:
    """A stopping criterion: one of `strings` occurs after the row's prompt, one of `prompts`.

    The harness' own criterion needs whole padded batches; rows come one at a time, without padding.
    """
    # The longest matching prompt: a missed end costs time, a wrong one costs text.
    longest = sorted(prompts, key=len, reverse=True)

    def length(ids: Tensor) -> int:
        return next((len(prompt) for prompt in longest if ids[: len(prompt)].tolist() == prompt), 0)

    return StopTexts(tokenizer.decode, [string for string in strings if string], length)


if __name__ == "__main__":
    cli_evaluate()
