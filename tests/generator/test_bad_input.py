"""Bad input, one by one: an error that names the argument and the way out, before any forward pass."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    CompileConfig,
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    IdeficsForVisionText2Text,
    LlamaModel,
    MusicgenForCausalLM,
    MusicgenForConditionalGeneration,
    ParakeetForCTC,
    WatermarkingConfig,
)
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from specdec import OptionError, SpecGenerator, Transcriber, UnsupportedError, VocabularyError
from specdec.cli.request import FLAGS
from specdec.core.draft_schedules import Constant
from specdec.decoding.strategies import PhrasalConstraint
from specdec.options.fields import IDLE, INSTEAD, REFUSED, SYNONYMS
from specdec.options.generate import Options
from specdec.options.resolve import resolve
from specdec.pipelines import Summarizer
from specdec.proposers import SuffixDraft
from tests.folders import WIDTH, byte_tokenizer, saved_model
from tests.generator.conftest import Letters, idle
from tests.matrix import endless
from tests.shrink import tiny_of
from tests.tiny import tiny

IDS = torch.tensor([[5, 6, 7]])


@pytest.fixture(scope="module")
def generator() -> SpecGenerator:
    return idle("llama")


WRONG_OPTIONS = [
    ({"max_new_tokens": 0}, "max_new_tokens"),
    *(({"max_new_tokens": value}, "max_new_tokens") for value in (-3, 2.5, "many")),
    *(({"max_length": value}, "max_length") for value in (3, 2)),
    ({"temperature": -1.0}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"num_assistant_tokens": 0}, "num_assistant_tokens"),
    ({"schedule": "sometimes"}, "schedule"),
    ({"schedule": Constant}, "`schedule` must be one of"),
    ({"schedule": "cost", "num_assistant_tokens_schedule": "constant"}, "contradict"),
    ({"sampling": "coupled"}, "do_sample"),
    ({"sampling": "magic", "do_sample": True}, "sampling"),
    ({"num_return_sequences": 2}, "do_sample"),
    *(({"top_logprobs": 1, **search}, "top_logprobs") for search in ({"num_beams": 2}, {"penalty_alpha": 0.5})),
    ({"seed": [1, 2], "do_sample": True}, "seed"),
    ({"max_time": 0.0}, "max_time"),
    ({"max_new_token": 5}, "did you mean `max_new_tokens`"),
    ({"nonsense": 1}, "nonsense"),
    ({"assistant_model": tiny("llama", seed=1), "prompt_lookup_num_tokens": 3}, "each name a draft"),
    ({"assistant_early_exit": 2}, "layers"),
    ({"assistant_early_exit": 0}, "layers"),
    ({"logits_processor": [3]}, "logits_processor"),
    ({"do_sample": True, "temperature": 0, "num_return_sequences": 2}, "only one answer"),
    ({"num_assistant_tokens_schedule": "bogus"}, "`num_assistant_tokens_schedule` must be one of"),
    ({"generation_config": GenerationConfig(num_assistant_tokens_schedule="bogus")}, "`num_assistant_tokens_schedule`"),
    ({"cache_implementation": "bogus"}, "`cache_implementation`='bogus' is not supported: specdec keeps keys and"),
    ({"eos_token_id": 999}, "must be ids from 0 to 63, which the target knows, got 999: pass [] for none"),
    ({"eos_token_id": [2, -1]}, "`eos_token_id` must be ids from 0 to 63, which the target knows, got -1"),
    ({"eos_token_id": True}, "`eos_token_id` must be a token id, or a list of token ids, got True"),
    ({"bad_words_ids": [[]]}, "`bad_words_ids` must be a list of words, each a list of at least one token id, got"),
    ({"bad_words_ids": []}, "bad_words_ids"),
    ({"sequence_bias": {(99,): 1.0}}, "`sequence_bias` must be ids from 0 to 63, which the target knows, got 99"),
    *(
        ({"sequence_bias": value}, "`sequence_bias` must be a number per sequence")
        for value in ({5: 1.0}, "x", [[5, 1]])
    ),
    ({"stopping_criteria": [EosTokenCriteria(2)], "eos_token_id": 3}, "pass its ids as `eos_token_id=`"),
    ({"guided_regex": ""}, "`guided_regex` must be a regular expression, as text that is not empty, got ''"),
    ({"suppress_tokens": ["7"]}, "`suppress_tokens` must be a list of token ids, got ['7']"),
    ({"stop_strings": []}, "`stop_strings` must be text, or a list of texts, none of them empty, got []"),
    *(({"stop_strings": value}, "`stop_strings` must be text") for value in ("", ["x", ""])),
    *(
        ({"seed": value}, f"`seed` must be a whole number, or a list of one for each row, got {value!r}")
        for value in (True, "7", [True])
    ),
    ({"seed": 1.5}, "`seed`"),
    ({"exponential_decay_length_penalty": (1,)}, "must be a pair of a whole number and a factor, got (1,)"),
    ({"max_new_tokens": "3"}, "`max_new_tokens` must be a valid integer, got '3'"),
    ({"output_trace": True}, "`output_trace`=True belongs to beam search"),
    ({"num_samples": 3}, "`num_samples`=3 is about drawing tokens"),
    ({"num_samples": 4, "do_sample": True, "num_beams": 2}, "`num_samples` ranks samples"),
    ({"num_samples": 2, "do_sample": True, "num_return_sequences": 3}, "is more than `num_samples`=2"),
    ({"ranking": "sum", "do_sample": True}, "`ranking` orders samples"),
    ({"num_samples": 2, "ranking": "best", "do_sample": True}, "`ranking`"),
    ({"num_samples": 0, "do_sample": True}, "`num_samples`"),
    *(
        ({"watermarking_config": value}, "`watermarking_config` must be a transformers WatermarkingConfig")
        for value in (3, {"colour": 3})
    ),
    ({"stop": ["x"]}, "`stop` is not an option of generate: pass `stop_strings=`"),
    ({"position_ids": [[0]]}, "`position_ids` is not an option of generate: leave it out, as positions follow from"),
    ({"language": "en"}, "`language` is not an option of generate: for Whisper there is specdec.Transcriber"),
    ({"tgt_lang": "eng"}, "`tgt_lang` is not an option of generate: pass the id of the language as `decoder_input_ids"),
    ({"num_draft_branches": 2}, "`num_draft_branches` is not an option of generate: pass `num_assistant_branches=`"),
    ({"max_tokens": 9}, "pass `max_new_tokens=`"),
    *(
        ({"response_format": value}, "`response_format` must be {'type': 'json_object'} or")
        for value in ({}, "json", {"type": "json_schema"}, {"type": "json_object", "json_schema": {}}, {"type": ["x"]})
    ),
    ({"guided_choice": []}, "`guided_choice` must be a list of texts"),
    ({"guided_json": 5}, "`guided_json` must be a JSON schema"),
    ({"guided_regex": "a", "guided_json": {}}, "`guided_json` and `guided_regex` each set the form of the answer"),
    ({"guided_regex": "a"}, "`guided_regex` needs a tokenizer: pass `tokenizer=`"),
    ({"structured_outputs": {"json": {}}}, "pass `guided_json=`"),
    ({"tokenizer": 3}, "`tokenizer` must be a transformers tokenizer, got 3"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS, ids=lambda v: str(v)[:40])
def test_wrong_options(generator: SpecGenerator, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        generator.generate(IDS, **options)


HARMLESS: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": 0.0, "typical_p": 1.0},
    {"do_sample": True, "temperature": 0.0, "top_p": 0.9, "sampling": "rejection"},
    {"generation_config": GenerationConfig(temperature=0.7, do_sample=False)}, {"seed": 7}, {"seed": torch.tensor([7])},
    {"seed": np.int64(7)}, {"num_return_sequences": 1}, {"min_length": 6, "max_new_tokens": 3},
    {"eos_token_id": torch.tensor([2, 3])}, {"suppress_tokens": np.array([4, 5])},
    {"bad_words_ids": [[np.int64(4)], (5, 6)]},
    {"generation_config": GenerationConfig(num_assistant_tokens_schedule="heuristic_transient")},
]  # fmt: skip


@pytest.mark.parametrize("options", HARMLESS, ids=lambda v: str(v)[:60])
def test_what_changes_nothing_is_no_error(options: dict[str, Any]) -> None:
    """Values that do nothing, and those that hold for greedy decoding too, pass; so does a seed, everywhere."""
    SpecGenerator(tiny("llama"), "suffix").generate(IDS, **{"max_new_tokens": 3, "pad_token_id": 0, **options})


def test_settings_of_sampling_in_a_generator() -> None:
    """They wait for a call that samples; a call that does not say that it is greedy is warned."""
    generator = SpecGenerator(tiny("llama"), temperature=0.7, sampling="rejection", max_new_tokens=3)
    for asked in ({}, {"generation_config": GenerationConfig(max_new_tokens=3)}):
        with (
            pytest.warns(UserWarning, match=r"`temperature`=0\.7 is about drawing tokens"),
            pytest.raises(OptionError, match="`sampling`='rejection' is about drawing tokens"),
        ):
            generator.generate(IDS, **asked)
    for greedy in ({"do_sample": False}, {"temperature": 0}, {"generation_config": GenerationConfig(do_sample=False)}):
        assert generator.generate(IDS, **greedy).stats.settings["strategy"] == "greedy"
    assert generator.generate(IDS, do_sample=True).stats.settings["strategy"] == "rejection"


def test_fewer_branches_than_beams() -> None:
    """A search could not be drafted whole: it raises, or waits as a generator's default. (It drafted in vain.)"""
    model = tiny("llama")
    options = endless(8, num_beams=4)
    with pytest.raises(OptionError, match="`num_assistant_branches` must be at least `num_beams`=4"):
        SpecGenerator(model, model).generate(IDS, **options, num_assistant_branches=3)
    with pytest.raises(OptionError, match="`num_assistant_branches`"):
        SpecGenerator(model, model, num_beams=4, num_assistant_branches=3).generate(IDS, max_new_tokens=8)
    out = SpecGenerator(model, model, num_assistant_branches=3).generate(IDS, **options)
    assert out.stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("draft", ["ngram", "suffix", lambda tokens, k: tokens[:k], ("suffix", "bridge"), "bridge"])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_branches_of_a_draft_that_has_none(draft: Any, num_beams: int) -> None:
    """Drafts that copy, functions and bridges guess one text at a time. (The number was ignored.)"""
    model, bridge = tiny("llama", vocab=WIDTH, seed=1), {}
    if draft in ("bridge", ("suffix", "bridge")):
        draft = model if draft == "bridge" else ("suffix", model)
        bridge = {"tokenizer": byte_tokenizer(), "assistant_tokenizer": byte_tokenizer(backwards=True)}
    generator = SpecGenerator(tiny("llama", vocab=WIDTH), draft, **bridge)
    call = {"max_new_tokens": 2, "num_beams": num_beams}
    with pytest.raises(OptionError, match=r"`num_assistant_branches`=3 asks for trees .* leave the branches out"):
        generator.generate(IDS, **call, num_assistant_branches=3)
    with pytest.raises(OptionError, match=r"`schedule`=Constant\(.*branches=3\) asks for trees"):
        generator.generate(IDS, **call, schedule=Constant(4, branches=3))
    generator.generate(IDS, **call, num_assistant_branches=num_beams if num_beams == 1 else None)


