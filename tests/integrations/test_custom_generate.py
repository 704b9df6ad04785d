"""`model.generate(custom_generate=…)`: what transformers hands over is honoured or refused, and what it returns."""

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
    pipeline,
)

from specdec import OptionError, SpecGenerator, UnsupportedError, custom_generate
from tests import pictures, speech
from tests.folders import WIDTH, byte_tokenizer
from tests.generator.test_outputs import same_fields
from tests.matrix import slow
from tests.models import encoders
from tests.models import test_composites as composites
from tests.models.test_encoders import git
from tests.oracle import oracle
from tests.tiny import tiny, tiny_inputs

IDS = torch.tensor([[5, 9, 12, 7, 9], [0, 0, 6, 8, 8]])
BATCH = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}
STARTS = torch.tensor([[1, 7], [1, 9]])
DICT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
LAYERS = {"output_attentions": True, "output_hidden_states": True}
pytestmark = pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("llama", attn_implementation="eager")


@pytest.fixture(scope="module")
def wrong() -> PreTrainedModel:
    return tiny("llama", seed=1)


def check(model: PreTrainedModel, draft: Any, **arguments: Any) -> Any:
    """`generate` with the hook returns the class, the fields and the values that it returns without."""
    expected = GenerationMixin.generate(model, **arguments)
    output = GenerationMixin.generate(model, custom_generate=custom_generate(draft), **arguments)
    assert type(output) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(output, expected)
        return output
    assert set(output) == set(expected) - {"past_key_values", "cache"}
    same_fields(output, expected, *output)
    return output


@pytest.mark.parametrize(
    "given",
    [
        {"max_new_tokens": 12},
        {"max_new_tokens": 9, "eos_token_id": None, **DICT},
        {"max_new_tokens": 9, "eos_token_id": None, **DICT, **LAYERS, "input_ids": IDS[:1], "attention_mask": None},
        {"max_length": 16, "min_length": 12, "eos_token_id": list(range(2, 40))},
        {"max_new_tokens": 9, "min_new_tokens": 5, "eos_token_id": list(range(2, 40))},
        {"max_new_tokens": 9, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [7, 9]]},
        {"max_new_tokens": 9, "num_beams": 3, "num_return_sequences": 2, "eos_token_id": None, **DICT},
        {"max_new_tokens": 9, "num_beams": 3, "eos_token_id": list(range(2, 20)), "pad_token_id": 0},
        {"max_new_tokens": 6, "guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[4, 5], [8, 3]])},
        {"generation_config": GenerationConfig(max_new_tokens=7, num_beams=2)},
        {"max_new_tokens": 7, "prompt_lookup_num_tokens": 3, "input_ids": IDS[:1], "attention_mask": None},
        {},
    ],
    ids=lambda given: "-".join(given) or "nothing",
)
def test_generate_returns_what_it_returns(model: PreTrainedModel, wrong: PreTrainedModel, given: Any) -> None:
    """Padded batches: greedy, beams, limits, penalties, guidance; a whole config, and no argument at all."""
    check(model, wrong, **{**BATCH, **given})


@pytest.mark.parametrize("known", [True, False])
def test_embeddings(model: PreTrainedModel, wrong: PreTrainedModel, known: bool) -> None:
    """Lengths count as in transformers, with the ids of the embeddings and without."""
    embeds = model.get_input_embeddings()(IDS)
    inputs = {**(BATCH if known else {"attention_mask": BATCH["attention_mask"]}), "inputs_embeds": embeds}
    check(model, wrong, **inputs, max_length=12, min_length=9, eos_token_id=list(range(2, 40)))


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_encoder_decoders(name: str) -> None:
    """The encoder runs once, in transformers; drafts with an encoder of their own read its inputs."""
    model, inputs = tiny(name, attn_implementation="eager"), tiny_inputs(name, rows=2)
    endless = {**DICT, "eos_token_id": None}
    for draft in (tiny(name, seed=1), None):
        check(model, draft, **inputs, max_new_tokens=7, num_beams=2, **endless)
        check(model, draft, **inputs, max_new_tokens=5, decoder_input_ids=STARTS, **endless, **LAYERS)
    if name != "whisper":
        penalties = {"encoder_no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.3}
        check(model, "suffix", **inputs, max_new_tokens=7, **penalties)
    outputs = model.get_encoder()(**inputs)
    mask = {"attention_mask": inputs["attention_mask"]} if "attention_mask" in inputs else {}
    check(model, None, encoder_outputs=outputs, **mask, max_new_tokens=5)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "gemma3"])
