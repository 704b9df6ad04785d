"""The recipe of the package's Python-code pair: `python -m recipes python-code OUT`, seeded.

It takes about two hours on two cores. A deep, narrow target learns the standard library by next-token prediction (Muon
for matrices, AdamW for the rest): first as a stack of eight layers, then with the stack repeated three times (Du et al.
2024, "Stacking Your Transformers"). A two-layer draft, which starts from the target's first and last layer, is then
distilled from the target's distributions, on the same text and on the target's own continuations. `--size` makes wider
pairs the same way.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.course import Course, check_stage, save
from recipes.optimise import make_optimizers
from recipes.shapes import POSITIONS, VOCABULARY, WIDTHS, Shape, target_shape
from specdec import SpecGenerator
from specdec.bench.prompts import held_out_prompts, source_files

END_OF_TEXT = "<|endoftext|>"
SHORT, LONG = 256, POSITIONS  # training windows, tokens; the long ones come last


SEEDLING_LAYERS = 8
_NEEDS = {"draft": ("target",), "polish": ("target", "draft"), "evaluate": ("target", "draft")}  # of each stage
DRAFT_LAYERS = (0, 23)  # of the target, where the draft's two layers start from


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCABULARY` entries, learned on the training files; id 0 ends a text."""
    bpe = ByteLevelBPETokenizer()
    texts = (text for _, text in source_files(held_out=False))
    bpe.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=[END_OF_TEXT], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def tokenize(tokenizer: PreTrainedTokenizerFast, *, held_out: bool) -> np.ndarray:
    """All files of one side of the split as one stream of ids, each file followed by the end-of-text id."""
    texts = [text for _, text in source_files(held_out=held_out)]
    random.Random(0).shuffle(texts)
    encoded = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return np.array([i for e in encoded for i in (*e.ids, tokenizer.eos_token_id)], dtype=np.int64)