def test_default_branches_wait_for_their_draft() -> None:
    """A generator's branches are about its own draft: a call that names one which has none passes them by."""
    model = tiny("llama")
    generator = SpecGenerator(model, tiny("llama", seed=1), num_assistant_branches=3, max_new_tokens=4)
    generator.generate(IDS, prompt_lookup_num_tokens=3)
    with pytest.raises(OptionError, match="`num_assistant_branches`=2"):
        generator.generate(IDS, prompt_lookup_num_tokens=3, num_assistant_branches=2)
    with pytest.raises(OptionError, match="`num_assistant_branches`=3"):
        SpecGenerator(model, "suffix", num_assistant_branches=3).generate(IDS, max_new_tokens=4)


@pytest.mark.parametrize("schedule", ["heuristic", "constant", "confidence", "cost"])
def test_trees_have_their_bounds(schedule: str) -> None:
    """1,024 nodes of a row; lengths that nobody asked for stay within. (200 branches of 64 tokens ran for minutes.)"""
    model = tiny("llama")
    generator = SpecGenerator(model, model, schedule=schedule, max_new_tokens=3)
    with pytest.raises(OptionError, match=r"200 branches \(`num_assistant_branches`\) of 64 .* 12800 nodes.* 1024"):
        generator.generate(IDS, num_assistant_branches=200, num_assistant_tokens=64)
    with pytest.raises(OptionError, match="1025 branches"):
        generator.generate(IDS, num_assistant_branches=1025)
    generator.generate(IDS, num_assistant_branches=16, num_assistant_tokens=64)
    generator.generate(IDS, num_assistant_branches=200)
    generator.generate(IDS, num_assistant_tokens=2000)


