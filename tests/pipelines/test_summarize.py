"""Summaries: transformers' own text for every family, whatever drafts; long texts piece by piece; clear errors."""

from typing import Any

import pytest
from transformers import PreTrainedModel

from specdec import SpecGenerator
from specdec.decoding.noise import fold
from specdec.errors import OptionError, SpecdecError
from specdec.pipelines import Summarizer
from specdec.pipelines.summaries.chunks import cut_text, whole_sentences
from specdec.pipelines.summaries.summarize import BATCH
from tests.pipelines.models import CHAT, FAMILIES, NEW, UNPRINTABLE, model, tokenizer, written
from tests.tiny import silent

TEXTS = [
    "The cat sat on the mat. It was warm there.",
    "Ünïcödé, 版本一。 \U0001f600 and more!",
    "A much longer text about nothing in particular, which goes on. And on. And on. And on. And on. And on.",
    "x",
]
LONG = " ".join(f"Sentence number {i} says that {'abcdefghij'[i % 10] * 9} is {i * i}." for i in range(16))
CLEAN = {"suppress_tokens": UNPRINTABLE}  # text that reads back as the same ids
DRAFTS = ["none", "itself", "wrong", "suffix", "ngram", "hybrid", "early_exit:1"]
T5 = {"prefix": "summarize: ", "max_length": NEW + 1}


def draft_of(name: str, family: str, target: PreTrainedModel) -> Any:
    """A draft by name; "wrong" is another model."""
    wrong = model(family, seed=1)
    return {"none": None, "itself": target, "wrong": wrong, "hybrid": ("suffix", wrong)}.get(name, name)


def summarizer(family: str, draft: Any = None, *, most: int | None = None, **settings: Any) -> Summarizer:
    """A summarizer of a tiny encoder-decoder."""
    return Summarizer(model(family, **settings), draft, tokenizer=tokenizer(ends=True, most=most))


# ------------------------------------------------------------------------------------------------------- short texts


@pytest.mark.parametrize("family", FAMILIES)
def test_encoder_decoders_write_what_transformers_writes(family: str) -> None:
    """Prefix and lengths from the checkpoint's settings; a ragged batch is each text alone, with every draft."""
    target = model(family, **T5)
    words = tokenizer(ends=True)
    ids = [words("summarize: " + text)["input_ids"] for text in TEXTS]
    expected = [written(target, row, max_length=NEW + 1) for row in ids]
    for draft in DRAFTS:
        found = Summarizer(target, draft_of(draft, family, target), tokenizer=words)(TEXTS, batch_size=3)
        assert found == [{"summary_text": words.decode(new, skip_special_tokens=True)} for new in expected], draft


@pytest.mark.parametrize("family", FAMILIES)
def test_the_checkpoints_beams(family: str) -> None:
    """Settings like those of BART for news: beams, least length, no repeated n-grams; a call's own come first."""
    beams = {"num_beams": 3, "min_length": 6, "no_repeat_ngram_size": 2, "length_penalty": 2.0, "early_stopping": True}
    target = model(family, max_length=NEW + 1, **beams)
    words = tokenizer(ends=True)
    drafts = ("none", "wrong", "hybrid")
    several = [Summarizer(target, draft_of(draft, family, target), tokenizer=words) for draft in drafts]
    for own in ({}, {"num_beams": 1}, {"max_new_tokens": 8, "min_length": 3}):
        options = {"max_length": NEW + 1, **beams, **own}
        if "max_new_tokens" in own:
            del options["max_length"]
        if own.get("num_beams") == 1:
            del options["length_penalty"], options["early_stopping"]
        new = written(target, words(TEXTS[0])["input_ids"], **options)
        for summarize in several:
            assert summarize(TEXTS[0], **own) == [{"summary_text": words.decode(new, skip_special_tokens=True)}]


