"""Answers in a form: JSON of a schema, expressions, grammars and choices, with every draft the same."""

import json
import re
import sys
from functools import cache, partial
from typing import Any

import pytest
from pydantic import BaseModel
from transformers import AutoTokenizer

from specdec import SpecGenerator
from specdec.decoding.processors.grammar import Grammars
from specdec.errors import DraftError, OptionError, UnsupportedError
from specdec.options.bundled_models import locate
from specdec.options.generate import Form
from tests.folders import WIDTH, byte_tokenizer
from tests.matrix import in_turn
from tests.tiny import tiny

pytest.importorskip("llguidance")
TOKENIZER = byte_tokenizer()
DRAFTS = {"none": None, "suffix": "suffix", "model": tiny("llama", vocab=WIDTH, seed=1)}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Flag(BaseModel, extra="forbid"):
    on: bool


def is_person(text: str) -> bool:
    """Whether a text fits the schema."""
    found = json.loads(text)
    return len(found.pop("name")) <= 5 and found.pop("age") in range(100) and not found


FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "format": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA, "strict": True}}},
        is_person,
    ),
    "json": ({"guided_json": json.dumps(SCHEMA)}, is_person),
    "model": ({"guided_json": Flag}, lambda text: isinstance(Flag.model_validate_json(text).on, bool)),
    "regex": ({"guided_regex": r"[ab]{2,4}\.[0-9]"}, re.compile(r"[ab]{2,4}\.[0-9]").fullmatch),
    "lark": ({"guided_grammar": 'start: "x" ("," DIGIT){1,3}\nDIGIT: /[0-9]/'}, re.compile("x(,[0-9]){1,3}").fullmatch),
    "choice": ({"guided_choice": ["yes", "no", "né"]}, re.compile("yes|no|né").fullmatch),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 3, "num_return_sequences": 2, "top_k": 0},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
}


@cache
def generator_of(draft: str, family: str = "llama") -> SpecGenerator:
    return SpecGenerator(tiny(family, vocab=WIDTH), DRAFTS[draft], tokenizer=TOKENIZER)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FORMS)
def test_answers_in_a_form(name: str, way: str) -> None:
    """Prompts of several lengths: the draft changes nothing, and every text is complete and in the form."""
    fields, fits = FORMS[name]
    found = [
        generator_of(draft).generate(["ab", "abab ab"], max_new_tokens=60, eos_token_id=2, **fields, **WAYS[way])
        for draft in DRAFTS
    ]
    assert found[0].texts == found[1].texts == found[2].texts
    assert all(fits(text) for text in found[0].texts)
    assert {*found[0].stats.finish_reasons} == {"eos"}


KEYS: dict[str, Any] = {
    "type": "object",
    "properties": {"date_of_birth": {"type": "integer", "maximum": 99}, "country_of_residence": {"enum": ["at", "be"]}},
    "required": ["date_of_birth", "country_of_residence"],
    "additionalProperties": False,
}
FORCED: dict[str, Any] = {"max_new_tokens": 90, "eos_token_id": 2, "guided_json": KEYS}
WRONG_DRAFTS: dict[str, Any] = {"hybrid": ("suffix", DRAFTS["model"]), "wrong": lambda tokens, k: [7] * k}


def passes_of(draft: Any, way: str = "greedy", **options: Any) -> tuple[list[str], float]:
    """The texts of an answer with long keys, and the new tokens of a pass."""
    generator = SpecGenerator(tiny("llama", vocab=WIDTH), draft, tokenizer=TOKENIZER)
    out = generator.generate(["ab", "abab ab"], **FORCED, **WAYS[way], **options)
    assert out.stats is not None
    return out.texts, out.stats.num_new_tokens / out.stats.num_target_passes / len(out.texts)


@pytest.mark.parametrize("way", WAYS)
def test_what_a_form_forces_is_a_draft(way: str) -> None:
    """With any draft and with none, unless that is named: the texts stay, and keys take few passes."""
    texts, plain = passes_of("none", way)
    assert passes_of(None, way, assistant_model="none") == (texts, plain)
    for name, draft in {**DRAFTS, **WRONG_DRAFTS}.items():
        drafted, rate = passes_of(draft, way)
        assert drafted == texts, name
        assert rate > (1 if way == "beams" else 1.5) * plain, name