def test_settings_of_beams_in_a_generator() -> None:
    """Likewise: they wait for a call that searches, and a call that says that it does not may pass them by."""
    generator = SpecGenerator(tiny("llama"), length_penalty=2.0, max_new_tokens=3)
    with pytest.warns(UserWarning, match=r"`length_penalty`=2\.0 belongs to beam search"):
        generator.generate(IDS)
    assert generator.generate(IDS, num_beams=1).stats.settings["strategy"] == "greedy"
    assert generator.generate(IDS, num_beams=2).stats.settings["strategy"] == "beamsearch"
    with pytest.raises(OptionError, match="is more than `num_beams`"):
        SpecGenerator(tiny("llama"), num_beams=2, num_return_sequences=3, max_new_tokens=3).generate(IDS)


def test_inherited_settings_are_no_mistake() -> None:
    """A checkpoint's settings of sampling, lengths and ids pass, and so does what they make meaningful."""
    model = tiny("llama")
    theirs = {"temperature": 0.6, "top_p": 0.9, "min_length": 50, "min_new_tokens": 40, "eos_token_id": 999}
    model.generation_config = GenerationConfig(**theirs, length_penalty=2.0)
    assert SpecGenerator(model).generate(IDS, max_new_tokens=3).stats.num_new_tokens == 3
    model.generation_config = GenerationConfig(do_sample=True)
    out = SpecGenerator(model).generate(IDS, max_new_tokens=3, temperature=0.5)
    assert out.stats.settings["strategy"] == "coupled"