def test_stop_strings_may_be_cut() -> None:
    """They stay, as everywhere; with `include_stop_str_in_output=False` they do not."""
    summarize = summarizer("bart", "suffix")
    whole = summarize(TEXTS[0], max_new_tokens=12, **CLEAN)[0]["summary_text"]
    how = {"max_new_tokens": 12, "stop_strings": whole[4], **CLEAN}
    kept, cut = (
        summarize(TEXTS[0], **how, include_stop_str_in_output=kept)[0]["summary_text"] for kept in (None, False)
    )
    assert (kept, cut) == (whole[: whole.index(whole[4]) + 1], whole[: whole.index(whole[4])])


@pytest.mark.parametrize("template", [None, "T: {text} {in one line}:", "chat"])
def test_decoder_only_targets(template: str | None) -> None:
    """They read an instruction, the caller's own, or a user's message where there is a chat template."""
    target, words = model("llama"), tokenizer()
    own = template if template != "chat" else None
    if template == "chat":
        words.chat_template = CHAT
    expected = []
    for text in TEXTS:
        prompt = {
            None: f"Summarize the following text in at most 7 words.\n\n{text}\n\nSummary:",
            "chat": f"<user>Summarize the following text in at most 7 words.\n\n{text}|<assistant>",
        }.get(template, f"T: {text} {{in one line}}:")
        new = written(target, words(prompt)["input_ids"], max_new_tokens=NEW)
        expected.append({"summary_text": words.decode(new, skip_special_tokens=True)})
    for draft in DRAFTS:
        summarize = Summarizer(target, draft_of(draft, "llama", target), tokenizer=words, template=own)
        assert summarize(TEXTS, max_length=NEW) == expected, draft


def test_a_config_s_own_prefix() -> None:
    """Checkpoints name it in their config too; the task's stands over it, a template over both."""
    target, words = model("bart"), tokenizer(ends=True)
    target.config.prefix = "TL;DR "
    assert Summarizer(target, tokenizer=words).template == "TL;DR {text}"
    target.config.task_specific_params = {"summarization": {"prefix": ""}}
    assert Summarizer(target, tokenizer=words).template == "{text}"
    assert Summarizer(target, tokenizer=words, template="A {text}").template == "A {text}"


# -------------------------------------------------------------------------------------------------------------- shapes


def test_shapes() -> None:
    """One text gives a list of one dict, several a list of dicts, several samples of several a list of lists."""
    summarize = summarizer("t5", **T5)
    one = summarize(TEXTS[0])
    assert [set(row) for row in one] == [{"summary_text"}]
    assert summarize([TEXTS[0]]) == summarize((TEXTS[0],)) == summarize(iter(TEXTS[:1])) == one
    assert summarize([]) == []
    drawn = summarize(TEXTS, do_sample=True, num_return_sequences=2, seed=1)
    assert [len(rows) for rows in drawn] == [2] * 4
    assert summarize(TEXTS[0], do_sample=True, num_return_sequences=2, seed=1) == drawn[0]


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_token_ids(family: str) -> None:
    """As transformers' generate returns them; none of a prompt."""
    words = tokenizer(ends=family == "t5")
    summarize = Summarizer(model(family), tokenizer=words)
    for text, found in zip(TEXTS, summarize.summarize(TEXTS, max_length=NEW).documents, strict=True):
        prompt = words(summarize.template.replace("{words}", "7").replace("{text}", text))["input_ids"]
        limit = {"max_length": NEW} if family == "t5" else {"max_new_tokens": NEW}
        start = [1] if family == "t5" else []
        assert found.token_ids[0].tolist() == start + written(summarize.generator.target.model, prompt, **limit)


@pytest.mark.parametrize("strategy", [{"num_return_sequences": 2}, {"num_samples": 3}, {"num_beams": 2}])
def test_samples_do_not_depend_on_batches_or_drafts(strategy: dict[str, int]) -> None:
    """One seed, any batch size, any draft: the same summaries, long texts and short ones."""
    texts = [TEXTS[0], LONG, TEXTS[2]]
    options = {"do_sample": True, "temperature": 1.5, "seed": 3, "max_new_tokens": NEW, **CLEAN, **strategy}
    plain = summarizer("bart", most=200)
    found = plain(texts, **options)
    assert found == plain(texts, batch_size=1, **options)
    assert found == summarizer("bart", model("bart", seed=1), most=200)(texts, batch_size=2, **options)
    assert found != plain(texts, **{**options, "seed": 4})
    assert found[0] == (plain(texts[:1], **options))[0]


