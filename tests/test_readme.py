"""The README's Python blocks run as printed, one after the other, with tiny models in place of its names."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import SpecGenerator
from tests.folders import saved_model
from tests.speech import RATE, processor, speech, whisper
from tests.tiny import tiny

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
# A block that cannot run offline stands behind `<!-- not run: why -->`.
BLOCKS = re.findall(r"(<!-- not run: .+? -->\n)?```python\n(.*?)```", README, re.S)
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the README takes as given, and whatever its blocks have defined so far."""
    root = tmp_path_factory.mktemp("readme")
    for name, seed in (("whisper-id", 0), ("distilled-id", 1)):
        whisper(seed).save_pretrained(root / name)
        processor().save_pretrained(root / name)
    soundfile.write(root / "talk.mp3", speech(1.5), RATE)
    paths = {"target-id": saved_model(root / "target"), "draft-id": saved_model(root / "draft", seed=1)}
    heard = {name: str(root / name) for name in ("whisper-id", "distilled-id", "talk.mp3")}
    target, draft = (AutoModelForCausalLM.from_pretrained(path).eval() for path in paths.values())
    tokenizer = AutoTokenizer.from_pretrained(paths["target-id"], chat_template=CHAT)
    input_ids = torch.tensor([[5, 6, 7], [0, 8, 9]])
    mask = (input_ids > 0).long()
    given = {"target": target, "draft": draft, "tokenizer": tokenizer, "input_ids": input_ids, "mask": mask}
    given["prompts"] = ["abab", "ba", "a"]
    return {"paths": {**paths, **heard}, "SpecGenerator": SpecGenerator, **given}


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs(number: int, names: dict[str, Any]) -> None:
    """As a reader would type it, after the blocks before it; what it decodes is the target's own text."""
    mark, code = BLOCKS[number]
    if mark:
        pytest.skip(mark.strip())
    for name, path in names["paths"].items():
        code = code.replace(name, path)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, names)
    assert bool(printed.getvalue()) == ("print(" in code)
    options = {"max_new_tokens": 8, "eos_token_id": []}
    plain = SpecGenerator(names["gen"].target, tokenizer=names["gen"].tokenizer)
    assert names["gen"].generate("abab", **options).texts == plain.generate("abab", **options).texts


def test_all_blocks_are_found() -> None:
    """Loading, loaded models, a draft of one's own, predictions, searches, constraints, summaries, speech, a client."""
    words = (
        *(
            "SpecGenerator.from_pretrained",
            "input_ids, attention_mask",
            "ThreadPoolExecutor",
            "class LastTime",
            "prediction=",
            "num_beams",
        ),
        *("prefix_allowed_tokens_fn", "Summarizer", "Transcriber", "from openai"),
    )
    assert [[word in code for word in words].index(True) for _, code in BLOCKS] == list(range(10))
    assert README.count("```python") == len(BLOCKS)


def test_the_constraint(names: dict[str, Any]) -> None:
    """Whatever the model would have said, it says one of the two answers to its end."""
    block = next(code for _, code in BLOCKS if "prefix_allowed_tokens_fn" in code)
    found = {**names, "gen": SpecGenerator(names["target"], "suffix", tokenizer=names["tokenizer"])}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(block, found)
    assert found["out"].texts[0] in ('{"prime": true}', '{"prime": false}')
    assert found["out"].stats.finish_reasons == ("eos",)


def test_the_draft_of_your_own() -> None:
    """The example class drafts, is sometimes right, and leaves the text alone."""
    block = next(code for _, code in BLOCKS if "class LastTime" in code)
    names: dict[str, Any] = {}
    exec(block.split("\ngen = ")[0], names)
    model = tiny("llama")
    options = {"max_new_tokens": 60, "eos_token_id": [], "pad_token_id": 0}
    plain = SpecGenerator(model).generate([[5, 9, 12, 5, 9]], **options)
    out = SpecGenerator(model, names["LastTime"]()).generate([[5, 9, 12, 5, 9]], **options)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert out.stats.num_draft_tokens > 0