def test_pictures(family: str) -> None:
    """They reach the passes, as given and not as beams repeat them. (They were left out: no picture was known.)"""
    model, row = pictures.seeing(family), pictures.prompt(family, [1, 5, 6], 0, [9], 1, [7, 8])
    for how in ({}, {"num_beams": 3, "num_return_sequences": 2}):
        check(model, "suffix", **row, max_new_tokens=6, do_sample=False, **how)


def test_pictures_without_a_place() -> None:
    """GIT reads its picture before the text. (It was left out without a word: the texts were others.)"""
    noise = torch.Generator().manual_seed(0)
    inputs = {"input_ids": IDS[:1], "pixel_values": 3 * torch.randn(1, 3, 16, 16, generator=noise)}
    check(git(None), "suffix", **inputs, max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize("name", ["led", "udop", "florence2"])
def test_what_encoders_have_read(name: str) -> None:
    """Masks, boxes and pictures beside ids. (LED's masks and UDOP's boxes were refused.)"""
    model, inputs = encoders.MADE[name]()
    for how in ({}, {"num_beams": 3, "num_return_sequences": 2}):
        check(model, "suffix", **inputs, max_new_tokens=6, do_sample=False, **how)


def test_types_of_tokens(model: PreTrainedModel) -> None:
    """Types that change GPT-2's text are refused. (They were left out without a word: the texts were others.)"""
    hook, types = custom_generate("suffix"), {"token_type_ids": IDS % 3}
    with pytest.raises(UnsupportedError, match="`token_type_ids` other than the zeros that GPT2LMHeadModel adds"):
        tiny("gpt2").generate(**BATCH, **types, max_new_tokens=5, custom_generate=hook)
    bert = encoders.loud(BertLMHeadModel, BertConfig(vocab_size=64, **composites.LAYERS, is_decoder=True))
    check(bert, None, **BATCH, token_type_ids=0 * IDS, max_new_tokens=5, do_sample=False, pad_token_id=0)


def test_fewer_passes(model: PreTrainedModel) -> None:
    """It is the draft that is used, and what is known of it is kept from call to call."""
    expected = model.generate(IDS[:1], max_new_tokens=16, eos_token_id=[])
    hook = custom_generate(oracle("perfect", expected.tolist(), 64))
    for _ in range(2):
        assert torch.equal(model.generate(IDS[:1], max_new_tokens=16, eos_token_id=[], custom_generate=hook), expected)
        assert hook.stats.num_target_passes < 8
    assert repr(hook).startswith("custom_generate(draft=")


def test_samples_are_those_of_a_generator(model: PreTrainedModel, wrong: PreTrainedModel) -> None:
    """A seed is specdec's; without one torch's generator decides. No draft changes the text."""
    how = {"do_sample": True, "max_new_tokens": 12, "temperature": 0.8, "top_k": 20, "num_return_sequences": 2}
    hooks = [custom_generate(draft, seed=3) for draft in (None, wrong, "suffix")]
    texts = [model.generate(**BATCH, **how, custom_generate=hook) for hook in hooks]
    assert all(torch.equal(text, texts[0]) for text in texts)
    assert torch.equal(texts[0], SpecGenerator(model).generate(**BATCH, **how, seed=3).sequences)
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append(model.generate(**BATCH, **how, custom_generate=custom_generate(wrong)))
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], texts[0])


def test_processors_criteria_and_prefixes(model: PreTrainedModel, wrong: PreTrainedModel) -> None:
    """The caller's own come through, in the places of transformers' where they are of one kind."""

    def stop(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return ids[:, -1] % 5 == 0

    def fewer(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, (ids[0, -1:] + 1) % 64, -torch.inf)

    check(model, wrong, **BATCH, max_new_tokens=20, stopping_criteria=StoppingCriteriaList([stop]))
    check(model, wrong, input_ids=IDS[:1], max_new_tokens=9, logits_processor=LogitsProcessorList([fewer]))
    check(model, wrong, **BATCH, max_length=9, stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(14)]))
    check(model, wrong, **BATCH, max_new_tokens=8, prefix_allowed_tokens_fn=lambda row, ids: [3 + row, 9, 12])
    stops = StopStringCriteria(byte_tokenizer(), ["e"])
    bytewise = tiny("llama", vocab=WIDTH)
    check(bytewise, None, input_ids=IDS[:1], max_new_tokens=40, stopping_criteria=StoppingCriteriaList([stops]))
    warm = LogitsProcessorList([TemperatureLogitsWarper(0.5)])
    check(model, wrong, **BATCH, max_new_tokens=5, logits_processor=warm)