# ---------------------------------------------------------------------------------------------------------- long texts


@pytest.mark.parametrize("family", FAMILIES)
def test_long_texts(family: str) -> None:
    """Pieces of whole sentences within the tokenizer's limit, then their summaries; as by hand, with any draft."""
    target, words = model(family, prefix="s: "), tokenizer(ends=True, most=150)
    lengths = []

    def read(text: str) -> str:
        ids = words(f"s: {text}")["input_ids"]
        assert len(ids) <= 150
        new = written(target, ids, max_new_tokens=NEW, **CLEAN)
        lengths.append(len(new))
        return words.decode(new, skip_special_tokens=True)

    pieces = cut_text(LONG, 150, lambda texts: [len(words(f"s: {t}")["input_ids"]) for t in texts])
    assert len(pieces) > 3
    assert all(piece.endswith(".") for piece in pieces)
    last = read(" ".join(whole_sentences(read(piece).strip()) for piece in pieces))
    short = read(TEXTS[0])
    for draft in ("none", "itself", "suffix", "hybrid"):
        summarize = Summarizer(target, draft_of(draft, family, target), tokenizer=words)
        found = summarize.summarize([TEXTS[0], LONG], max_new_tokens=NEW, **CLEAN)
        assert [summary.parts for summary in found.documents] == [[1], [len(pieces), 1]]
        assert [summary.texts for summary in found.documents] == [[short], [last]]
        assert found.stats.num_new_tokens == sum(lengths)
        assert (found.stats.num_draft_tokens > 0) == (draft != "none")
        assert found.stats.num_accepted_draft_tokens > 50 or draft != "itself"


@pytest.mark.parametrize("chat", [False, True])
def test_long_texts_of_decoder_only_targets(chat: bool) -> None:
    """Prompt, template and summary fit the model's positions, and every pass gets fewer pieces."""
    target, words = model("gpt2"), tokenizer(most=200)
    words.chat_template = CHAT if chat else None
    prompts: list[list[int]] = []
    summarize = Summarizer(target, "suffix", tokenizer=words)
    generate = summarize.generator.generate
    summarize.generator.generate = lambda rows, **options: prompts.extend(rows) or generate(rows, **options)
    found = summarize.summarize([LONG], max_new_tokens=40, **CLEAN).documents[0]
    assert len(found.parts) > 2
    assert found.parts == sorted(set(found.parts), reverse=True)
    assert found.parts[-1] == 1
    assert max(map(len, prompts)) <= 200 - 40
    sent = [words.decode(row) for row in prompts]
    assert all(text.endswith("|<assistant>" if chat else "\n\nSummary:") for text in sent)
    plain = Summarizer(target, tokenizer=words).summarize([LONG], max_new_tokens=40, **CLEAN).documents[0]
    assert plain.texts == found.texts


def test_parts_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Side by side, and what their prompts have in common, once."""
    target, before = model("llama"), "Be brief. " * 20
    summarize = Summarizer(target, None, tokenizer=tokenizer(), template=before + "{text}", chunk_tokens=350)
    read, forward, heard = [], target.forward, list[tuple[int, int]]()
    monkeypatch.setattr(target, "forward", lambda **given: read.append(given["input_ids"].shape) or forward(**given))
    report = {"progress": lambda *numbers: heard.append(numbers)}
    [document] = summarize.summarize([LONG], max_new_tokens=12, **report, **CLEAN).documents
    parts = document.parts[0]
    assert heard == [*((done, parts) for done in range(0, parts, BATCH)), (0, 1)]
    assert parts > 4
    assert parts in [rows for rows, _ in read]
    assert sum(rows * length for rows, length in read if length > 1) < len(LONG) + 3 * len(before)


def test_what_was_cut_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Parts and summaries that end by length were merged and returned without a word."""
    summarize = summarizer("t5", most=150)
    found = summarize.summarize([LONG], max_new_tokens=NEW, eos_token_id=[], **CLEAN)
    [parts, _] = found.documents[0].parts
    assert f"{parts} of {parts} summaries of parts are cut at {NEW} tokens: raise `max_new_tokens=`" in caplog.text
    assert f"1 of 1 summaries are cut at {NEW} tokens" in caplog.text


