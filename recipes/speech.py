"""The recipe of the package's speech pair: `python -m recipes speech OUT`, seeded; needs espeak-ng and soxr.

A small Whisper learns to write down what espeak-ng reads from a small grammar: first with four decoder layers on short
windows, where a second loss (CTC on the encoder's output) teaches the encoder to spell; then with its decoder repeated
three times, on full windows with timestamps; and then on as many clips again, in which every kind of sentence is as
frequent as any other (among different sentences, kinds with few variants are rare). The draft is a one-layer decoder on
the same encoder, distilled from the target's distributions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)
from transformers.modeling_outputs import BaseModelOutput

from recipes import phrases, speech_scores, synthesis
from recipes.course import Course, check_stage, save
from recipes.optimise import make_optimizers
from recipes.synthesis import Clips
from recipes.windows import IGNORED, LETTERS, Batch, Composer

WINDOW = 10  # seconds
SHORT = 3  # seconds, of the windows at the beginning
WIDTH = 128
TEXT_TOKENS = 448
TIMESTAMPS = [f"<|{i * 0.02:.2f}|>" for i in range(1501)]
SPECIALS = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
]
CLIPS, CHECKED = 12_000, 60


def make_processor() -> WhisperProcessor:
    """A byte-level BPE learned on the grammar's sentences, with Whisper's special tokens, and its feature extractor."""
    bpe = ByteLevelBPETokenizer()
    lines = (" " + sentence for sentence in phrases.sentences(CLIPS, held_out=False))
    bpe.train_from_iterator(lines, vocab_size=TEXT_TOKENS, show_progress=False)
    model = json.loads(bpe._tokenizer.to_str())["model"]
    tokenizer = WhisperTokenizer(vocab=model["vocab"], merges=[tuple(m) for m in model["merges"]])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS[1:]})
    tokenizer.add_tokens(TIMESTAMPS)
    tokenizer.pad_token = SPECIALS[0]
    tokenizer.set_prefix_tokens(language="en", task="transcribe", predict_timestamps=False)
    return WhisperProcessor(WhisperFeatureExtractor(feature_size=80, chunk_length=WINDOW), tokenizer)


@dataclass(frozen=True)
class Shape:
    """Encoder and decoder layers of one model and the seconds of audio that it reads at a time."""

    decoder_layers: int
    seconds: int = WINDOW
    encoder_layers: int = 4

    def build(self, tokenizer: WhisperTokenizer) -> WhisperForConditionalGeneration:
        """A freshly initialised model of this shape."""
        end, start = tokenizer.convert_tokens_to_ids(SPECIALS[:2])
        config = WhisperConfig(
            vocab_size=len(tokenizer),
            d_model=WIDTH,
            encoder_layers=self.encoder_layers,
            decoder_layers=self.decoder_layers,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=4 * WIDTH,
            decoder_ffn_dim=3 * WIDTH,
            max_source_positions=self.seconds * 50,
            max_target_positions=256,
            bos_token_id=end,
            eos_token_id=end,
            pad_token_id=end,
            decoder_start_token_id=start,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
        model = WhisperForConditionalGeneration._from_config(config, attn_implementation="eager")
        model.generation_config = generation_config(tokenizer)
        return model


SEEDLING = Shape(decoder_layers=4, seconds=SHORT)
TARGET = Shape(decoder_layers=12)
DRAFT = Shape(decoder_layers=1)


def generation_config(tokenizer: WhisperTokenizer) -> GenerationConfig:
    """What Whisper's generation asks for: the ids of languages, tasks and timestamps."""
    word = tokenizer.convert_tokens_to_ids
    return GenerationConfig(
        bos_token_id=word("<|endoftext|>"),
        eos_token_id=word("<|endoftext|>"),
        pad_token_id=word("<|endoftext|>"),
        decoder_start_token_id=word("<|startoftranscript|>"),
        prev_sot_token_id=word("<|startofprev|>"),
        no_timestamps_token_id=word("<|notimestamps|>"),
        is_multilingual=True,
        lang_to_id={"<|en|>": word("<|en|>")},
        task_to_id={task: word(f"<|{task}|>") for task in ("transcribe", "translate")},
        language="en",
        task="transcribe",
        return_timestamps=False,
        max_initial_timestamp_index=50,
        max_length=256,
    )