def test_copies_go_on_behind_what_is_forced() -> None:
    """A prediction fills what the form leaves open."""
    texts, forced = passes_of("suffix")
    assert passes_of("suffix", prediction=texts)[1] > 1.2 * forced


def test_only_forced_text_is_guessed() -> None:
    """In a form with a choice at every token, nothing is, and before a thought has ended, nothing."""
    gen = generator_of("none")
    out = gen.generate("ab", max_new_tokens=9, guided_regex="[ab]{9}")
    assert out.stats is not None
    assert not out.stats.num_draft_tokens
    grammar = gen.grammars.make(Form("regex", "yes, (sir|son)", "x"), TOKENIZER, [2]).copy(3, 1)
    encode = partial(TOKENIZER.encode, add_special_tokens=False)
    prompt = [5, 6, 7]
    assert grammar.forced(prompt) == encode("yes, s")
    assert grammar.forced(prompt + encode("yes, so")) == encode("n")
    assert grammar.forced(prompt + encode("yes, son")) == grammar.forced(prompt + encode("no")) == []
    grammar.follows = encode("#")
    assert grammar.forced(prompt + encode("yes")) == []
    assert grammar.forced(prompt + encode("hm#yes")) == encode(", s")


def test_sampling_by_rejection_stays_what_it_was_without_a_draft() -> None:
    """Its text depends on the rounds, so nothing is guessed that was not asked for."""
    how = {"do_sample": True, "seed": 5, "sampling": "rejection"}
    assert passes_of(None, **how) == passes_of("none", **how)


def test_a_token_that_may_go_on_is_left_to_the_target() -> None:
    """A word's beginning may be written with another token than the word."""
    tokenizer = AutoTokenizer.from_pretrained(locate("zoo:python-code", "target"))
    grammar = Grammars(len(tokenizer)).make(Form("choice", ["return value", "return values"], "x"), tokenizer, [0])
    forced = tokenizer.decode(grammar.copy(0, 1).forced([]))
    assert forced == "return"


class Forcing:
    """A caller's processor that forces `tokens` after every text."""

    def __init__(self, tokens: Any) -> None:
        self.tokens = tokens

    def __call__(self, ids: Any, logits: Any) -> Any:
        return logits

    def forced(self, text: Any) -> Any:
        return self.tokens

    def allowed(self, text: Any, tokens: Any) -> int:
        raise AssertionError("forced tokens need no check")


@pytest.mark.parametrize("tokens", [[WIDTH], [-1], ["a"], [1.5], 7, None], ids=str)
def test_wrong_forced_tokens_are_told(tokens: Any) -> None:
    """They went to the target, whose failed pass ended the requests of others, too."""
    with pytest.raises(DraftError, match="`forced` of a processor must return"):
        generator_of("none").generate("ab", max_new_tokens=8, logits_processor=[Forcing(tokens)])


def test_forced_tokens_stop_at_the_end() -> None:
    """Those behind an end were proposed, every forced token was checked again, and only the first processor asked."""
    gen = generator_of("none")
    plain = gen.generate("ab", max_new_tokens=8, eos_token_id=2)
    out = gen.generate("ab", max_new_tokens=8, eos_token_id=2, logits_processor=[Forcing([]), Forcing([2] * 5)])
    assert out.texts == plain.texts
    assert out.stats is not None
    assert {*out.stats.per_round_drafted} == {1}
    assert out.stats.settings["draft_kind"] == "form"


def test_branches_without_a_draft_are_idle_in_a_form() -> None:
    """An error told of a draft that nobody had named."""
    with pytest.warns(UserWarning, match="the call has no draft"):
        generator_of("none").generate("ab", max_new_tokens=8, guided_choice=["yes", "no"], num_assistant_branches=2)