def test_drafts_copy_by_default() -> None:
    """Also in Python, as on the command line; None is none. (There was none by default.)"""
    words = tokenizer(ends=True)
    assert "suffix" in repr(Summarizer(model("t5"), tokenizer=words).generator.draft).lower()
    assert Summarizer(model("t5"), None, tokenizer=words).generator.draft is None


def test_the_models_own_positions() -> None:
    """Without a tokenizer's limit the encoder's table of positions is the limit; relative positions have none."""
    long = " ".join([LONG] * 3)
    assert len(tokenizer(ends=True)(long)["input_ids"]) > 512
    options = {"max_new_tokens": NEW, **CLEAN}
    assert summarizer("bart").summarize([long], **options).documents[0].parts[0] > 1
    assert summarizer("t5").summarize([long], **options).documents[0].parts == [1]
    small = Summarizer(model("t5"), tokenizer=tokenizer(ends=True), chunk_tokens=200)
    assert small.summarize([long], **options).documents[0].parts[0] > 2


def test_truncation() -> None:
    """An encoder reads what its tokenizer leaves; other targets the first sentences that fit, template included."""
    words = tokenizer(ends=True, most=100)
    target = model("t5", prefix="s: ")
    cut = words(f"s: {LONG}", truncation=True)["input_ids"]
    assert len(cut) == 100
    new = written(target, cut, max_new_tokens=NEW)
    found = Summarizer(target, tokenizer=words)(LONG, truncation=True, max_new_tokens=NEW)
    assert found == [{"summary_text": words.decode(new, skip_special_tokens=True)}]
    target, words = model("gpt2"), tokenizer()
    summarize = Summarizer(target, tokenizer=words)
    text = " ".join([LONG] * 3)
    found = summarize.summarize([text], truncation=True, max_new_tokens=NEW).documents[0]
    template = summarize.template.replace("{words}", "7")
    first = cut_text(text, 512 - NEW, lambda ts: [len(template) - 6 + len(t) for t in ts], even=False)[0]
    new = written(target, words(template.replace("{text}", first))["input_ids"], max_new_tokens=NEW)
    assert (found.parts, found.texts) == ([1], [words.decode(new, skip_special_tokens=True)])


def test_summaries_that_grow() -> None:
    """A random model's broken characters read back as three bytes each: an error instead of passes without end."""
    summarize = summarizer("bart", most=100)
    with pytest.raises(SpecdecError, match=r"parts of text 1 fill \d+ parts again: lower `max_new_tokens`"):
        # BART's generation config forces token 2 at the end.
        summarize(["A.", LONG], max_new_tokens=48, eos_token_id=[], suppress_tokens=[0, 1, *range(3, 190)])


# -------------------------------------------------------------------------------------------------------------- errors

CALLS = [
    ("", {}, "text 0 is empty"),
    (["a", " \n"], {}, "text 1 is empty"),
    (["a", 3], {}, r"`documents\[1\]` must be text, got 'int'"),
    (3, {}, "`documents` must be text, or texts one after the other, got 'int'"),
    (b"bytes", {}, "`documents` must be text"),
    ({"text": "a"}, {}, "`documents` must be text"),
    ("a", {"max_new_tokens": None}, "a summary needs a length limit: pass `max_new_tokens=`"),
    ("ab", {"min_length": 9, "max_new_tokens": 3}, "`min_length`=9 asks for more tokens than text 0 has"),
    ("a", {"truncation": "some"}, "`truncation` must be True or False, got 'some'"),
    ("a", {"batch_size": 0}, "`batch_size` must be a whole number of at least 1, got 0"),
    ("a", {"batch_size": True}, "`batch_size`"),
    ("a", {"progress": True}, r"`progress` must be a function of \(done, whole\), got True: pass one"),
    ("a", {"return_tensors": True}, "`return_tensors` is not an option of generate"),
    ("a", {"output_scores": True}, "`output_scores` has no place in a Summarizer's result"),
    ("a", {"return_dict_in_generate": True}, "`return_dict_in_generate` has no place"),
    ("a", {"max_token": 3}, "`max_token` is not an option of generate"),
    ("a", {"prediction": "b"}, "`prediction` goes with one prompt"),
    ("a", {"num_beams": 2, "num_return_sequences": 3}, "`num_return_sequences`=3 is more than"),
    ("a", {"seed": [1, 2], "do_sample": True}, "`seed` must be one number, or one for each of 1 rows"),
    (LONG, {"max_new_tokens": 60}, "of their summaries, 60 tokens each, two do not fit into the 100 tokens"),
]