def test_a_backend_that_weights_do_not_have(tmp_path: Path) -> None:
    """Weights in 4 bits are packed. (The one constructor took the other backend, and packed them all the same.)"""
    how = {"quantization": "int4-weight", "backend": "eager"}
    with pytest.raises(OptionError, match=r"`backend`='eager' .* whose weights are packed"):
        SpecGenerator(saved_model(tmp_path), **how)
    with pytest.raises(OptionError, match="`backend`='eager' does not reach"):
        SpecGenerator(tiny("llama"), saved_model(tmp_path), draft_options=how)


@pytest.mark.parametrize(
    ("processor", "got"),
    [
        (lambda ids, logits: None, "NoneType"),
        (lambda ids, logits: logits[:, :3], "shape [1, 3]"),
        (lambda ids, logits: logits[0], "shape [64]"),
        (lambda ids, logits: logits.tolist(), "list"),
    ],
)
def test_processors_that_return_no_scores(processor: Any, got: str) -> None:
    """It is told what came; the generator can be used again. (They were raw errors, or silently took 3 tokens.)"""
    generator = SpecGenerator(tiny("llama"), "suffix")
    with pytest.raises(
        OptionError, match=re.escape(f"must return scores of shape [1, 64], the shape of its input, got {got}")
    ):
        generator.generate(IDS, max_new_tokens=3, logits_processor=processor)
    assert generator.generate(IDS, max_new_tokens=3, eos_token_id=[]).stats.num_new_tokens == 3


