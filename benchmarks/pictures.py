"""specdec beside transformers on a model that sees: time to the first token, and time of each further one.

    python benchmarks/pictures.py                      # the shape of SmolVLM-256M, random weights
    python benchmarks/pictures.py --shape qwen2-vl --side 448 --tokens 64 --runs 7

The weights are random and the picture is noise, so texts mean nothing and repeat themselves more than real ones:
"suffix" is at its best here. Systems take turns, and a ratio is the median over rounds of ratios within a round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from specdec import SpecGenerator

_PLACE = 100
_SMALL = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
_QWEN = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def smolvlm(side: int) -> tuple[Any, dict[str, Tensor]]:
    """The shape of SmolVLM-256M-Instruct: one picture of 512 x 512 pixels is 64 tokens (`side` is not used)."""
    text = {**_SMALL, **_IDS, "model_type": "llama", "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49280}
    eyes = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12}
    sizes = {"image_size": 512, "patch_size": 16}
    config = AutoConfig.for_model(
        "smolvlm", text_config=text, vision_config={**eyes, **sizes}, scale_factor=4, image_token_id=_PLACE
    )
    return config, {"input_ids": _ids(64), "pixel_values": torch.rand(1, 1, 3, 512, 512) * 2 - 1}


def qwen2_vl(side: int) -> tuple[Any, dict[str, Tensor]]:
    """The shape of a Qwen2-VL over Qwen2-0.5B, with a quarter of the layers of its eyes."""
    rope = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e6}
    text = {**_QWEN, **_IDS, "num_key_value_heads": 2, "vocab_size": 151936, "rope_parameters": rope}
    eyes = {"depth": 8, "embed_dim": 1280, "hidden_size": 896, "num_heads": 16, "patch_size": 14}
    config = AutoConfig.for_model("qwen2_vl", text_config=text, vision_config=eyes, image_token_id=_PLACE)
    patches = side // 14
    inputs = {"input_ids": _ids(patches**2 // 4), "pixel_values": torch.rand(patches**2, 1176) * 2 - 1}
    types = (inputs["input_ids"] == _PLACE).int()
    return config, {**inputs, "image_grid_thw": torch.tensor([[1, patches, patches]]), "mm_token_type_ids": types}


def _ids(places: int) -> Tensor:
    return torch.tensor([[1, *range(3, 20), *[_PLACE] * places, *range(200, 240)]])


SHAPES: dict[str, Callable[[int], tuple[Any, dict[str, Tensor]]]] = {"smolvlm": smolvlm, "qwen2-vl": qwen2_vl}


class Clock:
    """The times at which tokens arrive, in a form that `model.generate` takes as a streamer."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.begin, self.times = now, now(), list[float]()

    def put(self, ids: Tensor) -> None:
        """One more token; the first call of `model.generate` is for the prompt."""
        self.times.append(self.now())

    def end(self) -> None:
        """Nothing more will come."""


Run = Callable[[Clock], int]


def seconds(run: Run, now: Callable[[], float]) -> tuple[float, float]:
    """Seconds to the first token, and of each further one; `run` returns how many came with the first."""
    clock = Clock(now)
    further = run(clock)
    return clock.times[0] - clock.begin, (clock.times[-1] - clock.times[0]) / further


def main() -> None:
    """Measures all systems in turns and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smolvlm")
    parser.add_argument("--side", type=int, default=448, help="pixels")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--backend", default="packed")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count seconds of the CPU: on a shared machine, one thread"
    )
    args = parser.parse_args()
    now = time.process_time if args.cpu_time else time.perf_counter
    torch.manual_seed(0)
    config, inputs = SHAPES[args.shape](args.side)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    drafts = {"specdec plain": None, "specdec suffix": "suffix"}
    made = {
        name: SpecGenerator(model, draft, backend=args.backend, prefix_cache=False) for name, draft in drafts.items()
    }

    def theirs(clock: Clock) -> int:
        texts["transformers"] = model.generate(**inputs, max_new_tokens=args.tokens, do_sample=False, streamer=clock)[0]
        del clock.times[0]
        return len(clock.times) - 1

    def ours(name: str) -> Run:
        def run(clock: Clock) -> int:
            tokens: list[int] = []
            counts = []
            for event in made[name].stream(**inputs, max_new_tokens=args.tokens, eos_token_id=[]):
                clock.put(inputs["input_ids"])
                tokens += event.token_ids
                counts.append(len(event.token_ids))
            texts[name] = torch.tensor(inputs["input_ids"][0].tolist() + tokens)
            return len(tokens) - counts[0]

        return run

    texts: dict[str, Tensor] = {}
    systems: dict[str, Run] = {"transformers": theirs, **{name: ours(name) for name in made}}
    for run in systems.values():
        run(Clock(now))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    for _ in range(args.runs):
        for name, run in systems.items():
            found[name].append(seconds(run, now))
    size = sum(weight.numel() for weight in model.parameters()) / 1e9
    print(
        f"{args.shape}, {size:.2f}B, {inputs['input_ids'].shape[1]} prompt tokens, {torch.get_num_threads()} threads\n"
    )
    print("| system | first token, s | × | further tokens, ms | × | same text |\n| --- | --- | --- | --- | --- | --- |")
    base = found["transformers"]
    for name, times in found.items():
        first, each = (statistics.median(one[part] for one in times) for part in (0, 1))
        ratios = [
            statistics.median(before[part] / own[part] for before, own in zip(base, times, strict=True))
            for part in (0, 1)
        ]
        same = "yes" if texts[name].equal(texts["transformers"]) else "no"
        print(f"| {name} | {first:.2f} | {ratios[0]:.2f} | {1000 * each:.1f} | {ratios[1]:.2f} | {same} |")


if __name__ == "__main__":
    main()
