"""What goes together: `docs/reference/compatibility.md`, made by trying each pair of options on a tiny model.

    python -m docs.make.compatibility        # minutes; needs the extra `test` and a C++ compiler

A cell is a call in float32 whose text is that of the same call without a draft; a number is a refusal, whose message
stands below the tables. A test makes the tables again and compares.
"""

from __future__ import annotations

import logging
import random
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from specdec import SpecGenerator
from specdec.errors import SpecdecError
from tests.folders import WIDTH, byte_tokenizer, saved_gguf
from tests.heads import eagle_folder
from tests.proposers.heads.test_mtp import checkpoint as mtp_folder
from tests.tiny import tiny

PAGE = Path(__file__).parents[1] / "reference" / "compatibility.md"
PROMPT = [[11, 12, 13, 11, 12]]
LENGTHS: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": [], "pad_token_id": 0}

DRAFTS: dict[str, str] = {  # in the page -> what is passed
    "a smaller model": "MODEL",
    "a model with another tokenizer": "OTHER",
    '`"suffix"`': "suffix",
    '`"ngram"`': "ngram",
    "a hybrid": "HYBRID",
    "an EAGLE-3 head": "HEAD",
    '`"mtp"`': "mtp",
    '`"quantized"`': "quantized",
    '`"early_exit:1"`': "early_exit:1",
    "a function": "FUNCTION",
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"do_sample": True, "seed": 3},
    "match": {"do_sample": True, "seed": 3, "sampling": "match"},
    "rejection": {"do_sample": True, "seed": 3, "sampling": "rejection"},
    "block": {"do_sample": True, "seed": 3, "sampling": "block"},
    "beams": {"num_beams": 3},
    "beam sample": {"num_beams": 2, "do_sample": True, "seed": 3},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constrained": {"num_beams": 3, "force_words_ids": [[20, 21]]},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
    "ranked": {"do_sample": True, "seed": 3, "num_samples": 3},
}
MORE: dict[str, dict[str, Any]] = {  # further options of a call that not every draft takes
    "branches": {"num_assistant_branches": 2},
    "`prediction`": {"prediction": [[11, 12, 13, 14, 15, 16]]},
}
BACKENDS = ("eager", "packed")
QUANTIZATIONS = ("none", "int8-weight", "int4-weight", "int8", "nf4", "fp4", "GGUF")
OFFLOADS = ("cpu", "disk")
STRICT = "strict"
LOADINGS: dict[str, dict[str, Any]] = {
    **{name: {"backend": name} for name in BACKENDS},
    STRICT: {"backend": "packed", "exactness": STRICT},
    **{f"offload {name}": {"offload": name, "backend": "eager"} for name in OFFLOADS},
}


@dataclass
class Models:
    """Tiny models in a folder; 64 columns are the least that the 4-bit layers of bitsandbytes take.

    `refusals`: the messages so far.
    """

    root: Path
    refusals: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
        for name, seed, layers in (("target", 0, 3), ("draft", 1, 1), ("other", 2, 1)):
            byte_tokenizer(backwards=name == "other").save_pretrained(self.root / name)
            model = tiny("llama", vocab=WIDTH + 1, seed=seed, num_hidden_layers=layers, **sizes)
            model.save_pretrained(self.root / name)
        eagle_folder(self.root / "head", vocab_size=WIDTH + 1, draft_vocab_size=WIDTH + 1, head_dim=16, **sizes)
        byte_tokenizer().save_pretrained(mtp_folder(self.root / "mtp")[0])
        saved_gguf(self.root / "target.gguf", vocab=WIDTH + 1, tokens=True, num_hidden_layers=3, **sizes)

    def draft(self, name: str | None) -> Any:
        """What is passed for a name in `DRAFTS`."""
        known: dict[str | None, Any] = {
            "MODEL": str(self.root / "draft"),
            "OTHER": str(self.root / "other"),
            "HYBRID": f"suffix+{self.root / 'draft'}",
            "HEAD": str(self.root / "head"),
            "FUNCTION": lambda tokens, k: tokens[-k:],
        }
        return known.get(name, name)

    def generator(self, draft: str | None, loading: Mapping[str, Any]) -> SpecGenerator:
        """Target and draft, loaded like this."""
        loading = {"dtype": "float32", **loading}
        weights = loading.pop("quantization", "none")
        target = "mtp" if draft == "mtp" else "target"
        if weights == "GGUF" and draft != "mtp":
            target = "target.gguf"
        elif weights not in ("none", "GGUF"):
            loading["quantization"] = weights
        return SpecGenerator.from_pretrained(str(self.root / target), draft=self.draft(draft), **loading)

    def tried(self, draft: str | None, call: Mapping[str, Any], loading: Mapping[str, Any]) -> str:
        """A cell: the backend of the target, or the number of a refusal; its text must be that without a draft."""
        alone = {name: value for name, value in call.items() if name not in ("num_assistant_branches", "prediction")}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with self.generator(draft, loading) as gen:
                    out = gen.generate(PROMPT, **LENGTHS, **call)
                    plain = gen.generate(PROMPT, **LENGTHS, **alone, assistant_model="none")
            except SpecdecError as error:
                return self._refused(str(error))
        if call.get("sampling") not in ("rejection", "block") and out.stats.exactness != "row-dependent":
            assert plain.sequences.tolist() == out.sequences.tolist(), (draft, call, loading)
        return str(out.stats.settings["backend"])

    def _refused(self, message: str) -> str:
        """The number of a message, without what depends on the model."""
        for found, shown in GENERAL.items():
            message = re.sub(found, shown, message)
        if message not in self.refusals:
            self.refusals.append(message)
        return str(self.refusals.index(message) + 1)


