"""Speech recognition: the tokens of transformers' own Whisper generation and pipeline, with and without drafts."""

from functools import cache
from itertools import cycle, groupby
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, WhisperForCausalLM, WhisperProcessor, pipeline

from specdec import OptionError, SpecGenerator, Transcriber, UnsupportedError
from specdec.options import bundled_models
from specdec.pipelines.speech.audio import log_mel, read_audio
from specdec.pipelines.speech.recordings import Recording
from specdec.pipelines.speech.settings import SpeechSettings
from specdec.pipelines.speech.whisper import Evidence, Whisper
from specdec.pipelines.speech.windows import Track
from tests.matrix import slow
from tests.speech import RATE, processor, settings, speech, whisper
from tests.tiny import tiny

pytestmark = pytest.mark.filterwarnings("ignore:std..*:UserWarning", "ignore::FutureWarning")
PARTS = processor()
LIKELY = {"stamps": 4.0, "end": 2.0}  # timestamps and ends come as they do from a trained model
PLAIN = {"stamps": -30.0, "end": 1.0}  # a model that is asked for none predicts none
EN = {"language": "en"}


@cache
def target(seed: int = 0, stamps: bool = True) -> PreTrainedModel:
    return whisper(seed, **(LIKELY if stamps else PLAIN))


def sharing(model: PreTrainedModel, seed: int = 5) -> PreTrainedModel:
    """A draft with a decoder of its own, of one layer, on an encoder that equals the target's."""
    draft = whisper(seed, **LIKELY, decoder_layers=1)
    draft.get_encoder().load_state_dict(model.get_encoder().state_dict())
    return draft


def causal(model: PreTrainedModel) -> WhisperForCausalLM:
    """The same decoder alone, as distilled checkpoints are loaded for transformers' assisted generation."""
    whole = sharing(model)
    alone = WhisperForCausalLM(whole.config.__class__(**whole.config.to_dict())).eval()
    alone.model.decoder.load_state_dict(whole.get_decoder().state_dict())
    alone.proj_out.load_state_dict(whole.proj_out.state_dict())
    return alone


DRAFTS: dict[str, Any] = {
    "none": lambda model: None, "own encoder": lambda model: whisper(9, **LIKELY), "shared encoder": sharing,
    "decoder alone": causal, "perfect": lambda model: model, "suffix": lambda model: "suffix",
    "hybrid": lambda model: ("suffix", sharing(model)),
}  # fmt: skip


THEIRS: dict[tuple[Any, ...], list[int]] = {}


def theirs(model: PreTrainedModel, sound: np.ndarray, parts: Any = PARTS, **options: Any) -> list[int]:
    """transformers' own generation, on features made by the extractor in one piece; found once for all drafts."""
    asked, extractor = (model, sound.tobytes(), str(options)), parts.feature_extractor
    if asked not in THEIRS:
        long = {"truncation": False, "padding": "longest"} if len(sound) > extractor.n_samples else {}
        inputs = extractor(sound, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **long)
        with torch.no_grad():
            THEIRS[asked] = model.generate(**inputs, **options)[0].tolist()
    return THEIRS[asked]


def ours(model: PreTrainedModel, sound: Any, draft: Any = None, **options: Any) -> list[int]:
    return Transcriber(model, draft, processor=PARTS)(sound, **options).tokens


SOUNDS = [(0.6, True, "none"), (0.6, True, "own encoder"), (1.0, True, "none"), (1.0, True, "shared encoder")]
SOUNDS += [(2.2, True, draft) for draft in DRAFTS] + [(0.8, False, "none"), (0.8, False, "hybrid")]
SOUNDS += [slow(0.8, False, draft) for draft in [*DRAFTS][1:-1]]


@pytest.mark.parametrize(("seconds", "stamps", "draft"), SOUNDS)
def test_tokens_equal_transformers(seconds: float, stamps: bool, draft: str) -> None:
    """Short and long, with timestamps and without, with every kind of draft."""
    model, sound = target(0 if stamps else 1, stamps=stamps), speech(seconds)
    options = {"return_timestamps": stamps, **EN}
    assert ours(model, sound, DRAFTS[draft](model), **options) == theirs(model, sound, **options)


def test_drafts_are_accepted() -> None:
    """A perfect draft's guesses are all right, and what the encoder read is read once for both."""
    model = target()
    transcriber = Transcriber(model, model, processor=PARTS)
    calls = []
    hook = model.get_encoder().register_forward_pre_hook(lambda *_: calls.append(1))
    out = transcriber(speech(3.3), return_timestamps=True, **EN)
    hook.remove()
    windows = len(out.stats.finish_reasons)
    assert len(calls) == windows > 3
    assert out.stats.draft_acceptance_rate == 1.0
    assert out.stats.num_draft_tokens > 10