class Speller(nn.Module):
    """The auxiliary head on the encoder: letters at each of its positions; not part of the finished model."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Linear(WIDTH, len(LETTERS) + 1)

    def loss(self, states: Tensor, batch: Batch) -> Tensor:
        """CTC loss per letter of the rows that hold whole sentences; `states` `[rows, positions, width]`."""
        log_p = F.log_softmax(self.letters(states[batch.spelled_rows]).float(), -1).transpose(0, 1)
        lengths = torch.tensor([len(s) for s in batch.spelled])
        read = torch.full((len(batch.spelled),), log_p.shape[0])
        return F.ctc_loss(log_p, torch.cat(batch.spelled), read, lengths, zero_infinity=True)


def transcript_loss(
    model: WhisperForConditionalGeneration, batch: Batch, speller: Speller | None = None, weight: float = 0.0
) -> Tensor:
    """Cross-entropy of the labels and, with a speller, `weight` times its loss."""
    with torch.autocast("cpu", torch.bfloat16):
        states = model.model.encoder(batch.features).last_hidden_state
        logits = decode(model, states, batch.ids)
    loss = F.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)
    return loss if speller is None else loss + weight * speller.loss(states, batch)


def decode(model: WhisperForConditionalGeneration, states: Tensor, ids: Tensor) -> Tensor:
    """Logits `[rows, tokens, vocabulary]` of `ids` after the encoder's output."""
    return model(encoder_outputs=BaseModelOutput(states), decoder_input_ids=ids, use_cache=False).logits