@pytest.mark.parametrize(
    ("given", "about"),
    [
        ({"generation_config": GenerationConfig(use_cache=False)}, "`use_cache`=False changes nothing"),
        ({"generation_config": GenerationConfig(cache_implementation="static")}, "`cache_implementation`='static'"),
        ({"max_length": 30}, "`max_length`=30 has no effect beside `max_new_tokens`=3"),
        ({"min_new_tokens": 1, "min_length": 30}, "`min_length`=30 has no effect beside `min_new_tokens`=1"),
        ({"prompt_lookup_num_tokens": 3, "num_beams": 2, "top_p": 0.9}, "`top_p`=0.9 is about drawing tokens"),
        ({"temperature": 0, "top_k": 7}, "`top_k`=7 is about drawing tokens"),
        ({"assistant_tokenizer": byte_tokenizer()}, "`assistant_tokenizer` changes nothing without `assistant_model`"),
        ({"min_length": 7}, "`min_length`=7 is out of reach, as the text ends after 3 new tokens"),
        ({"min_new_tokens": 9}, "`min_new_tokens`=9 is out of reach, as the text ends after 3 new tokens"),
        ({"generation_config": GenerationConfig(min_new_tokens=9)}, "`min_new_tokens`=9 is out of reach"),
        ({"diversity_penalty": 0.5, "num_beams": 2}, "`diversity_penalty`=0.5 changes nothing without `num_beams` and"),
        ({"generation_config": GenerationConfig(diversity_penalty=0.5)}, "`diversity_penalty`=0.5 changes nothing"),
    ],
)
def test_what_transformers_only_warns_of(given: dict[str, Any], about: str) -> None:
    """A warning, and the text as far as it goes."""
    generator = SpecGenerator(tiny("llama"))
    with pytest.warns(UserWarning, match=about):
        assert generator.generate(IDS, **given, max_new_tokens=3).stats.num_new_tokens == 3


def test_penalties_of_inputs_without_ids() -> None:
    """They are about the prompt's ids, and embeddings have none. (They were left out without a word.)"""
    generator, embeds = SpecGenerator(tiny("llama")), torch.randn(1, 4, 32)
    for given in ({"encoder_repetition_penalty": 1.5}, {"encoder_no_repeat_ngram_size": 2}):
        with pytest.warns(UserWarning, match=f"`{next(iter(given))}`=.* changes nothing: the input has no ids"):
            generator.generate(inputs_embeds=embeds, max_new_tokens=3, **given)


def test_a_checkpoints_settings_are_understood_once() -> None:
    """By their content; what cannot be followed is told every time."""
    settings = {"temperature": 0.6, "top_p": "no", "eos_token_id": [3], "dola_layers": "low", "penalty_alpha": 0.6}
    for _ in range(2):
        with pytest.warns(UserWarning, match="the checkpoint's generation config") as caught:
            options = resolve({"do_sample": True}, inherited=dict(settings))
        assert (options.temperature, options.top_p, options.eos_token_id) == (0.6, None, [3])
        assert [name for warning in caught for name in settings if name in str(warning.message)] == [
            "dola_layers",
            "penalty_alpha",
        ]
    other = resolve({"do_sample": True}, inherited={"temperature": 0.5})
    assert other.temperature == 0.5


@pytest.mark.parametrize("kind", [SpecGenerator, Summarizer])
def test_texts_that_are_none(kind: Any) -> None:
    """A text with a lone surrogate is refused in a sentence. (The tokenizer raised a TypeError about its own types.)

    So are messages that are a text. (The template raised about the attributes of a string.)
    """
    made = kind(tiny("llama", vocab_size=WIDTH), tokenizer=byte_tokenizer())
    half = r"half of a character \(the lone surrogate '\\ud800', at \d+\)"
    with pytest.raises(OptionError, match=half):
        (made.generate if kind is SpecGenerator else made)("a\ud800", max_new_tokens=4)
    if kind is SpecGenerator:
        made.tokenizer.chat_template = "{{ messages[0].content }}"
        with pytest.raises(OptionError, match=half):
            made.generate(messages=[{"role": "user", "content": "a\ud800"}], max_new_tokens=4)
        with pytest.raises(OptionError, match=r"`messages` must be a list of messages such as .*got 'hi'"):
            made.generate(messages="hi", max_new_tokens=4)