def test_streamers(wrong: PreTrainedModel) -> None:
    """A streamer gets the prompt once, the text, and its end; transformers gives no hook its streamer."""
    model, tokenizer = tiny("llama", vocab=WIDTH), byte_tokenizer()
    ids = tokenizer("the quick brown", return_tensors="pt")["input_ids"]
    texts = []
    for hook in (None, custom_generate(model)):
        streamer = TextIteratorStreamer(tokenizer, timeout=20)
        arguments = {"streamer": streamer, "max_new_tokens": 16, "custom_generate": hook}
        thread = Thread(target=model.generate, args=(ids,), kwargs=arguments)
        thread.start()
        texts.append("".join(streamer))
        thread.join()
    assert texts[0] == texts[1]
    assert texts[0].startswith("the quick brown")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"assistant_model": "draft"}, "`assistant_model` beside `custom_generate`"),
        ({"past_key_values": DynamicCache()}, "`past_key_values` is not supported"),
        ({"position_ids": torch.arange(5)[None]}, "`position_ids` is not supported"),
        ({"synced_gpus": True}, "`synced_gpus`, which FSDP"),
        ({"is_assistant": True}, "`is_assistant`=True is not supported"),
        ({"stopping_criteria": StoppingCriteriaList([EosTokenCriteria(7)])}, "pass its ids as `eos_token_id=`"),
        ({"penalty_alpha": 0.5, "top_k": 4}, "takes no draft"),
    ],
)
def test_what_cannot_be_honoured_is_refused(model: PreTrainedModel, wrong: Any, given: Any, message: str) -> None:
    given = {name: wrong if value == "draft" else value for name, value in given.items()}
    with pytest.raises(OptionError, match=message):
        model.generate(IDS[:1], max_new_tokens=4, custom_generate=custom_generate(wrong), **given)


@pytest.mark.parametrize("given", [{"cache_implementation": "static"}, {"negative_prompt_ids": IDS[:1]}])
def test_what_changes_no_text_is_a_warning(model: PreTrainedModel, wrong: Any, given: dict[str, Any]) -> None:
    """(A script that was made for transformers ended with an error.)"""
    expected = model.generate(IDS[:1], max_new_tokens=4)
    with pytest.warns(UserWarning, match=f"`{next(iter(given))}`.* changes nothing"):
        out = model.generate(IDS[:1], max_new_tokens=4, custom_generate=custom_generate(wrong), **given)
    assert out.equal(expected)


def test_options_of_the_hook(model: PreTrainedModel) -> None:
    """Options that `generate` takes are not taken twice; the hook is nobody's but `generate`'s."""
    with pytest.raises(OptionError, match="`temperature` is not an option of custom_generate: pass it to `model"):
        custom_generate("suffix", temperature=0.5)
    with pytest.raises(OptionError, match="`sedule` is not an option"):
        custom_generate("suffix", sedule="cost")
    hook = custom_generate("suffix", schedule="cost", stop_strings="S", tokenizer=byte_tokenizer())
    text = tiny("llama", vocab=WIDTH).generate(IDS[:1], max_new_tokens=60, custom_generate=hook)
    assert byte_tokenizer().decode(text[0]).count("S") == 1
    assert hook.stats.settings["schedule"] == "cost"
    with pytest.raises(OptionError, match="decodes for transformers"):
        hook(model, IDS, [], [], GenerationConfig())


