"""Results in a notebook: text with what came from the draft in colour, and a line of figures."""

import pickle
import re
from html import unescape
from reprlib import Repr

import torch

from specdec import SpecGenerator
from specdec.generator.generation import Generation, as_html
from tests.folders import WIDTH, byte_tokenizer
from tests.oracle import oracle
from tests.tiny import tiny

DRAFTED = re.compile(r'<span style="[^"]*" title="from the draft">(.*?)</span>', re.DOTALL)
TAG = re.compile(r"<[^>]+>")


def test_a_result_shows_itself() -> None:
    """Every drafted token is marked, no other, and the text is whole and harmless."""
    model, tokenizer = tiny("llama", vocab=WIDTH), byte_tokenizer()
    plain = SpecGenerator(model, tokenizer=tokenizer).generate("def f", max_new_tokens=24, eos_token_id=[])
    guess = oracle("half", plain.sequences.tolist(), WIDTH)
    out = SpecGenerator(model, guess, tokenizer=tokenizer).generate("def f", max_new_tokens=24, eos_token_id=[])
    assert sum(out.drafted[0]) == out.stats.num_accepted_draft_tokens > 0
    assert len(out.drafted[0]) == 24
    html = out._repr_html_()
    text, _, figures = html.rpartition('<div style="opacity')
    assert unescape(TAG.sub("", text)) == out.texts[0] == plain.texts[0]
    own = "".join(unescape(part) for part in DRAFTED.findall(text))
    assert 0 < len(own) < len(out.texts[0])
    assert f"{out.stats.num_target_passes} passes of the target" in figures
    assert f"{out.stats.num_accepted_draft_tokens} of {out.stats.num_draft_tokens} guesses" in figures
    assert DRAFTED.findall(plain._repr_html_()) == []
    again = pickle.loads(pickle.dumps(out))
    assert again.drafted == out.drafted
    assert DRAFTED.findall(again._repr_html_()) == []  # the tokenizer stays behind


def test_a_result_is_printed_in_one_line() -> None:
    """Texts cut short, figures, and names of other fields. (It was 210,000 characters of tensors.)"""
    brief = Repr()
    brief.maxstring = 60
    gen = SpecGenerator(tiny("llama", vocab=WIDTH), "suffix", tokenizer=byte_tokenizer())
    out = gen.generate(["def f(x):\n" * 20, "x"], max_new_tokens=30, eos_token_id=[], output_scores=True)
    line = str(out)
    assert line.startswith(f"Generation([{brief.repr(out.texts[0])}, ")
    assert f", 60 tokens in {out.stats.seconds:.2f} s, " in line
    assert f", {out.stats.num_target_passes} passes of the target, " in line
    assert line.endswith(" tokens per round with a draft, scores)")
    assert len(line) < 300
    assert "\n" not in line
    ids = SpecGenerator(tiny("llama")).generate(torch.tensor([[5, 6]]), max_new_tokens=2, eos_token_id=[])
    assert repr(ids).startswith(f"Generation([{ids.new_tokens()[0]}], 2 tokens in ")
    assert repr(Generation(sequences=ids.sequences)) == "Generation(sequences)"


def test_searches_and_ids_show_plain_text() -> None:
    """Beams were drafted as branches, which no text tells; ids without a tokenizer are numbers."""
    model = tiny("llama")
    out = SpecGenerator(model, "suffix").generate(torch.tensor([[5, 6], [7, 8]]), max_new_tokens=4, num_beams=2)
    assert out.drafted is None
    html = out._repr_html_()
    assert " ".join(map(str, out.new_tokens()[1])) in html
    assert ">1/2</div>" in html


def test_a_models_text_is_no_html() -> None:
    assert "&lt;script&gt;" in as_html([[("<script>", True)]], None)


def test_stop_strings_end_the_shown_text() -> None:
    """It is the text that `texts` hold."""
    model, tokenizer = tiny("llama", vocab=WIDTH), byte_tokenizer()
    gen = SpecGenerator(model, "suffix", tokenizer=tokenizer)
    whole = gen.generate("def f", max_new_tokens=30, eos_token_id=[]).texts[0]
    stop = next(letter for letter in whole[3:] if letter.isprintable() and letter != "\ufffd")
    out = gen.generate("def f", max_new_tokens=30, stop_strings=stop, include_stop_str_in_output=False, eos_token_id=[])
    shown = out._repr_html_().rpartition('<div style="opacity')[0]
    assert unescape(TAG.sub("", shown)) == out.texts[0] == whole[: whole.index(stop)]