PROMPT = torch.tensor(PARTS.get_prompt_ids("aeb"))
SETTINGS: list[dict[str, Any]] = [
    {}, {"language": "german", "task": "translate"}, {**EN, "condition_on_prev_tokens": True},
    {**EN, "prompt_ids": PROMPT}, {**EN, "condition_on_prev_tokens": True, "prompt_ids": PROMPT},
    {**EN, "condition_on_prev_tokens": True, "prompt_ids": PROMPT, "prompt_condition_type": "all-segments"},
    {**EN, "num_beams": 3}, {**EN, "no_repeat_ngram_size": 2}, {**EN, "max_new_tokens": 7},
]  # fmt: skip


@pytest.mark.parametrize("draft", [slow(None), "own encoder"])
@pytest.mark.parametrize("options", SETTINGS, ids=lambda o: " ".join(o))
def test_settings_equal_transformers(options: dict[str, Any], draft: str | None) -> None:
    """Languages (also by ear), tasks, prompts, context, and options of the decoding."""
    model, sound = target(2), speech(2.2, seed=2)
    helper = None if draft is None else DRAFTS[draft](model)
    task = {} if {"language", "task"} & options.keys() else {"task": "transcribe"}  # ours, where nothing names one
    expected = theirs(model, sound, return_timestamps=True, **task, **options)
    assert ours(model, sound, helper, return_timestamps=True, **options) == expected


def test_the_task_is_to_transcribe() -> None:
    """Where nobody names one. (The prompt had no task, and trained models repeated words, or were silent.)"""
    model, sound = target(2, stamps=False), speech(0.9, seed=2)
    assert ours(model, sound) == theirs(model, sound, task="transcribe")


def test_sound_without_a_word() -> None:
    """Ten seconds of it are odd, and told by name; less may be a pause."""
    transcriber = Transcriber(whisper(end=50.0), processor=PARTS)
    with pytest.warns(UserWarning, match="the input is 10 s of sound, and not a word was heard in it"):
        assert transcriber(speech(10.0), **EN)["text"] == ""
    assert transcriber(speech(9.0), **EN)["text"] == ""
    assert transcriber(speech(0.0), **EN)["text"] == ""


def test_forced_ids_of_old_checkpoints() -> None:
    """Without language and task, a checkpoint's `forced_decoder_ids` open the text."""
    model, sound = whisper(4, **PLAIN), speech(0.9, seed=4)
    word = PARTS.tokenizer.convert_tokens_to_ids
    forced = [[1, word("<|de|>")], [2, word("<|translate|>")], [3, word("<|notimestamps|>")]]
    model.generation_config.forced_decoder_ids = forced
    assert ours(model, sound) == theirs(model, sound)


def test_english_only() -> None:
    """A checkpoint without languages and tasks is begun with the start token alone, and says what it cannot be told."""
    model, sound = whisper(3, **LIKELY), speech(3.3, seed=3)
    model.generation_config = settings(PARTS.tokenizer, is_multilingual=False, lang_to_id=None, task_to_id=None)
    del model.generation_config.lang_to_id, model.generation_config.task_to_id
    assert ours(model, sound, return_timestamps=True) == theirs(model, sound, return_timestamps=True)
    short = speech(1.2, seed=3)
    assert ours(model, short, **EN) == ours(model, short)  # what servers' clients say
    for name, value in (("language", "de"), ("task", "translate")):
        with pytest.raises(OptionError, match=f"`{name}` '{value}' does not apply to an English-only model"):
            ours(model, sound, **{name: value})
    for timestamps in (True, "word"):
        out = Transcriber(model, processor=PARTS)(short, return_timestamps=timestamps, return_language=True)
        assert {out.language, *(chunk["language"] for chunk in out["chunks"])} == {"english"}