@pytest.mark.parametrize(("documents", "options", "words"), CALLS)
def test_calls_that_make_no_sense(documents: Any, options: dict[str, Any], words: str) -> None:
    """The error names the argument and the way out, and comes before any pass."""
    summarize = Summarizer(target := model("bart"), tokenizer=tokenizer(ends=True, most=100))
    silent(target)
    with pytest.raises(OptionError, match=words):
        summarize(documents, **{"max_new_tokens": NEW, **options})


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (512, "512 new tokens leave no room for a text"),
        (500, "12 tokens leave no room for text, since the template takes 62"),
    ],
)
def test_lengths_that_leave_no_room(new: int, words: str) -> None:
    """A target without an encoder shares its positions between text and summary."""
    summarize = Summarizer(target := model("gpt2"), tokenizer=tokenizer())
    silent(target)
    with pytest.raises(OptionError, match=words):
        summarize("a", max_new_tokens=new)


MAKING = [
    ({"template": "Summarize!"}, r"`template` must be text with \{text\} in it"),
    ({"chunk_tokens": 0}, "`chunk_tokens` must be a whole number of at least 1"),
    ({"chunk_tokens": True}, "`chunk_tokens` must be"),
    ({"tokenizer": None}, "a Summarizer reads and writes text: pass `tokenizer=`"),
    ({"max_token": 3}, "`max_token` is not an option"),
]


@pytest.mark.parametrize(("options", "words"), MAKING)
def test_summarizers_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Summarizer(model("t5"), **{"tokenizer": tokenizer(), **options})


def test_a_generator_brings_its_own_settings() -> None:
    """It may stand for target and draft; what belongs to it cannot be given beside it."""
    generator = SpecGenerator(model("t5", **T5), tokenizer=tokenizer(ends=True), max_new_tokens=5)
    assert Summarizer(generator).summarize(TEXTS[:1], eos_token_id=[]).stats.num_new_tokens == 5
    for options in ({"draft": "suffix"}, {"tokenizer": tokenizer()}, {"num_beams": 2}, {"do_sample": False}):
        with pytest.raises(OptionError, match=f"`{next(iter(options))}` belongs to the SpecGenerator"):
            Summarizer(generator, **options)


def test_settings_stand_in_order() -> None:
    """The call's over the summarizer's, over the checkpoint's for the task, over its others."""
    target = model("t5", max_length=20)
    target.generation_config.max_length = 30
    words = tokenizer(ends=True)
    ids, options = tokenizer(ends=True), {"eos_token_id": []}

    def length(made: Summarizer, **own: Any) -> int:
        return made.summarize(TEXTS[:1], **options, **own).stats.num_new_tokens

    assert length(Summarizer(target, tokenizer=words)) == 19
    assert length(Summarizer(target, tokenizer=words, max_new_tokens=7)) == 7
    assert length(Summarizer(target, tokenizer=words, max_new_tokens=7), max_length=6) == 5
    assert length(Summarizer(SpecGenerator(target, tokenizer=ids))) == 29


def test_one_text_is_the_generators() -> None:
    """A sampled summary is what `generate` draws for the same prompt with the row's seed."""
    summarize = summarizer("bart")
    options = {"do_sample": True, "max_new_tokens": NEW}
    found = summarize(TEXTS, seed=5, **options)
    for row, text in enumerate(TEXTS):
        out = summarize.generator.generate(text, seed=[fold(5, row)], **options)
        assert out.texts == [found[row]["summary_text"]]