def distillation_loss(
    target: WhisperForConditionalGeneration, draft: WhisperForConditionalGeneration, batch: Batch
) -> Tensor:
    """Cross-entropy of the draft's distributions against the target's at every asked position."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            states = target.model.encoder(batch.features).last_hidden_state
            p = torch.softmax(decode(target, states, batch.ids).float(), -1)
        log_q = torch.log_softmax(decode(draft, states, batch.ids).float(), -1)
    return -(p * log_q).sum(-1)[batch.labels != IGNORED].mean()


def grow(small: WhisperForConditionalGeneration, large: WhisperForConditionalGeneration, layers: Sequence[int]) -> None:
    """Copies `small` into `large`: its encoder, its embeddings, and of its decoder `layers`, in this order."""
    encoder = {k: v for k, v in small.model.encoder.state_dict().items() if "embed_positions" not in k}
    large.model.encoder.load_state_dict(encoder, strict=False)
    large.model.decoder.embed_tokens.load_state_dict(small.model.decoder.embed_tokens.state_dict())
    large.model.decoder.embed_positions.load_state_dict(small.model.decoder.embed_positions.state_dict())
    large.model.decoder.layer_norm.load_state_dict(small.model.decoder.layer_norm.state_dict())
    for layer, source in zip(large.model.decoder.layers, layers, strict=True):
        layer.load_state_dict(small.model.decoder.layers[source].state_dict())


@dataclass(frozen=True)
class Material:
    """What the stages of training share: the processor, noise, and clips.

    `clips` are different sentences, `more` are drawn as often as they are said, `held_out` are never trained on.
    """

    processor: WhisperProcessor
    clips: Clips
    more: Clips
    held_out: Clips
    noise: np.ndarray

    @classmethod
    def prepare(cls, folder: Path) -> Material:
        """Synthesises what is not in `folder` yet: a few minutes."""
        processor = make_processor()
        extractor = processor.feature_extractor
        training = synthesis.read_by_many(list(phrases.sentences(CLIPS, held_out=False)), seed=0)
        more = synthesis.read_by_many(list(islice(phrases.drawn(held_out=False, seed=1), CLIPS)), seed=2)
        checked = synthesis.read_by_many(list(phrases.sentences(CHECKED, held_out=True)), seed=1)
        return cls(
            processor,
            synthesis.record(training, folder / "clips", extractor),
            synthesis.record(more, folder / "more-clips", extractor),
            synthesis.record(checked, folder / "held-out", extractor),
            synthesis.noise_power(extractor),
        )

    def windows(self, clips: Clips, seconds: int, seed: int, *, plain: bool = False) -> Composer:
        """A composer of windows of these clips."""
        return Composer(clips, self.noise, self.processor.tokenizer, frames=seconds * 100, seed=seed, plain=plain)


def checker(model: WhisperForConditionalGeneration, folder: Path, batch: Batch) -> Callable[[], str]:
    """Saves the model and tells at how many asked positions of held-out windows its likeliest token is right."""

    @torch.no_grad()
    def check() -> str:
        save(model, folder)
        states = model.model.encoder(batch.features).last_hidden_state
        asked = batch.labels != IGNORED
        right = (decode(model, states, batch.ids).argmax(-1) == batch.labels)[asked]
        return f"token accuracy {right.float().mean().item():.4f}"

    return check


def train_target(out: Path, material: Material, seedling_steps: int, steps: int) -> None:
    """Trains the target and writes it under `out/target`."""
    folder, tokenizer = out / "target", material.processor.tokenizer
    material.processor.save_pretrained(folder)
    torch.manual_seed(1)
    seedling, speller = SEEDLING.build(tokenizer), Speller()
    together = nn.ModuleDict({"model": seedling, "speller": speller})
    held = material.windows(material.held_out, SHORT, 2, plain=True).batch(48)
    batches = material.windows(material.clips, SHORT, 3, plain=True).batches(32, seedling_steps)
    loss = partial(transcript_loss, seedling, speller=speller, weight=0.3)
    check = checker(seedling, out / "seedling", held)
    Course("seedling", batches, loss, seedling_steps, 0.9, check, make_optimizers(together)).run()
    model = TARGET.build(tokenizer)
    grow(seedling, model, [i % SEEDLING.decoder_layers for i in range(TARGET.decoder_layers)])
    together = nn.ModuleDict({"model": model, "speller": speller})
    held = material.windows(material.held_out, WINDOW, 4).batch(24)
    batches = material.windows(material.clips, WINDOW, 5).batches(10, steps)
    loss = partial(transcript_loss, model, speller=speller, weight=0.1)
    check = checker(model, folder, held)
    Course("target", batches, loss, steps, 0.3, check, make_optimizers(together, 0.003, 0.0015)).run()


def polish_target(out: Path, material: Material, steps: int) -> None:
    """Trains the target in `out/target` further, on all clips."""
    torch.manual_seed(8)
    model = TARGET.build(material.processor.tokenizer)
    model.load_state_dict(WhisperForConditionalGeneration.from_pretrained(out / "target").state_dict())
    held = material.windows(material.held_out, WINDOW, 4).batch(24)
    batches = material.windows(material.clips + material.more, WINDOW, 9).batches(10, steps)
    check = checker(model, out / "target", held)
    optimizers = make_optimizers(model, 0.003, 0.0015)
    Course("polish", batches, partial(transcript_loss, model), steps, 0.3, check, optimizers).run()


def train_draft(out: Path, material: Material, steps: int) -> None:
    """Distils the draft from `out/target` and writes it under `out/draft`; its encoder is the target's, unchanged."""
    material.processor.save_pretrained(out / "draft")
    torch.manual_seed(6)
    target = WhisperForConditionalGeneration.from_pretrained(out / "target", dtype=torch.float32).eval()
    draft = DRAFT.build(material.processor.tokenizer)
    grow(target, draft, [0])
    draft.model.encoder.requires_grad_(False)
    held = material.windows(material.held_out, WINDOW, 4).batch(24)
    batches = material.windows(material.clips + material.more, WINDOW, 7).batches(10, steps)
    loss = partial(distillation_loss, target, draft)
    check = checker(draft, out / "draft", held)
    Course("draft", batches, loss, steps, 0.3, check, make_optimizers(draft)).run()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the recipe, or one stage of it."""
    parser = argparse.ArgumentParser("python -m recipes speech", description=__doc__)
    parser.add_argument("out", type=Path, help="folder that receives target/, draft/, card.json and the recordings")
    parser.add_argument("--stage", choices=("target", "polish", "draft", "evaluate"), help="run one stage only")
    parser.add_argument("--seedling-steps", type=int, default=1600)
    parser.add_argument("--target-steps", type=int, default=700)
    parser.add_argument("--polish-steps", type=int, default=800)
    parser.add_argument("--draft-steps", type=int, default=700)
    options = parser.parse_args(arguments)
    needs = {"polish": ("target",), "draft": ("target",), "evaluate": ("target", "draft")}
    check_stage(parser, options.stage, options.out, needs)
    material = Material.prepare(options.out)
    if options.stage in (None, "target"):
        train_target(options.out, material, options.seedling_steps, options.target_steps)
    if options.stage in (None, "polish"):
        polish_target(options.out, material, options.polish_steps)
        speech_scores.set_alignment_heads(options.out / "target")
    if options.stage in (None, "draft"):
        train_draft(options.out, material, options.draft_steps)
    if options.stage in (None, "evaluate"):
        speech_scores.evaluate(options.out)
        speech_scores.demonstrate(options.out)


if __name__ == "__main__":
    main()