def test_text_without_a_tokenizer_or_a_limit() -> None:
    """Text never stops silently at 20 tokens."""
    with pytest.raises(OptionError, match="tokenizer"):
        SpecGenerator(tiny("llama")).generate("text", max_new_tokens=4)
    generator = SpecGenerator(tiny("llama"), tokenizer=Letters())
    with pytest.raises(OptionError, match="max_new_tokens"):
        generator.generate("hello")
    assert generator.generate("hello", max_new_tokens=3, eos_token_id=[]).texts == ["xxx"]


class Guess:
    """A draft of one's own."""

    def propose(self, tokens: list[int], k: int) -> list[int]:
        return tokens[:k]


NO_DRAFTS = (3, "early_exit:x", "early_exit:7", ("suffix",), ("suffix", None), ("suffix", "d"), "mtp+d")
NO_DRAFTS += ((tiny("llama"), "suffix"),)
WRONG_MODELS: list[tuple[Any, Any, str]] = [
    *((tiny("llama"), draft, "`draft`") for draft in NO_DRAFTS),
    *(
        (tiny("llama"), draft, r"`draft` must be an instance, got 'the class \w+': pass \w+\(\.\.\.\)")
        for draft in (Guess, SuffixDraft, ("suffix", Guess))  # it was a TypeError in the middle of the call
    ),
    (tiny("llama"), tiny("t5"), r"encoder-decoder model.*name a decoder-only model"),  # told after the first token
    (tiny("llama"), tiny("llama", vocab=50), r"draft vocabulary 50 ≠ target 64: pass `assistant_tokenizer=`"),
    (3, None, "target"),
    ("/nowhere/at/all", None, "nowhere"),
    (tiny("llama").train(), None, "eval"),
]


@pytest.mark.parametrize(("target", "draft", "message"), WRONG_MODELS, ids=lambda value: str(value)[:40])
def test_wrong_models(target: Any, draft: Any, message: str) -> None:
    """What cannot be a target or its draft is refused when the generator is made."""
    with pytest.raises(OptionError, match=message) as found:
        SpecGenerator(target, draft)
    assert isinstance(found.value, VocabularyError) == ("vocabulary" in message)


NO_TEXT: dict[Any, str] = {
    LlamaModel: "LlamaModel has no language head: load it as AutoModelForCausalLM",
    ParakeetForCTC: "ParakeetForCTC has no language head: call `model.generate`",  # named an impossible class
    MusicgenForCausalLM: "has 4 heads for the codes of a sound, and no language head: call",  # was a RuntimeError
    MusicgenForConditionalGeneration: "has 4 heads for the codes of a sound, and no language head: call",
    IdeficsForVisionText2Text: "reads no text alone: call",  # was a ValueError
}


@pytest.mark.parametrize("kind", NO_TEXT)
@pytest.mark.parametrize("backend", ["eager", "packed"])
def test_models_that_continue_no_text(kind: Any, backend: str) -> None:
    """They are refused when the generator is made. (Some calls ended in an error of the model's forward.)"""
    with pytest.raises(UnsupportedError, match=NO_TEXT[kind]):
        SpecGenerator(tiny_of(kind), backend=backend)


@pytest.mark.parametrize("kind", [SpecGenerator, Summarizer, Transcriber])
def test_a_model_by_name_takes_options_of_loading(kind: Any) -> None:
    """They were refused, with the advice to call `from_pretrained`."""
    with pytest.raises(OptionError, match="`dtype` must be"):
        kind("zoo:speech", dtype="int3")