def test_an_encoder_decoder_answers_in_a_form() -> None:
    """Its answer begins behind the decoder's start."""
    out = generator_of("suffix", "t5").generate(["ab", "b"], max_new_tokens=8, guided_choice=["yes", "no"])
    assert {*out.texts} <= {"yes", "no"}


def test_the_call_replaces_the_default() -> None:
    """Another form, or none; and its own end token ends the text."""
    gen = SpecGenerator(tiny("llama", vocab=WIDTH), tokenizer=TOKENIZER, max_new_tokens=8, guided_choice=["yes", "no"])
    [end] = TOKENIZER.encode("!")
    assert gen.generate("ab").texts[0] in ("yes", "no")
    assert gen.generate("ab", guided_regex="[01]{3}", eos_token_id=end).texts[0][3:] == "!"
    free = generator_of("none").generate("ab", max_new_tokens=8)
    assert gen.generate("ab", response_format={"type": "text"}).texts == free.texts
    assert json.loads(gen.generate("ab", max_new_tokens=200, response_format={"type": "json_object"}).texts[0]) == {}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "schema": ({"guided_json": {"type": "no-such-type"}}, "`guided_json`: "),
    "format": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
        "`response_format`: ",
    ),
    "regex": ({"guided_regex": "("}, "`guided_regex`: unclosed group"),
    "rival": (
        {"guided_regex": "a", "prefix_allowed_tokens_fn": lambda row, ids: [3]},
        "`guided_regex` and `prefix_allowed_tokens_fn` each say which tokens may follow",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_forms(name: str) -> None:
    options, message = WRONG[name]
    with pytest.raises(OptionError, match=re.escape(message)):
        generator_of("none").generate("ab", max_new_tokens=8, **options)


@in_turn(
    draft=[*DRAFTS],
    form=[{"guided_regex": "(a{1000}){1000}"}, {"guided_grammar": "start: start"}, {"guided_json": {"$ref": "#"}}],
)
def test_forms_that_no_text_can_follow(form: dict[str, Any], draft: str) -> None:
    """An expression beyond llguidance's bounds, a rule of itself alone. (The text ended, as if it were complete.)"""
    with pytest.raises(OptionError, match="no text can go on in this form"):
        generator_of(draft).generate("ab", max_new_tokens=8, **form)
    assert generator_of(draft).generate("ab", max_new_tokens=8, guided_choice=["no"], eos_token_id=2).texts == ["no"]


LONG = 4000  # rules, each of which names the next: a client's grammar of 64 KiB
DEEP: dict[str, dict[str, Any]] = {
    "rules": {"guided_grammar": "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(LONG)), f'r{LONG}: "no"'])},
    "references": {
        "guided_json": {
            "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2 * LONG)} | {f"d{2 * LONG}": {"const": 1}},
            "$ref": "#/$defs/d0",
        }
    },
}


@pytest.mark.parametrize("name", DEEP)
def test_forms_of_many_rules_in_a_row(name: str) -> None:
    """They overflowed the stack, and so ended the process."""
    out = generator_of("none").generate("ab", max_new_tokens=8, eos_token_id=2, **DEEP[name])
    assert out.texts[0] in ("no", "1")


def test_a_schema_that_holds_itself() -> None:
    """It ended the process, too."""
    schema: dict[str, Any] = {"type": "object"}
    schema["properties"] = {"a": schema}
    with pytest.raises(OptionError, match="`guided_json`: Circular reference"):
        generator_of("none").generate("ab", max_new_tokens=8, guided_json=schema)


def test_without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match=re.escape("`guided_regex` needs llguidance: pip install -c ")):
        generator_of("none").generate("ab", max_new_tokens=8, guided_regex="a")


def test_a_slow_tokenizer() -> None:
    """llguidance reads fast tokenizers alone."""

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(TOKENIZER, name)

        def __call__(self, *given: Any, **named: Any) -> Any:
            return TOKENIZER(*given, **named)

    with pytest.raises(UnsupportedError, match="`guided_regex` cannot read the tokenizer"):
        generator_of("none").generate("ab", max_new_tokens=8, guided_regex="a", tokenizer=Slow())