@pytest.mark.parametrize("options", [{}, slow({"return_timestamps": True}), slow({"num_beams": 3})], ids=str)
def test_the_package_s_own_pair(options: dict[str, Any]) -> None:
    """A trained model on real sound, short and long: transformers' tokens, and a draft that is often right."""
    pair = bundled_models.pair("speech")
    transcriber = Transcriber.from_pretrained(pair.target, str(pair.draft), dtype="float32")
    parts = WhisperProcessor.from_pretrained(pair.target)
    sounds = [read_audio(path, RATE).samples for path, _ in bundled_models.recordings()]
    if "return_timestamps" in options:
        sounds = [sounds[0], np.concatenate(sounds)]  # longer than a window
    model = transcriber.generator.target.model
    found = transcriber(sounds, batch_size=2, **options)
    for sound, out in zip(sounds, found, strict=True):
        assert out.tokens == theirs(model, sound, parts, **options)
    assert found[0].stats.mean_acceptance_length > 1.5


# --- windows that were misheard


@pytest.mark.parametrize("draft", [slow(None), "shared encoder"])
def test_silent_windows_are_skipped(draft: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the text is unlikely and silence likely enough, as in transformers: no window, some, all."""
    heard: list[float] = []
    listen = Whisper.evidence

    def evidence(*args: Any) -> Evidence:
        heard.append((found := listen(*args)).silence)
        return found

    monkeypatch.setattr(Whisper, "evidence", evidence)
    monkeypatch.setattr("specdec.pipelines.speech.settings._FEW", 0)  # transformers has no rule for short texts
    model, sound = whisper(0, **LIKELY), speech(3.3)
    model.proj_out.register_forward_hook(lambda m, a, out: out * 0.35)
    options = {**EN, "return_timestamps": True, "temperature": 0.0, "logprob_threshold": -0.2}
    helper = None if draft is None else DRAFTS[draft](model)
    everything = ours(model, sound, helper, **options, no_speech_threshold=1.0)
    some = sum(sorted(heard)[len(heard) // 2 - 1 : len(heard) // 2 + 1]) / 2  # no window's own, which rounding decides
    for threshold, skipped in ((some, "some"), (0.0, "all")):
        expected = theirs(model, sound, **options, no_speech_threshold=threshold)
        assert ours(model, sound, helper, **options, no_speech_threshold=threshold) == expected
        assert (expected == []) == (skipped == "all")
        assert len(expected) < len(everything)


@pytest.mark.parametrize("draft", [None, "own encoder"])
def test_silence_has_no_text(draft: str | None) -> None:
    """Also where the text is likely, by default. (Eight seconds of zeros, and 0.04 s of sound, were "you".)"""
    model, short = whisper(0, stamps=-30.0), {**EN, "max_new_tokens": 6}
    silence = torch.zeros(model.config.vocab_size)
    silence[PARTS.tokenizer.convert_tokens_to_ids("<|nospeech|>")] = 30.0
    helper = None if draft is None else DRAFTS[draft](model)
    assert (text := ours(model, speech(0.5), helper, **short))
    model.proj_out.register_forward_hook(lambda module, args, output: output + silence)
    for sound in (speech(0.5), np.zeros(RATE // 25, np.float32)):
        assert ours(model, sound, helper, **short) == ours(model, sound, helper, **short, return_timestamps=True) == []
    assert ours(model, speech(0.5), helper, **short, no_speech_threshold=1.0) == text


HEARD = [
    # silence, mean log-probability, whether there is no speech; by Whisper base and tiny.en
    *((0.93, -0.45, True), (0.95, -0.38, True), (0.93, -0.88, True), (0.89, -0.79, True)),  # zeros, a hum, 0.04 s
    *((0.77, -1.78, False), (0.7, -1.06, False), (0.34, -0.21, False), (0.51, -1.71, False)),  # digits, quiet, noisy
]


@pytest.mark.parametrize(("silence", "log_prob", "expected"), HEARD)
def test_silence_is_told_from_speech(silence: float, log_prob: float, expected: bool) -> None:
    """The likelier silence is, the likelier the text must be."""
    rule = SpeechSettings()
    assert rule.may_skip(8, None)
    assert rule.skips(Evidence(silence, log_prob), 8, None) == expected
    assert not rule.may_skip(9, None)


@pytest.mark.parametrize("stamps", [False, True])
def test_evidence_is_in_the_scores(stamps: bool) -> None:
    """What one pass over the text tells is what decoding saw, timestamps left out."""
    transcriber = Transcriber(model := whisper(0, stamps=-30.0), processor=PARTS)
    heard = Whisper(transcriber.generator.target, PARTS.tokenizer)
    sound = {"input_features": log_mel(speech(0.5), PARTS.feature_extractor)[None]}
    encoding = heard.model.encode(sound)
    prompt = heard.prompt(encoding, language="en", task=None, timestamps=stamps)
    how = {"decoder_input_ids": [prompt], "max_new_tokens": 6, "output_scores": True}
    out = transcriber.generator.generate(**sound, **how)
    [tokens] = out.new_tokens()
    evidence = heard.evidence(encoding, prompt, len(prompt), tokens)
    log_probs = [float(s[0].log_softmax(-1)[t]) for s, t in zip(out.scores, tokens, strict=True)]
    assert evidence.log_prob == pytest.approx(sum(log_probs) / len(log_probs), abs=1e-4)
    with torch.no_grad():
        first = model(encoder_outputs=(encoding.hidden,), decoder_input_ids=torch.tensor([prompt[:1]])).logits[0, 0]
    token = PARTS.tokenizer.convert_tokens_to_ids("<|nospeech|>")
    assert evidence.silence == pytest.approx(float(first.softmax(-1)[token]))
    assert model.generation_config.suppress_tokens


@pytest.mark.parametrize("rule", [{"logprob_threshold": -0.4}, slow({"compression_ratio_threshold": 1.1})])
def test_misheard_windows_are_tried_again(rule: dict[str, Any]) -> None:
    """Warmer, until the text passes. (With one candidate a draw is no chance, and transformers comes to the same.)"""
    model, sound = target(2), speech(2.2, seed=2)
    options = {**EN, "return_timestamps": True, "temperature": (0.0, 0.4, 0.8), "top_k": 1, **rule}
    transcriber = Transcriber(model, whisper(9, **LIKELY), processor=PARTS)
    once = transcriber(sound, **EN, return_timestamps=True)
    out = transcriber(sound, **options)
    assert out.tokens == theirs(model, sound, **options)
    assert len(out.stats.finish_reasons) > len(once.stats.finish_reasons)


def test_draws_do_not_depend_on_the_batch() -> None:
    """The inputs of an iterator are numbered through. (Every batch began with the draws of the first input.)"""
    transcriber, sounds = Transcriber(target(), processor=PARTS), [speech(0.9)] * 3
    texts = [
        [out.tokens for out in transcriber(iter(sounds), seed=5, batch_size=size, temperature=1.0, **EN)]
        for size in (1, 2, 3)
    ]
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][0] != texts[0][1]


def test_draws_depend_on_the_seed_alone() -> None:
    model, sounds = target(), [speech(2.2, seed=seed) for seed in range(3)]
    options = {**EN, "return_timestamps": True, "temperature": 0.9}
    plain, helped = (Transcriber(model, d, processor=PARTS) for d in (None, whisper(9, **LIKELY)))
    first = [plain(sound, seed=7, **options).tokens for sound in sounds[:1]]
    together = [out.tokens for out in helped(sounds, seed=7, batch_size=3, **options)]
    assert together[:1] == first
    assert plain(sounds[0], seed=8, **options).tokens != first[0]


# --- batches and chunks


@pytest.mark.parametrize("options", [{}, {"condition_on_prev_tokens": True}, slow({"language": None})], ids=str)
def test_recordings_are_read_as_if_alone(options: dict[str, Any]) -> None:
    model = target(1)
    sounds = [speech(seconds, seed=i) for i, seconds in enumerate([0.5, 1.8, 1.0])]
    transcriber = Transcriber(model, sharing(model), processor=PARTS)
    options = {**EN, "return_timestamps": True, **options}
    alone = [transcriber(sound, **options) for sound in sounds]
    for batch_size in (3,) if "condition_on_prev_tokens" in options else (2, 3):
        together = transcriber(sounds, batch_size=batch_size, **options)
        assert [out.tokens for out in together] == [out.tokens for out in alone]
        assert together == alone


def pipe(model: PreTrainedModel, **options: Any) -> Any:
    parts = {"tokenizer": PARTS.tokenizer, "feature_extractor": PARTS.feature_extractor}
    return pipeline("automatic-speech-recognition", model=model, **parts, **options)


CHUNKED: list[dict[str, Any]] = [
    {"chunk_length_s": 1},
    {"chunk_length_s": 0.9, "stride_length_s": 0.2},
    {"chunk_length_s": 0.9, "stride_length_s": (0.3, 0)},
    {"chunk_length_s": 1, "return_timestamps": True},
    {"chunk_length_s": 1, "return_language": True},
    {"chunk_length_s": 1, "return_language": True, "return_timestamps": True},
]
GENERATE = {**EN, "num_beams": 1, "max_new_tokens": 25}


@pytest.mark.parametrize("options", [*CHUNKED[::2], *map(slow, CHUNKED[1::2])], ids=str)
def test_chunks_equal_the_pipeline(options: dict[str, Any]) -> None:
    """Overlapping chunks, decoded in ragged batches with a draft, merged to the pipeline's output.

    The pipeline's times may be beyond the sound.
    """
    model, sound = target(1, stamps="return_timestamps" in options), speech(2.6, seed=1)
    expected = pipe(model)(sound.copy(), generate_kwargs=GENERATE, **options)
    for chunk in expected.get("chunks", ()):
        if "timestamp" in chunk:
            chunk["timestamp"] = tuple(time and min(time, 2.6) for time in chunk["timestamp"])
    transcriber = Transcriber(model, whisper(9, **LIKELY), processor=PARTS)
    for batch_size in (1, 3):
        assert transcriber(sound, batch_size=batch_size, generate_kwargs=GENERATE, **options) == expected


def test_sound_that_two_chunks_share_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that copies finds a chunk's beginning at the end of the chunk before; the text is the same."""
    sounds = [read_audio(str(path), RATE).samples for path, _ in bundled_models.recordings()]
    transcriber = Transcriber.from_pretrained("zoo:speech", "suffix")
    told = transcriber(np.concatenate(sounds), chunk_length_s=8)
    monkeypatch.setattr(Track, "expected", property(lambda _: []))
    untold = transcriber(np.concatenate(sounds), chunk_length_s=8)
    assert told == untold
    assert told.stats.num_accepted_draft_tokens > 2 * untold.stats.num_accepted_draft_tokens
    assert told.stats.num_target_passes < untold.stats.num_target_passes


def test_text_beyond_the_last_timestamp_is_expected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next window begins where the last pair of timestamps was: what followed it is likely to come first."""
    transcriber, calls = Transcriber(target(), "suffix", processor=PARTS), []
    generate = transcriber.generator.generate

    def listen(**options: Any) -> Any:
        calls.append(((options.get("prediction") or [None])[0], out := generate(**options)))
        return out

    monkeypatch.setattr(transcriber.generator, "generate", listen)
    transcriber(speech(3.3), return_timestamps=True, **EN)
    begin = PARTS.tokenizer.convert_tokens_to_ids("<|0.00|>")
    texts = [
        [token for token in out.new_tokens()[0] if token < begin and token != PARTS.tokenizer.eos_token_id]
        for _, out in calls
    ]
    expected = [(prediction, text) for (prediction, _), text in zip(calls[1:], texts, strict=False) if prediction]
    assert expected
    for prediction, text in expected:
        rest = [token for token in prediction if token < begin]
        assert prediction[0] == begin
        assert rest == text[-len(rest) :] != []


@pytest.mark.parametrize("draft", [slow(None), "own encoder"])
@pytest.mark.parametrize("options", [{}, {"chunk_length_s": 1, "stride_length_s": 0.1}], ids=str)
def test_words_equal_the_pipeline(options: dict[str, Any], draft: str | None) -> None:
    """When each word is said, by the heads that align; the pipeline's times may be beyond the sound."""
    model, sound = target(3), speech(2.8, seed=3)
    expected = pipe(model)(sound.copy(), generate_kwargs=GENERATE, return_timestamps="word", **options)
    helper = None if draft is None else DRAFTS[draft](model)
    transcriber = Transcriber(model, helper, processor=PARTS)
    out = transcriber(sound, generate_kwargs=GENERATE, return_timestamps="word", **options)
    assert out["text"] == expected["text"]
    assert len(out["chunks"]) > 3
    for mine, other in zip(out["chunks"], expected["chunks"], strict=True):
        assert mine["text"] == other["text"]
        assert mine["timestamp"] == pytest.approx([min(time, 2.8) for time in other["timestamp"]], abs=0.021)


@pytest.mark.parametrize("chunked", [False, True])
def test_words_stand_in_cues(chunked: bool) -> None:
    """Those of a segment together, or of chunks, which overlap, those of a sentence; no word is lost or twice."""
    decode = PARTS.tokenizer.decode
    broken = [i for i in range(256) if not (decode([i]).isascii() and decode([i]).isprintable())]  # parts of characters
    transcriber = Transcriber(target(), processor=PARTS, suppress_tokens=broken, **EN)
    options = {"chunk_length_s": 1.0} if chunked else {}
    out = transcriber(speech(2.8, seed=3), return_timestamps="word", **options)
    assert [word["text"] for cue in out.cues for word in cue["words"]] == [word["text"] for word in out["chunks"]]
    assert "".join(cue["text"] for cue in out.cues) == out["text"]
    if not chunked:
        segments = transcriber(speech(2.8, seed=3), return_timestamps=True)
        texts = [cue["text"] for cue in segments.cues]
        assert sum(cue["text"] in texts for cue in out.cues) > len(texts) / 2  # a word may span two segments
        assert segments.cues == segments["chunks"]
    assert transcriber(speech(0.5)).cues == []


def test_cues_do_not_reach_into_silence() -> None:
    """Their first and last words are clipped. (A cue began 8 seconds early, and another ended 6 seconds late.)"""
    said = [(" After", 2.0, 10.3), (" silence,", 10.3, 11.8), (" it", 11.8, 12.0), (" ended.", 12.0, 18.5)]
    said += [(" Thus", 18.5, 18.9), (" it", 18.9, 19.2), (" did.", 19.2, 19.6)]
    words = [{"text": text, "timestamp": (start, end)} for text, start, end in said]
    cues = Recording(strides=[]).cues(Whisper, words)
    assert [cue["timestamp"] for cue in cues] == [(9.5, 12.8), (18.5, 19.6)]
    assert words[0]["timestamp"] == (2.0, 10.3)
    assert cues[0]["words"][1] == words[1]


@pytest.mark.parametrize("options", [{}, {"chunk_length_s": 1}, {"return_timestamps": "word"}], ids=str)
def test_no_time_is_beyond_the_recording(options: dict[str, Any]) -> None:
    """(A segment ended at 2.0 seconds of 1.9, as its timestamp said.)"""
    for seconds in (0.503, 1.2):
        out = Transcriber(target(), processor=PARTS)(speech(seconds), **{"return_timestamps": True, **EN, **options})
        assert out.duration == seconds
        times = [chunk["timestamp"] for chunk in out["chunks"]]
        assert max(end for _, end in times if end is not None) <= seconds
        assert all(start <= end <= 1.2 for s in out.segments for start, end in ((one.start, one.end) for one in s))


@pytest.mark.parametrize("options", [{}, {"chunk_length_s": 1}], ids=str)
def test_languages_are_no_words(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tokenizers do not mark them as special. (The text began with "<|en|>", and no word had a language.)"""
    transcriber, sound = Transcriber(target(3), processor=PARTS), speech(2.8, seed=3)
    options = {"return_timestamps": "word", **GENERATE, **options}
    expected = transcriber(sound, **options)
    monkeypatch.setattr(type(PARTS.tokenizer), "all_special_ids", property(lambda self: [self.eos_token_id]))
    out = transcriber(sound, return_language=True, **options)
    assert out["text"] == expected["text"] != ""
    assert out["chunks"] == [{**word, "language": "english"} for word in expected["chunks"]]


def test_a_call_that_is_stopped() -> None:
    """What was heard until then is there, and says that it is not the whole; other recordings are not begun."""
    transcriber, sound = Transcriber(target(), processor=PARTS), speech(3.3)
    whole = transcriber(sound, return_timestamps=True, **EN)
    [out] = transcriber([sound, sound], return_timestamps=True, stop_when=lambda: True, **EN)
    stops = iter([False, True, True])
    assert [*transcriber(iter([sound, sound]), return_timestamps=True, stop_when=stops.__next__, **EN)] == [out]
    assert (out.stopped, whole.stopped) == (True, False)
    assert 0 < len(out["chunks"]) < len(whole["chunks"])
    assert whole["text"].startswith(out["text"])


def test_words_need_heads() -> None:
    """A checkpoint that does not name aligning heads says so."""
    model = whisper(0)
    del model.generation_config.alignment_heads
    with pytest.raises(UnsupportedError, match="alignment_heads"):
        ours(model, speech(0.5), return_timestamps="word")


# --- the call


def test_segments_are_chunks() -> None:
    """Texts of chunks make the text; their times never go back. A caller who needs none gets the text alone."""
    transcriber, sound = Transcriber(target(), processor=PARTS), speech(3.3)
    out, plain = transcriber(sound, return_timestamps=True, **EN), transcriber(sound, **EN)
    assert plain.tokens == out.tokens
    assert dict(plain) == {"text": out["text"]}  # transformers raises
    assert "".join(chunk["text"] for chunk in out["chunks"]) == out["text"] != ""
    times = [time for chunk in out["chunks"] for time in chunk["timestamp"]]
    assert times == sorted(times)
    assert all(isinstance(time, float) for time in times)
    assert (out.language, out.duration) == ("english", 3.3)
    assert out.seconds > 0
    assert out.real_time_factor == out.seconds / 3.3


def test_languages_change_between_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each window has a language of its own, if so wanted: two people's talk was heard in the first one's language."""
    transcriber, spoken = Transcriber(target(), processor=PARTS), cycle(["<|en|>", "<|de|>"])
    ids = PARTS.tokenizer.convert_tokens_to_ids
    monkeypatch.setattr(target(), "detect_language", lambda **_: torch.tensor([ids(next(spoken))]), raising=False)
    options = {"return_timestamps": True, "return_language": True}
    one = transcriber(speech(3.3), **options)
    assert {chunk["language"] for chunk in one["chunks"]} == {"english"}
    several = transcriber(speech(3.3), **options, language_per_window=True)
    assert [name for name, _ in groupby(chunk["language"] for chunk in several["chunks"])][:3] == [
        *("german", "english", "german")
    ]
    assert several.language == "german"
    words = transcriber(speech(3.3), **options | {"return_timestamps": "word"}, language_per_window=True)
    assert {chunk["language"] for chunk in words["chunks"]} == {"english", "german"}
    with pytest.raises(OptionError, match="leave one out"):
        transcriber(speech(0.5), language_per_window=True, **EN)


@pytest.mark.parametrize(
    "options", [{}, {"return_timestamps": "word"}, slow({"return_timestamps": True}), slow({"chunk_length_s": 1})]
)
def test_text_that_is_told_by_windows(options: dict[str, Any]) -> None:
    """The pieces add up; where a later window may change what was heard there is one."""
    transcriber, sound = Transcriber(target(), "suffix", processor=PARTS), speech(3.3)
    stream, pieces = transcriber.stream(sound, **options, **EN), []
    try:
        while True:
            pieces.append(next(stream))
    except StopIteration as end:
        found = end.value
    whole = transcriber(sound, **options, **EN)
    assert "".join(pieces) == found["text"] == whole["text"]
    assert found.tokens == whole.tokens
    assert (len(pieces) > 1) == (options in ({}, {"return_timestamps": True}))


def test_a_prompt_is_text() -> None:
    """Its ids are those that transformers' tokenizer makes of it. (Names could be given as ids alone.)"""
    transcriber, sound = Transcriber(target(), processor=PARTS), speech(0.9)
    expected = transcriber(sound, **EN, prompt_ids=PROMPT)
    assert transcriber(sound, **EN, prompt="aeb").tokens == expected.tokens
    assert expected.tokens != transcriber(sound, **EN, prompt="").tokens == transcriber(sound, **EN).tokens
    for wrong, message in ((7, "`prompt` must be text"), ("<|en|>", "special token")):
        with pytest.raises(OptionError, match=message):
            transcriber(sound, **EN, prompt=wrong)
    with pytest.raises(OptionError, match="leave one out"):
        transcriber(sound, **EN, prompt="aeb", prompt_ids=PROMPT)


def test_calls_in_the_pipeline_s_shapes() -> None:
    """One input, a list, an iterator; options of the decoding in `generate_kwargs` or written out, or at the start."""
    model, sounds = target(1, stamps=False), [speech(0.7, seed=seed) for seed in range(3)]
    transcriber = Transcriber(model, processor=PARTS)
    one = transcriber(sounds[0], generate_kwargs=GENERATE)
    assert dict(one) == pipe(model)(sounds[0].copy(), generate_kwargs=GENERATE)
    assert transcriber(sounds[0], **GENERATE) == one
    assert Transcriber(model, processor=PARTS, generate_kwargs=GENERATE)(sounds[0]) == one
    many = transcriber(sounds, batch_size=2, **GENERATE)
    assert many[0] == one
    assert isinstance(many, list)
    streamed = transcriber(iter(sounds), batch_size=2, **GENERATE)
    assert not isinstance(streamed, list)
    assert list(streamed) == many
    beside = {"array": sounds[0], "sampling_rate": RATE, "path": "a.wav", "speaker": 3}
    assert transcriber(dict(beside), **GENERATE) == pipe(model)(dict(beside), generate_kwargs=GENERATE)
    assert "raw" in (given := {"raw": sounds[0], "sampling_rate": RATE})
    assert transcriber(given, **GENERATE) == one


def test_options_of_a_call_go_before_those_of_the_transcriber() -> None:
    """Also in `generate_kwargs`, which came last."""
    transcriber = Transcriber(target(), processor=PARTS, language="english")
    assert transcriber(speech(0.5), generate_kwargs={"language": "german"}).language == "german"
    assert transcriber(speech(0.5), language="german").language == "german"
    assert transcriber(speech(0.5)).language == "english"


def test_loaded_by_name(tmp_path: Any) -> None:
    """Model and draft from folders, with the processor beside the model."""
    model = target(1, stamps=False)
    for name, saved in (("target", model), ("draft", sharing(model))):
        saved.save_pretrained(tmp_path / name)
        PARTS.save_pretrained(tmp_path / name)
    found = Transcriber.from_pretrained(tmp_path / "target", str(tmp_path / "draft"))
    assert found.generator.draft.shared_encoder
    plain = whisper(1)  # the saved model has no hooks
    assert found(speech(0.7), **GENERATE) == Transcriber(plain, processor=PARTS)(speech(0.7), **GENERATE)
    assert Transcriber(str(tmp_path / "target"))(speech(0.7), **GENERATE)["text"]


def test_a_generator_brings_its_draft() -> None:
    """A `SpecGenerator` may be shared; what is its own matter is set there."""
    model = target(1, stamps=False)
    generator = SpecGenerator(model, "suffix", tokenizer=PARTS.tokenizer)
    assert Transcriber(generator, processor=PARTS).generator is generator
    with pytest.raises(OptionError, match="`draft`"):
        Transcriber(generator, "suffix", processor=PARTS)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"language": "xx"}, "english, german"),
    ({"language": ["en", "de"]}, "one language"),
    ({"task": "sing"}, "transcribe or translate"),
    ({"return_timestamps": "char"}, "return_timestamps"),
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": ()}, "temperature"),
    ({"prompt_condition_type": "all-segments"}, "condition_on_prev_tokens"),
    ({"prompt_condition_type": "some"}, "first-segment"),
    ({"prompt_ids": [5] * 47}, "no room"),
    ({"chunk_length_s": 2}, "at most 1 seconds"),
    ({"chunk_length_s": 1, "stride_length_s": 0.5}, "less than 1 seconds"),
    ({"stride_length_s": 0.5}, "chunk_length_s"),
    ({"batch_size": 0}, "batch_size"),
    ({"num_return_sequences": 2}, "num_return_sequences"),
    ({"seed": [1, 2]}, "seed"),
    ({"no_such_option": 1}, "no_such_option"),
    ({"prediction": "text"}, "prediction"),
    ({"prompt_ids": "abc"}, "`prompt_ids` must be ids from 0"),
    ({"prompt_ids": [99999]}, "`prompt_ids` must be ids from 0"),
    ({"compression_ratio_threshold": "x"}, "`compression_ratio_threshold` must be a number"),
    ({"condition_on_prev_tokens": "x"}, "`condition_on_prev_tokens` must be True or False"),
    ({"generate_kwargs": "x"}, "`generate_kwargs` must be a mapping"),
    ({"language": "en", "generate_kwargs": {"language": "de"}}, "`language` is given twice"),
    ({"output_scores": True}, "`output_scores` has no place in a Transcriber's result"),
    ({"num_samples": 2}, "`num_samples` above 1 is not supported"),
    ({"progress": True}, r"`progress` must be a function of \(done, whole\), got True: pass one, such as `print`"),
    ({"on_error": "skip"}, r"`on_error` must be a function of \(input, error\), got 'skip'"),
    ({"num_beams": 0}, "num_beams"),
    ({"chunk_length_s": 1, "stride_length_s": 0.499999}, "less than 1 seconds"),
]


@pytest.mark.parametrize(("options", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_options_are_told(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Transcriber(target(), processor=PARTS)(speech(0.3), **options)


def test_parts_that_do_not_fit() -> None:
    """Another kind of model, another window, a draft that hears something else."""
    with pytest.raises(OptionError, match="processor"):
        Transcriber(target())
    with pytest.raises(UnsupportedError, match="Whisper"):
        Transcriber(tiny("t5", vocab=len(PARTS.tokenizer)), processor=PARTS)
    with pytest.raises(OptionError, match="feature_extractor"):
        Transcriber(whisper(0, max_source_positions=100), processor=PARTS)
    with pytest.raises(OptionError, match="8 mels and 50 positions"):
        Transcriber(target(), whisper(1, num_mel_bins=16), processor=PARTS)
    with pytest.raises(OptionError, match="width"):
        Transcriber(target(), WhisperForCausalLM(whisper(1, d_model=16).config).eval(), processor=PARTS)