# Every field of transformers' GenerationConfig and every argument of `generate`: what becomes of it, and a call.
HONOURED: dict[str, dict[str, Any]] = {
    **{name: {name: 4} for name in ("max_length", "min_length", "min_new_tokens", "max_new_tokens")},
    **{name: {name: 0.5, "do_sample": True} for name in ("temperature", "top_p", "min_p", "top_h", "typical_p")},
    **{name: {name: 0.5, "do_sample": True} for name in ("epsilon_cutoff", "eta_cutoff")},
    **{name: {name: 1.5} for name in ("repetition_penalty", "encoder_repetition_penalty", "guidance_scale")},
    **{name: {name: 2} for name in ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "assistant_early_exit")},
    **{name: {name: True} for name in ("renormalize_logits", "remove_invalid_values", "return_dict_in_generate")},
    **{f"output_{name}": {f"output_{name}": True} for name in ("scores", "logits", "hidden_states", "attentions")},
    **{f"{name}_token_id": {f"{name}_token_id": 7} for name in ("pad", "bos", "eos", "forced_bos", "forced_eos")},
    **{name: {name: [7]} for name in ("suppress_tokens", "begin_suppress_tokens")},
    **{name: {name: IDS} for name in ("inputs", "negative_prompt_ids")},
    **{name: {name: 2, "assistant_model": tiny("llama")} for name in ("num_assistant_tokens", "prefill_chunk_size")},
    "assistant_confidence_threshold": {"assistant_confidence_threshold": 0.4, "assistant_model": tiny("llama")},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "assistant_model": {"assistant_model": tiny("llama")},
    "bad_words_ids": {"bad_words_ids": [[7]]},
    "constraints": {"constraints": [PhrasalConstraint([7])], "num_beams": 2},
    "decoder_start_token_id": {"decoder_start_token_id": 7},
    "diversity_penalty": {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "do_sample": {"do_sample": True},
    "early_stopping": {"early_stopping": True, "num_beams": 2},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (1, 1.5), "eos_token_id": 7},
    "force_words_ids": {"force_words_ids": [[7]], "num_beams": 2},
    "generation_config": {"generation_config": GenerationConfig()},
    "length_penalty": {"length_penalty": 2.0, "num_beams": 2},
    "logits_processor": {"logits_processor": [lambda ids, scores: scores]},
    "max_matching_ngram_size": {"max_matching_ngram_size": 2, "prompt_lookup_num_tokens": 2},
    "max_time": {"max_time": 9.0},
    "negative_prompt_attention_mask": {
        **{"negative_prompt_ids": IDS, "negative_prompt_attention_mask": IDS > 5, "guidance_scale": 1.5}
    },
    "negative_prompt_ids": {"negative_prompt_ids": IDS, "guidance_scale": 1.5},
    "num_assistant_tokens_schedule": {"num_assistant_tokens_schedule": "constant", "assistant_model": tiny("llama")},
    "num_beam_groups": {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "num_beams": {"num_beams": 2},
    "num_return_sequences": {"num_return_sequences": 2, "do_sample": True},
    "penalty_alpha": {"penalty_alpha": 0.5, "top_k": 3},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: [7, 8]},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 2},
    "sequence_bias": {"sequence_bias": {(7,): 1.5}},
    "stop_strings": {"stop_strings": "x", "tokenizer": byte_tokenizer()},
    "stopping_criteria": {"stopping_criteria": [lambda ids, scores: False]},
    "streamer": {"streamer": SimpleNamespace(put=lambda ids: None, end=lambda: None)},
    "synced_gpus": {"synced_gpus": False},
    "top_k": {"top_k": 3, "do_sample": True},
    "use_mtp": {"use_mtp": False},
    "watermarking_config": {"watermarking_config": WatermarkingConfig()},
}
WARNED: dict[str, Any] = {
    **{"assistant_lookbehind": 3, "target_lookbehind": 3, "max_cache_len": 64, "speculation_type": "dflash"},
    **{"cache_config": {"nbits": 2}, "cache_implementation": "static", "use_cache": False, "low_memory": True},
    **{"compile_config": CompileConfig(), "disable_compile": True, "trust_remote_code": True},
    "continuous_batching_config": {"num_blocks": 3},
    # without what they belong to
    **dict.fromkeys(("temperature", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"), 0.3),
    **{"top_k": 7, "length_penalty": 2.0, "early_stopping": True, "max_matching_ngram_size": 3},
    **{"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.3, "num_assistant_tokens_schedule": "constant"},
    **{"negative_prompt_ids": IDS, "negative_prompt_attention_mask": IDS},
    **{"num_beam_groups": 2, "diversity_penalty": 0.5, "min_new_tokens": 20, "labels": IDS},
}
WRONG: dict[str, Any] = {
    **{"assistant_ensemble_weight": 0.5, "cache_implementation": "quantized", "custom_generate": "a/place"},
    **{"dola_layers": "low", "is_assistant": True, "past_key_values": object(), "token_healing": True},
    "synced_gpus": True,
    # without what they belong to, or where a text less would come back
    **{
        "constraints": [PhrasalConstraint([7])],
        "force_words_ids": [[7]],
        "num_return_sequences": 2,
        "stop_strings": "x",
    },
}
DESCRIBES = {"transformers_version"}  # the file, and no call


def test_every_field_of_transformers_has_its_answer() -> None:
    """Honoured, a warning or an error: nothing of a GenerationConfig and of `generate` is passed over in silence."""
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    arguments = {*inspect.signature(GenerationMixin.generate).parameters} - {"self", "kwargs"}
    beside = {"past_key_values", "trust_remote_code", "labels"}  # what `generate` reads of its other arguments
    assert {*HONOURED, *WARNED, *WRONG} == (fields | arguments | beside) - DESCRIBES
    assert {*REFUSED} <= {*WRONG}
    assert {*IDLE} <= {*WARNED}
    assert {None, *ALL_CACHE_IMPLEMENTATIONS, "paged"} - {"quantized"} <= {*REFUSED["cache_implementation"].neutral}


@pytest.fixture(scope="module")
def answers() -> SpecGenerator:
    return SpecGenerator(tiny("llama", attn_implementation="eager"))


COMMON = endless(4)


@pytest.mark.parametrize("name", HONOURED)
def test_honoured_fields(answers: SpecGenerator, name: str) -> None:
    """Without a warning (which is an error in tests)."""
    given = HONOURED[name]
    common = {} if "max_length" in given else COMMON
    answers.generate(None if "inputs" in given else IDS, **{**common, **given})


@pytest.mark.parametrize("name", WARNED)
def test_fields_that_change_no_text(answers: SpecGenerator, name: str) -> None:
    """A script for transformers runs, is told, and gets its text. (Each was an error, one after the other.)"""
    expected = answers.generate(IDS, **COMMON).sequences
    with pytest.warns(UserWarning, match=f"`({name}|schedule)`") as told:
        assert answers.generate(IDS, **COMMON, **{name: WARNED[name]}).sequences.equal(expected)
    assert len(told) == 1


@pytest.mark.parametrize("name", WRONG)
def test_fields_that_would_change_the_text(generator: SpecGenerator, name: str) -> None:
    """What cannot be honoured raises before any pass, in a generation config of the call too; its idle values pass."""
    with pytest.raises(OptionError, match=name):
        generator.generate(IDS, **COMMON, **{name: WRONG[name]})
    if name in REFUSED:
        config = GenerationConfig()
        setattr(config, name, WRONG[name])
        with pytest.raises(UnsupportedError, match=name):
            generator.generate(IDS, **COMMON, generation_config=config)
        with pytest.raises(AssertionError, match="forward pass"):
            generator.generate(IDS, **COMMON, **{name: REFUSED[name].neutral[0]})


def test_models_whose_passes_wait_for_other_processes_are_refused(
    generator: SpecGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a pass, which would wait for ever; unless the call says that the weights are gathered."""
    monkeypatch.setattr(generator.target.model, "_is_fsdp_managed_module", True, raising=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UnsupportedError, match="FSDP"):
        generator.generate(IDS, **COMMON)
    with pytest.raises(AssertionError, match="forward pass"):
        generator.generate(IDS, **COMMON, synced_gpus=False)


def test_names_that_others_use_lead_to_ours() -> None:
    """The words of the command line, vLLM and OpenAI name an option that exists; no table has a word of ours."""
    objects = {"input_ids"}
    assert {*SYNONYMS.values()} <= {*Options.model_fields, *objects}
    assert not {*SYNONYMS, *INSTEAD} & {*Options.model_fields, *REFUSED, *IDLE}
    assert {flag: name for flag, name in FLAGS.items() if flag != name}.items() <= SYNONYMS.items()


def test_the_documents_list_the_refused_fields() -> None:
    """The lists in the reference are the code's."""
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
    for mark, rules in {"refused": REFUSED, "idle": IDLE}.items():
        section = text.split(f"<!-- {mark} -->")[1]
        assert re.findall(r"^- `(\w+)`: (.*)$", section, re.MULTILINE) == [(n, r.why) for n, r in rules.items()]
