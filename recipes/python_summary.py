"""The recipe of the package's summary pair: `python -m recipes python-summary OUT`, seeded.

A small Pegasus learns to write, for a Python function without its docstring, the signature and the first sentence of
the docstring. It reads the standard library of the running interpreter and the packages that torch and transformers
bring, and is judged on modules of the former that it never saw. It starts from the token embeddings of the package's
Python-code model, and repeats its decoder three times half way. The draft, with half the encoder and a one-layer
decoder, is distilled from it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AddedToken,
    LlamaForCausalLM,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from recipes.course import Course, check_stage, save
from recipes.functions import Example, held_out_examples, installed_examples, training_examples
from recipes.optimise import make_optimizers
from specdec.options.bundled_models import pair

WIDTH, INNER, HEADS = 192, 512, 3  # the width is the Python-code model's
POSITIONS = 1024
SOURCE, SUMMARY = 224, 64  # tokens read and written in training
IGNORED = -100
PAD = "<|pad|>"
BATCH = 2048  # source tokens


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The Python-code pair's tokenizer with a padding token."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair("python-code").target, model_max_length=POSITIONS)
    tokenizer.add_special_tokens({"pad_token": AddedToken(PAD, special=True)})
    return tokenizer


@dataclass(frozen=True)
class Shape:
    """Layers of the encoder and of the decoder."""

    encoder_layers: int
    decoder_layers: int

    def build(self, tokenizer: PreTrainedTokenizerFast) -> PegasusForConditionalGeneration:
        """A freshly initialised model of this shape."""
        config = PegasusConfig(
            vocab_size=len(tokenizer),
            d_model=WIDTH,
            encoder_layers=self.encoder_layers,
            decoder_layers=self.decoder_layers,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=INNER,
            decoder_ffn_dim=INNER,
            max_position_embeddings=POSITIONS,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            scale_embedding=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            forced_eos_token_id=None,
            decoder_start_token_id=tokenizer.pad_token_id,
        )
        model = PegasusForConditionalGeneration._from_config(config, attn_implementation="eager")
        model.generation_config.max_new_tokens = SUMMARY
        return model


SEEDLING = Shape(4, 4)
TARGET = Shape(4, 12)
DRAFT = Shape(2, 1)


@torch.no_grad()
def warm_up(model: PegasusForConditionalGeneration) -> None:
    """Starts from the embeddings of the Python-code model, and with a decoder that copies.

    The embeddings are small enough to leave room for positions. Where the decoder looks at the encoder, queries and
    keys begin alike, so it looks at its own position, and the output undoes the values, so it sees the token there.
    """
    known = LlamaForCausalLM.from_pretrained(pair("python-code").target, dtype=torch.float32).model.embed_tokens.weight
    model.model.shared.weight[: len(known)].copy_(known * (0.03 / known.std()))
    for layer in model.model.decoder.layers:
        look = layer.encoder_attn
        nn.init.normal_(look.k_proj.weight, std=0.05)
        nn.init.normal_(look.v_proj.weight, std=0.05)
        look.q_proj.weight.copy_(look.k_proj.weight)
        look.out_proj.weight.copy_(look.v_proj.weight.T)


@dataclass(frozen=True)
class Batch:
    """Sources `[rows, source tokens]` with their mask, and labels `[rows, summary tokens]`, `IGNORED` past the end."""

    ids: Tensor
    mask: Tensor
    labels: Tensor


def collate(rows: Sequence[tuple[list[int], list[int]]], pad: int) -> Batch:
    """Pads sources and labels on the right."""
    ids = torch.full((len(rows), max(len(s) for s, _ in rows)), pad)
    labels = torch.full((len(rows), max(len(t) for _, t in rows)), IGNORED)
    for row, (source, summary) in enumerate(rows):
        ids[row, : len(source)] = torch.tensor(source)
        labels[row, : len(summary)] = torch.tensor(summary)
    return Batch(ids, (ids != pad).long(), labels)


def encode(tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]) -> list[tuple[list[int], list[int]]]:
    """Source and label ids."""
    sources = tokenizer([e.source for e in examples], truncation=True, max_length=SOURCE).input_ids
    summaries = tokenizer([e.summary for e in examples], truncation=True, max_length=SUMMARY).input_ids
    return [(s, [*t, tokenizer.eos_token_id]) for s, t in zip(sources, summaries, strict=True)]


@dataclass(frozen=True)
class Material:
    """Tokenizer, training rows of the standard library and of installed packages, and held-out rows."""

    tokenizer: PreTrainedTokenizerFast
    library: list[tuple[list[int], list[int]]]
    installed: list[tuple[list[int], list[int]]]
    held_out: list[tuple[list[int], list[int]]]

    @classmethod
    def prepare(cls) -> Material:
        """Reads the standard library and the packages."""
        tokenizer = make_tokenizer()
        library, installed = (
            list({(e.source, e.sentence): e for e in found}.values())
            for found in (training_examples(), installed_examples())
        )
        return cls(
            tokenizer, encode(tokenizer, library), encode(tokenizer, installed), encode(tokenizer, held_out_examples())
        )

    def batches(self, steps: int, seed: int) -> Iterator[Batch]:
        """Yields `steps` batches of about `BATCH` source tokens, rows of one length together.

        Once through everything, half of the rows are the standard library's.
        """
        random = np.random.default_rng(seed)
        made = 0
        while made < steps:
            count = min(len(self.installed), len(self.library))
            shown = [self.installed[i] for i in random.choice(len(self.installed), count, replace=False)]
            rows = sorted([*self.library, *shown], key=lambda row: len(row[0]) + random.uniform(0, 8))
            groups: list[list[tuple[list[int], list[int]]]] = [[]]
            for row in rows:
                if (len(groups[-1]) + 1) * len(row[0]) > BATCH or len(groups[-1]) == 32:
                    groups.append([])
                groups[-1].append(row)
            for i in random.permutation(len(groups))[: steps - made]:
                made += 1
                yield collate(groups[i], self.tokenizer.pad_token_id)


def logits_of(model: PegasusForConditionalGeneration, batch: Batch) -> Tensor:
    """Logits `[rows, summary tokens, vocabulary]` before each label."""
    start = model.config.decoder_start_token_id
    given = F.pad(batch.labels.masked_fill(batch.labels == IGNORED, start), (1, -1), value=start)
    with torch.autocast("cpu", torch.bfloat16):
        return model(
            input_ids=batch.ids, attention_mask=batch.mask, decoder_input_ids=given, use_cache=False
        ).logits.float()


def summary_loss(model: PegasusForConditionalGeneration, batch: Batch) -> Tensor:
    """Cross-entropy of the labels."""
    return F.cross_entropy(logits_of(model, batch).flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)


def distillation_loss(
    target: PegasusForConditionalGeneration, draft: PegasusForConditionalGeneration, batch: Batch
) -> Tensor:
    """Cross-entropy of the draft's distributions against the target's at every asked position."""
    with torch.no_grad():
        p = torch.softmax(logits_of(target, batch), -1)
    log_q = torch.log_softmax(logits_of(draft, batch), -1)
    return -(p * log_q).sum(-1)[batch.labels != IGNORED].mean()


def grow(
    small: PegasusForConditionalGeneration,
    large: PegasusForConditionalGeneration,
    encoder: Sequence[int],
    decoder: Sequence[int],
) -> None:
    """Copies `small` into `large`: embeddings, norms, these layers of encoder and decoder in this order."""
    large.model.shared.load_state_dict(small.model.shared.state_dict())
    for ours, theirs, layers in (
        (large.model.encoder, small.model.encoder, encoder),
        (large.model.decoder, small.model.decoder, decoder),
    ):
        ours.layer_norm.load_state_dict(theirs.layer_norm.state_dict())
        for layer, source in zip(ours.layers, layers, strict=True):
            layer.load_state_dict(theirs.layers[source].state_dict())


def checker(model: PegasusForConditionalGeneration, folder: Path, material: Material) -> Callable[[], str]:
    """Saves the model and tells the loss per token of held-out summaries."""
    rows = sorted(material.held_out, key=lambda row: len(row[0]))[::5]
    batches = [collate(rows[i : i + 32], material.tokenizer.pad_token_id) for i in range(0, len(rows), 32)]

    @torch.no_grad()
    def check() -> str:
        save(model, folder)
        return f"loss {sum(summary_loss(model, b).item() for b in batches) / len(batches):.4f}"

    return check


def train_target(out: Path, material: Material, seedling_steps: int, steps: int) -> None:
    """Trains the target and writes it under `out/target`."""
    folder = out / "target"
    material.tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    seedling = SEEDLING.build(material.tokenizer)
    warm_up(seedling)
    batches, check = material.batches(seedling_steps, 2), checker(seedling, out / "seedling", material)
    loss = partial(summary_loss, seedling)
    Course("seedling", batches, loss, seedling_steps, 0.9, check, make_optimizers(seedling)).run()
    model = TARGET.build(material.tokenizer)
    grow(
        seedling,
        model,
        range(SEEDLING.encoder_layers),
        [i % SEEDLING.decoder_layers for i in range(TARGET.decoder_layers)],
    )
    batches, check = material.batches(steps, 3), checker(model, folder, material)
    Course("target", batches, partial(summary_loss, model), steps, 0.2, check, make_optimizers(model)).run()


def train_draft(out: Path, material: Material, steps: int) -> None:
    """Distils the draft from `out/target` and writes it under `out/draft`."""
    material.tokenizer.save_pretrained(out / "draft")
    torch.manual_seed(4)
    target = PegasusForConditionalGeneration.from_pretrained(out / "target", dtype=torch.float32).eval()
    draft = DRAFT.build(material.tokenizer)
    grow(target, draft, [0, 3], [0])
    batches, check = material.batches(steps, 5), checker(draft, out / "draft", material)
    Course("draft", batches, partial(distillation_loss, target, draft), steps, 0.3, check, make_optimizers(draft)).run()


@torch.no_grad()
def write(
    model: PegasusForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]
) -> list[list[int]]:
    """The ids of the model's greedy summary of each example, without the start."""
    written: list[list[int]] = []
    for first in range(0, len(examples), 32):
        sources = [e.source for e in examples[first : first + 32]]
        heard = tokenizer(sources, truncation=True, max_length=SOURCE, padding=True, return_tensors="pt")
        out = model.generate(input_ids=heard.input_ids, attention_mask=heard.attention_mask, max_new_tokens=SUMMARY)
        written += [[i for i in row[1:].tolist() if i != tokenizer.pad_token_id] for row in out]
    return written