GENERAL = {  # parts of messages that depend on the model, and how the page shows them
    r"(this one is|but) \w+\(.*\)(:| guesses)": r"\1 …\2",
    r"^\w+For\w+ ": "… ",
    r"=2 asks": "=… asks",
    r"=('\w+') and `offload`": r"=… and `offload`",
    r"`offload`='\w+' and": "`offload`=… and",
    r"`model\.[\w.]+`": "`…`",
    r" \w+For\w+ has": " … has",
}


def tables() -> dict[str, str]:
    """The tables of the page and the messages below them, by name."""
    calls = {**STRATEGIES, **MORE}
    weights = {name: {"quantization": name} for name in QUANTIZATIONS[1:]}
    with tempfile.TemporaryDirectory() as folder:
        models = Models(Path(folder))

        def goes(draft: str | None, call: Mapping[str, Any], loading: Mapping[str, Any]) -> str:
            if draft == "mtp" and loading.get("quantization") == "GGUF":
                return ""  # there is no such file
            cell = models.tried(draft, call, loading)
            return cell if cell.isdecimal() else "✓"

        made = {
            "drafts and calls": _table("draft", DRAFTS, calls, lambda draft, call: goes(draft, call, {})),
            "drafts and loading": _table("draft", DRAFTS, LOADINGS, lambda draft, how: goes(draft, {}, how)),
            "drafts and weights": _table("draft", DRAFTS, weights, lambda draft, how: goes(draft, {}, how)),
            "weights and loading": _table(
                "quantization",
                {name: {"quantization": name} for name in QUANTIZATIONS},
                LOADINGS,
                lambda weights, how: models.tried(None, {}, {**weights, **how}),
            ),
            "offloading and backends": _table(
                "offload",
                {name: {"offload": name} for name in OFFLOADS},
                {name: LOADINGS[name] for name in (*BACKENDS, STRICT)},
                lambda offload, how: models.tried(None, {}, {**how, **offload}),
            ),
        }
        refusals = "\n".join(f"{n}. {message}" for n, message in enumerate(models.refusals, 1))
        for name, call in STRATEGIES.items():  # the page says so in a sentence
            for how in [*LOADINGS.values(), *weights.values()]:
                assert goes(None if name == "contrastive" else "suffix", call, how) == "✓", (name, how)
    return {**made, "refusals": refusals}


def _table(corner: str, rows: Mapping[str, Any], columns: Mapping[str, Any], cell: Callable[[Any, Any], str]) -> str:
    lines = [[corner, *columns], ["---"] * (len(columns) + 1)]
    lines += [[row, *(cell(rows[row], columns[column]) for column in columns)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def filled(page: str, made: Mapping[str, str]) -> str:
    """The page with these tables."""
    for name, table in made.items():
        start, mark, rest = page.partition(f"<!-- made: {name} -->\n\n")
        page = f"{start}{mark}{table}\n\n{rest[rest.index('<!-- /made -->') :]}"
    return page


def combinations(page: str) -> list[tuple[str, str, str, str]]:
    """Every draft, call, quantization and loading of which the page refuses no pair."""
    names = ("drafts and calls", "drafts and loading", "drafts and weights", "weights and loading")
    calls, loading, weights, both = (_cells(page, name) for name in names)
    return [
        (draft, call, weight, how)
        for draft, call, weight, how in product(DRAFTS, {**STRATEGIES, **MORE}, QUANTIZATIONS, LOADINGS)
        if (calls[draft, call], loading[draft, how]) == ("✓", "✓")
        and (weight == "none" or weights[draft, weight] == "✓")
        and not both[weight, how].isdecimal()
    ]


def _cells(page: str, name: str) -> dict[tuple[str, str], str]:
    """The cells of a table of the page, by row and column."""
    lines = page.split(f"<!-- made: {name} -->\n\n")[1].split("\n\n<!--")[0].splitlines()
    (_, *columns), _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    return {(row, column): cell for row, *cells in rows for column, cell in zip(columns, cells, strict=True)}


def try_combinations(count: int, seed: int = 0) -> None:
    """Tries `count` of them, drawn at random; each must run, and its text be that without a draft."""
    chosen = random.Random(seed).sample(combinations(PAGE.read_text(encoding="utf-8")), count)
    with tempfile.TemporaryDirectory() as folder:
        models = Models(Path(folder))
        for draft, call, weight, how in chosen:
            options = {**STRATEGIES, **MORE}[call]
            cell = models.tried(DRAFTS[draft], options, {**LOADINGS[how], "quantization": weight})
            assert not cell.isdecimal(), (draft, call, weight, how, models.refusals)


if __name__ == "__main__":
    logging.getLogger("specdec").setLevel(logging.ERROR)
    disable_progress_bar()
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), tables()), encoding="utf-8")