def windows(
    stream: np.ndarray, steps: int, long_steps: int, seed: int, device: torch.device, tokens: int = 8192
) -> Iterator[Tensor]:
    """Batches of random windows, `[rows, length + 1]`: short ones, and for the last `long_steps` long ones."""
    generator = np.random.default_rng(seed)
    for step in range(steps):
        length = LONG if step >= steps - long_steps else SHORT
        starts = generator.integers(0, len(stream) - length - 1, tokens // length)
        yield torch.from_numpy(np.stack([stream[s : s + length + 1] for s in starts])).to(device)


def grow(small: LlamaForCausalLM, shape: Shape) -> LlamaForCausalLM:
    """A deeper model whose layers repeat those of `small` in order."""
    large = shape.build().to(small.device)
    for copy in range(0, shape.layers, len(small.model.layers)):
        for i, layer in enumerate(small.model.layers):
            large.model.layers[copy + i].load_state_dict(layer.state_dict())
    large.model.embed_tokens.load_state_dict(small.model.embed_tokens.state_dict())
    large.model.norm.load_state_dict(small.model.norm.state_dict())
    return large


def first_draft(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """A model in float32 with copies of the target's layers `DRAFT_LAYERS` and of all its other weights."""
    draft = Shape(len(DRAFT_LAYERS), target.config.hidden_size).build().to(target.device)
    for layer, number in zip(draft.model.layers, DRAFT_LAYERS, strict=True):
        layer.load_state_dict(target.model.layers[number].state_dict())
    draft.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    draft.model.norm.load_state_dict(target.model.norm.state_dict())
    return draft


def in_bfloat16(loss_of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The loss compiled, its matrix products in bf16."""
    fast = torch.compile(loss_of, dynamic=False)

    def loss(batch: Tensor) -> Tensor:
        with torch.autocast(batch.device.type, torch.bfloat16):
            return fast(batch)

    return loss


def checker(model: LlamaForCausalLM, held_out: np.ndarray, folder: Path) -> Callable[[], str]:
    """Saves the model and tells its loss on held-out text."""

    def check() -> str:
        save(model, folder)
        return f"loss {held_out_loss(model, held_out):.3f}"

    return check


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, stream: np.ndarray, count: int = 32) -> float:
    """Mean next-token loss in nats over `count` evenly spaced held-out windows of 256 tokens."""
    device = model.device
    starts = np.linspace(0, len(stream) - SHORT - 1, count).astype(int)
    losses = []
    for s in starts:
        ids = torch.from_numpy(stream[s : s + SHORT + 1]).to(device)[None]
        losses.append(F.cross_entropy(model(ids[:, :-1]).logits[0].float(), ids[0, 1:]).item())
    return sum(losses) / len(losses)


def continuations(target: LlamaForCausalLM, stream: np.ndarray, rounds: int, seed: int) -> np.ndarray:
    """Training text continued by the target, half of the rounds greedily and half by sampling, as one stream."""
    generator = np.random.default_rng(seed)
    writer, pieces = SpecGenerator(target), []
    for r in range(rounds):
        starts = generator.integers(0, len(stream) - 128, 64)
        prompts = torch.from_numpy(np.stack([stream[s : s + 128] for s in starts])).to(target.device)
        how = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": r} if r % 2 else {"do_sample": False}
        out = writer.generate(prompts, max_new_tokens=256, eos_token_id=None, **how)
        assert out.sequences is not None
        pieces.append(out.sequences.cpu().numpy().reshape(-1))
        print(f"continuations {r + 1}/{rounds}", flush=True)
    return np.concatenate(pieces)


def optimizers_of(
    model: LlamaForCausalLM, muon_rate: float = 0.004, adam_rate: float = 0.002
) -> list[torch.optim.Optimizer]:
    """Those of the base size; matrices learn more slowly the wider they are (Yang et al. 2021, arXiv 2203.03466)."""
    return make_optimizers(model, muon_rate * WIDTHS["base"] / model.config.hidden_size, adam_rate)


def train_target(
    out: Path, shape: Shape, seedling_steps: int, target_steps: int, device: torch.device
) -> LlamaForCausalLM:
    """Trains the target and saves it with its tokenizer under `out/target`."""
    tokenizer = train_tokenizer()
    tokenizer.save_pretrained(out / "target")
    stream, held = tokenize(tokenizer, held_out=False), tokenize(tokenizer, held_out=True)
    print(f"{len(stream)} training tokens, {len(held)} held out", flush=True)
    torch.manual_seed(0)
    model = Shape(SEEDLING_LAYERS, shape.width).build().to(device)
    folder = out / "target"
    batches = windows(stream, seedling_steps, 0, 8, device)
    loss, check = in_bfloat16(partial(next_token_loss, model)), checker(model, held, folder)
    Course("seedling", batches, loss, seedling_steps, 1.0, check, optimizers_of(model)).run()
    model = grow(model, shape)
    batches = windows(stream, target_steps, target_steps // 10, 6, device)
    loss, check = in_bfloat16(partial(next_token_loss, model)), checker(model, held, folder)
    Course("target", batches, loss, target_steps, 0.4, check, optimizers_of(model)).run()
    return model


def next_token_loss(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """Cross-entropy of `batch` `[rows, length + 1]`."""
    logits = model(batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def distillation_loss(target: LlamaForCausalLM, draft: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """Cross-entropy of the draft's next-token distributions against the target's, over `batch` `[rows, length + 1]`."""
    ids = batch[:, :-1]
    with torch.no_grad():
        p = torch.softmax(target(ids, use_cache=False).logits.float(), -1)
    log_q = torch.log_softmax(draft(ids, use_cache=False).logits.float(), -1)
    return -(p * log_q).sum(-1).mean()


def train_draft(out: Path, rounds: int, steps: int, device: torch.device) -> None:
    """Distils the draft from the target in `out/target`, on its own text and the library's, and saves it."""
    lesson = Lesson.prepare(out, rounds, device, seed=2)
    lesson.tokenizer.save_pretrained(out / "draft")
    model = first_draft(lesson.target)
    real = windows(lesson.stream, steps, 0, 4, device, tokens=4096)
    own = windows(lesson.own_text, steps, steps // 10, 5, device, tokens=4096)
    batches = (pair[step % 2] for step, pair in enumerate(zip(real, own, strict=True)))
    lesson.teach(model, batches, steps, 0.4, optimizers_of(model), out / "draft")


def polish_draft(out: Path, rounds: int, steps: int, device: torch.device) -> None:
    """Distils the draft in `out/draft` further, on new text of the target and, for far positions, long real windows."""
    lesson = Lesson.prepare(out, rounds, device, seed=6)
    model = LlamaForCausalLM.from_pretrained(out / "draft", dtype=torch.float32).to(device)
    far = windows(lesson.stream, steps, steps, 8, device, tokens=4096)
    own = windows(lesson.own_text, steps, 0, 7, device, tokens=4096)
    batches = (pair[step % 10 < 9] for step, pair in enumerate(zip(far, own, strict=True)))
    lesson.teach(model, batches, steps, 0.3, optimizers_of(model, 0.003, 0.0015), out / "draft")


@dataclass(frozen=True)
class Lesson:
    """What a draft learns from: the target, the library's training and held-out text, and text of the target's own."""

    target: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    stream: np.ndarray
    held_out: np.ndarray
    own_text: np.ndarray

    @classmethod
    def prepare(cls, out: Path, rounds: int, device: torch.device, seed: int) -> Lesson:
        """Lets the target in `out/target` write."""
        tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "target")
        stream, held_out = tokenize(tokenizer, held_out=False), tokenize(tokenizer, held_out=True)
        target = LlamaForCausalLM.from_pretrained(out / "target", dtype=torch.bfloat16).to(device).eval()
        return cls(target, tokenizer, stream, held_out, continuations(target, stream, rounds, seed))

    def teach(
        self,
        draft: LlamaForCausalLM,
        batches: Iterator[Tensor],
        steps: int,
        decay_from: float,
        optimizers: Sequence[torch.optim.Optimizer],
        folder: Path,
    ) -> None:
        """Brings the draft's distributions towards the target's, and saves it in `folder`."""
        loss = in_bfloat16(partial(distillation_loss, self.target, draft))
        check = checker(draft, self.held_out, folder)
        Course("draft", batches, loss, steps, decay_from, check, optimizers).run()


@torch.no_grad()
def agreement(target: LlamaForCausalLM, draft: LlamaForCausalLM, prompts: list[Tensor], tokens: int = 96) -> float:
    """Share of the target's greedy tokens that the draft, given the same prefix, would have guessed."""
    hits = total = 0
    for ids in prompts:
        out = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        guesses = draft(out[:, :-1]).logits.argmax(-1)[:, ids.shape[1] - 1 :]
        hits += int((guesses == out[:, ids.shape[1] :]).sum())
        total += guesses.shape[1]
    return hits / total


def evaluate(out: Path) -> dict[str, float]:
    """Held-out losses and greedy agreement of the saved pair, printed and written to `out/card.json`."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "target")
    held = tokenize(tokenizer, held_out=True)
    target, draft = (LlamaForCausalLM.from_pretrained(out / n, dtype=torch.float32).eval() for n in ("target", "draft"))
    prompts = [tokenizer(p, return_tensors="pt").input_ids for p in held_out_prompts(16)]
    card = {
        "target_parameters": sum(p.numel() for p in target.parameters()),
        "draft_parameters": sum(p.numel() for p in draft.parameters()),
        "target_held_out_loss": round(held_out_loss(target, held), 4),
        "draft_held_out_loss": round(held_out_loss(draft, held), 4),
        "uniform_loss": round(math.log(VOCABULARY), 4),
        "greedy_agreement": round(agreement(target, draft, prompts), 4),
    }
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    print(json.dumps(card, indent=2), flush=True)
    return card


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the recipe, or one stage of it."""
    parser = argparse.ArgumentParser("python -m recipes python-code", description=__doc__)
    parser.add_argument("out", type=Path, help="folder that receives target/, draft/ and card.json")
    parser.add_argument("--size", default="base", help=f"{', '.join(WIDTHS)} or a number of weights like 300M [base]")
    parser.add_argument("--stage", choices=("target", "draft", "polish", "evaluate"), help="run one stage only")
    parser.add_argument("--seedling-steps", type=int, default=1200)
    parser.add_argument("--target-steps", type=int, default=500)
    parser.add_argument("--draft-rounds", type=int, default=16, help="batches of text that the target writes for it")
    parser.add_argument("--draft-steps", type=int, default=1500)
    parser.add_argument("--polish-rounds", type=int, default=32, help="the same, for its last lesson")
    parser.add_argument("--polish-steps", type=int, default=1200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    try:
        shape = target_shape(options.size)
    except ValueError:
        sizes = f"{', '.join(WIDTHS)} or a number like 300M, between 1M and 9B"
        parser.error(f"--size must be one of {sizes}, got {options.size!r}")
    out, device = options.out, torch.device(options.device)
    check_stage(parser, options.stage, out, _NEEDS)
    if options.stage in (None, "target"):
        train_target(out, shape, options.seedling_steps, options.target_steps, device)
    if options.stage in (None, "draft"):
        train_draft(out, options.draft_rounds, options.draft_steps, device)
    if options.stage in (None, "polish"):
        polish_draft(out, options.polish_rounds, options.polish_steps, device)
    if options.stage in (None, "evaluate"):
        evaluate(out)


if __name__ == "__main__":
    main()