@torch.no_grad()
def agreement(
    draft: PegasusForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[Example],
    written: Sequence[list[int]],
) -> float:
    """Share of the target's greedy tokens that the draft would have guessed after the same prefix."""
    hits = total = 0
    for example, ids in zip(examples, written, strict=True):
        source = tokenizer(example.source, truncation=True, max_length=SOURCE).input_ids
        guesses = logits_of(draft, collate([(source, ids)], tokenizer.pad_token_id)).argmax(-1)[0]
        hits += int((guesses == torch.tensor(ids)).sum())
        total += len(ids)
    return hits / total


def rouge_l(texts: Sequence[str], references: Sequence[str]) -> float:
    """Mean ROUGE-L F-measure."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    scores = [scorer.score(r, t)["rougeL"].fmeasure for t, r in zip(texts, references, strict=True)]
    return float(np.mean(scores))


def evaluate(out: Path) -> dict[str, Any]:
    """Measures the pair in `out` on all held-out functions; printed and written to `out/card.json`."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "target")
    target, draft = (
        PegasusForConditionalGeneration.from_pretrained(out / role, dtype=torch.float32).eval()
        for role in ("target", "draft")
    )
    examples = held_out_examples()
    written = write(target, tokenizer, examples)
    texts = tokenizer.batch_decode(written, skip_special_tokens=True)
    references = [e.summary for e in examples]
    sentences = [" ".join(text.split("\n")[1:]) for text in texts]
    card = {
        "target_parameters": target.num_parameters(),
        "draft_parameters": draft.num_parameters(),
        "held_out_functions": len(examples),
        "rouge_l": round(rouge_l(texts, references), 4),
        "rouge_l_of_the_signature_alone": round(rouge_l([e.signature for e in examples], references), 4),
        "rouge_l_of_the_sentence": round(rouge_l(sentences, [e.sentence or "" for e in examples]), 4),
        "greedy_agreement": round(agreement(draft, tokenizer, examples[:100], written[:100]), 4),
        "tokens_per_summary": round(sum(map(len, written)) / len(written), 1),
    }
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    print(json.dumps(card, indent=2), flush=True)
    return card


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the recipe, or one stage of it."""
    parser = argparse.ArgumentParser("python -m recipes python-summary", description=__doc__)
    parser.add_argument("out", type=Path, help="folder that receives target/, draft/ and card.json")
    parser.add_argument("--stage", choices=("target", "draft", "evaluate"), help="run one stage only")
    parser.add_argument("--seedling-steps", type=int, default=1500)
    parser.add_argument("--target-steps", type=int, default=1500)
    parser.add_argument("--draft-steps", type=int, default=800)
    options = parser.parse_args(arguments)
    check_stage(parser, options.stage, options.out, {"draft": ("target",), "evaluate": ("target", "draft")})
    material = Material.prepare()
    if options.stage in (None, "target"):
        train_target(options.out, material, options.seedling_steps, options.target_steps)
    if options.stage in (None, "draft"):
        train_draft(options.out, material, options.draft_steps)
    if options.stage in (None, "evaluate"):
        evaluate(options.out)


if __name__ == "__main__":
    main()