@pytest.mark.parametrize("backend", ["eager", "packed"])
def test_weights_that_change(wrong: PreTrainedModel, backend: str, built: None) -> None:
    """Training goes on between evaluations: no text is told from weights of yesterday, packed ones either."""
    model, hook = tiny("llama"), custom_generate(wrong, backend=backend)
    before = model.generate(IDS[:1], max_new_tokens=8, custom_generate=hook)
    model.load_state_dict(tiny("llama", seed=7).state_dict())
    after = model.generate(IDS[:1], max_new_tokens=8, custom_generate=hook)
    assert torch.equal(after, model.generate(IDS[:1], max_new_tokens=8))
    assert not torch.equal(after, before)
    model.train()
    with pytest.raises(OptionError, match="training mode"):
        model.generate(IDS[:1], max_new_tokens=8, custom_generate=hook)


def test_contrastive_search_comes_back(model: PreTrainedModel) -> None:
    """Strategies that transformers has no code for any more run with the hook."""
    how = {"max_new_tokens": 8, "penalty_alpha": 0.6, "top_k": 4}
    ids = model.generate(IDS[:1], **how, custom_generate=custom_generate())
    assert torch.equal(ids, SpecGenerator(model).generate(IDS[:1], **how).sequences)


THRESHOLDS = {
    **{"logprob_threshold": -1.0, "no_speech_threshold": 0.001, "compression_ratio_threshold": 1.35},
    **{"temperature": (0.0,), "condition_on_prev_tokens": True},
}


def test_a_text_pipeline_that_exists() -> None:
    """Single prompts, batches and samples, through `generate_kwargs`."""
    tokenizer = byte_tokenizer()
    tokenizer.padding_side = "left"
    pipe = pipeline("text-generation", tiny("llama", vocab=WIDTH), tokenizer=tokenizer, device="cpu")
    hook = custom_generate(tiny("llama", vocab=WIDTH, seed=1))
    prompts, how = ["def f(", "class Long(", "x"], {"max_new_tokens": 10, "do_sample": False}
    several = {"num_beams": 2, "num_return_sequences": 2}
    for texts, more in ((prompts, {"batch_size": 3}), (prompts[0], several)):
        assert pipe(texts, **more, **how, custom_generate=hook) == pipe(texts, **more, **how)


@pytest.mark.parametrize(
    "given",
    [
        {},
        slow({"return_timestamps": True, "generate_kwargs": {"language": "en", "num_beams": 2}}),
        slow({"return_timestamps": "word"}),
        {"return_timestamps": True, "generate_kwargs": THRESHOLDS},
    ],
    ids=["short", "beams", "words", "thresholds"],
)
def test_a_speech_pipeline_that_exists(given: dict[str, Any]) -> None:
    """Windows one after another, their timestamps, words, silence, and the text before them."""
    model = speech.whisper(stamps=2.0, end=2.0, attn_implementation="eager")
    processor = speech.processor()
    parts = {"tokenizer": processor.tokenizer, "feature_extractor": processor.feature_extractor}
    pipe = pipeline("automatic-speech-recognition", model, **parts, device="cpu")
    seconds = 2.5 if given.get("return_timestamps") else 0.9
    sound = {"raw": speech.speech(seconds), "sampling_rate": speech.RATE}
    expected = pipe(dict(sound), **given)
    hook = custom_generate(speech.whisper(seed=1))
    kwargs = {**given.get("generate_kwargs", {}), "custom_generate": hook}
    assert pipe(dict(sound), **{**given, "generate_kwargs": kwargs}) == expected
    assert hook.stats is not None


def test_a_trainer_that_predicts(tmp_path: Path) -> None:
    """`Seq2SeqTrainer` evaluates with the hook among its generation arguments, and predicts the same."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    model, draft = tiny("t5"), tiny("t5", seed=1)
    rows = [{"input_ids": ids, "labels": [5, 6, 7]} for ids in ([5, 9, 12], [7, 8, 9])]
    settings = Seq2SeqTrainingArguments(
        str(tmp_path), predict_with_generate=True, use_cpu=True, report_to=[], per_device_eval_batch_size=2
    )
    seen: list[list[list[int]]] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions.tolist())
        return {"length": float(prediction.predictions.shape[1])}

    def collate(some: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        return {name: torch.tensor([row[name] for row in some]) for name in some[0]}

    trainer = Seq2SeqTrainer(model, settings, data_collator=collate, eval_dataset=rows, compute_metrics=metrics)
    hook = custom_generate(draft)
    for arguments in ({}, {"custom_generate": hook}):
        trainer.evaluate(max_new_tokens=8, num_beams=1, **arguments)
    assert seen[0] == seen[1]
    assert hook.stats is not None
