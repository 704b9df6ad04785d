"""Completions and chats: the text is the library's own, in OpenAI's shapes, whatever the draft and the options."""

import re
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from specdec import LanguageModel, SpecGenerator, __version__
from specdec.generator.tokenizers import decode
from specdec.server.text import TextModel
from tests.folders import WIDTH
from tests.generator.test_tokenizers import KINDS, kinds
from tests.matrix import slow
from tests.server.served import DRAFTS, TOKENIZER, app, asking, events, model_of, text_model
from tests.tiny import tiny

PROMPT = "abc abc abc ab"
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"seed": 3},
    "warped": {"seed": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
    "presence": {"temperature": 0, "presence_penalty": 1.5},
    "frequency": {"seed": 5, "frequency_penalty": 1.0},
    "repetition": {"temperature": 0, "repetition_penalty": 1.3},
    "ngrams": {"temperature": 0, "no_repeat_ngram_size": 2},
    "bias": {"seed": 1, "logit_bias": {"70": 5, "71": -100}},
    "stop": {"seed": 2, "stop": ["a", "e", "i"]},
    "beams": {"num_beams": 3},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "words": {"num_beams": 2, "constraints": ["ok"]},
    "ranked": {"num_samples": 3, "seed": 4},
    "block": {"sampling": "block", "seed": 6},
    "least": {"temperature": 0, "min_tokens": 8},
    "endless": {"temperature": 0, "ignore_eos": True},
    "regex": {"seed": 7, "guided_regex": "[a-z]{3}(-[0-9]{2}){1,3}"},
}
QUICK = ("greedy", "warped", "presence", "stop", "beams", "regex")


def request(**fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 20, **fields}


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in OPTIONS])
def test_every_draft_with_every_option(name: str) -> None:
    """No draft changes a text, whole or streamed (elsewhere a penalty beside a draft ends the process)."""
    outcomes = set()
    for draft in DRAFTS if name != "block" else ["none"]:  # block sampling keeps the law, not the text
        with asking(app(model_of(draft))) as c:
            [choice] = c.complete(**request(**OPTIONS[name]))["choices"]
            stream = c.complete(**request(**OPTIONS[name], stream=True))
        assert stream.pop() == "[DONE]", stream
        assert "".join(event["choices"][0]["text"] for event in stream) == choice["text"]
        assert [event["choices"][0]["finish_reason"] for event in stream][-1] == choice["finish_reason"]
        outcomes.add((choice["text"], choice["finish_reason"]))
    assert len(outcomes) == 1


def test_contrastive_search_goes_without_the_draft() -> None:
    """It takes none; the request need not know."""
    with asking(app(model_of("model"))) as c:
        answer = c.complete(**request(penalty_alpha=0.6, top_k=4, return_metrics=True))
    assert answer["choices"][0]["text"]
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_several_prompts_and_choices() -> None:
    """Choices are numbered prompt by prompt; ids and texts are the same prompt; each text is as alone."""
    ids = TOKENIZER("zzz")["input_ids"]
    with asking(app()) as c:
        many = c.complete(**request(prompt=["abc", "zzz"], n=2, seed=1))
        alone = c.complete(**request(prompt=ids, n=2, seed=1))
        stream = c.complete(**request(prompt=["abc", "zzz"], n=2, seed=1, stream=True))
    texts = [choice["text"] for choice in many["choices"]]
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
    assert texts[2:] == [choice["text"] for choice in alone["choices"]]
    assert texts[2] != texts[3]
    streamed = ["", "", "", ""]
    for event in stream[:-1]:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == texts
    assert many["usage"]["prompt_tokens"] == 6


@pytest.mark.parametrize(
    "how", [{"num_beams": 4, "n": 4, "length_penalty": -1.0}, {"num_samples": 6, "n": 3, "seed": 4}], ids=str
)
def test_every_choice_has_its_own_finish_reason(how: dict[str, Any]) -> None:
    """Beams and ranked samples too, which end at different stop strings or at the length limit."""
    stops = ["p", ":", "a", "e"]
    fields = {"max_tokens": 12, "ignore_eos": True, "stop": stops, "include_stop_str_in_output": True, **how}
    with asking(app()) as c:
        choices = c.complete(**request(**fields))["choices"]
    right = ["stop" if any(stop in choice["text"] for stop in stops) else "length" for choice in choices]
    assert [choice["finish_reason"] for choice in choices] == right
    assert len({*right}) == 2


def test_chat() -> None:
    """A conversation goes through the template, parts are joined, and developers speak for the system."""
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]},
    ]
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    prompt = TOKENIZER.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
    with asking(app()) as c:
        body = {"messages": messages, "seed": 1}
        chat = c.post("/v1/chat/completions", json={**body, "max_tokens": 9}).json()
        text = c.complete(**request(prompt=prompt, seed=1, max_tokens=9))
        body |= {"max_completion_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
        stream = events(c.post("/v1/chat/completions", json=body).text)
    assert chat["choices"][0]["message"]["content"] == text["choices"][0]["text"]
    assert chat["usage"]["prompt_tokens"] == len(TOKENIZER(prompt)["input_ids"])
    deltas = [event["choices"][0]["delta"] for event in stream[:-2]]
    assert deltas[0]["role"] == "assistant"
    assert not any("role" in delta for delta in deltas[1:])
    assert "".join(delta["content"] for delta in deltas) == text["choices"][0]["text"]
    assert stream[-2]["choices"] == []
    assert stream[-2]["usage"]["completion_tokens"] == chat["usage"]["completion_tokens"]
    assert all(event["usage"] is None for event in stream[:-2])


def test_usage_as_it_grows() -> None:
    """In every event where that is asked for, as load generators do; null is what is not there."""
    with asking(app()) as c:
        options = {"include_usage": True, "continuous_usage_stats": True}
        nothing = dict.fromkeys(("stop", "n", "echo", "logprobs", "top_p", "tools", "user", "response_format"))
        body = request(stream=True, stream_options=options, ignore_eos=True, **nothing)
        counts = [event["usage"]["completion_tokens"] for event in c.complete(**body)[:-1]]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] == 20


def test_stop_texts_end_and_are_cut() -> None:
    """Also where a stop is several tokens long, and one token more than the stop may have come with it."""
    model = model_of("none")
    ids = TOKENIZER(PROMPT)["input_ids"]
    whole = model.generator.generate([ids], max_new_tokens=40, do_sample=True, top_k=0, seed=2).texts[0]
    stop = next(whole[i : i + 3] for i in range(8, 30) if whole[i : i + 3].isascii())

    with asking(app(model)) as c:
        cut, whole_stop = (
            c.complete(**request(seed=2, max_tokens=40, stop=stop, include_stop_str_in_output=whole))["choices"][0]
            for whole in (False, True)
        )
    assert cut["text"] == whole[: whole.index(stop)]
    assert whole_stop["text"] == whole[: whole.index(stop) + len(stop)]
    assert cut["finish_reason"] == whole_stop["finish_reason"] == "stop"


def test_a_models_own_ends() -> None:
    """Its `options` set end tokens, with which an answer in a form ends too, and stop strings, which are cut.

    (A finished form went on until the length limit, and the strings stayed.)
    """
    [end] = TOKENIZER.encode("!")
    with asking(app(text_model(draft="none", eos_token_id=end))) as c:
        [choice] = c.complete(**request(guided_regex="[01]{3}"))["choices"]
    assert (choice["text"][3:], choice["finish_reason"]) == ("!", "stop")
    with asking(app(model_of("none"))) as c:
        whole = c.complete(**request(temperature=0))["choices"][0]["text"]
    stop = next(letter for letter in whole[3:] if letter.isprintable() and letter != "\ufffd")
    for keeps in (False, True):
        with asking(app(text_model(draft="none", stop_strings=stop))) as c:
            [choice] = c.complete(**request(temperature=0, include_stop_str_in_output=keeps))["choices"]
        assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(stop) + keeps], "stop")


def test_a_request_wins_over_the_model() -> None:
    """Its penalty was that of the checkpoint, where that has one; one of 1, which is none, too."""
    answers = []
    for model in (model_of("none"), text_model(draft="none", repetition_penalty=9.0)):
        with asking(app(model)) as c:
            bodies = [request(temperature=0, repetition_penalty=penalty) for penalty in (1.0, 1.3)]
            answers.append([c.complete(**body)["choices"] for body in bodies])
            inherited = c.complete(**request(temperature=0))["choices"]
    assert answers[0] == answers[1]
    assert inherited not in answers[1]


def test_a_form_needs_an_end() -> None:
    """Its text has one with `stop_token_ids`. (It was filled up with end tokens.)"""
    with asking(app(model_of("none"))) as c:
        fault = c.complete(**request(guided_regex="[01]{3}", ignore_eos=True))["error"]
        [choice] = c.complete(**request(guided_regex="[01]{3}", ignore_eos=True, stop_token_ids=[2]))["choices"]
    assert fault["param"] == "ignore_eos"
    assert (len(choice["text"]), choice["finish_reason"]) == (3, "stop")


def test_stop_token_ids_end_a_text() -> None:
    """As vLLM's: beside the model's own ends, also where those are ignored, and their text stays."""
    model = model_of("suffix")
    ids = TOKENIZER(PROMPT)["input_ids"]
    [new] = model.generator.generate([ids], max_new_tokens=20, do_sample=True, top_k=0, seed=9).new_tokens()
    for ignore_eos in (False, True):
        with asking(app(model)) as c:
            answer = c.complete(**request(seed=9, stop_token_ids=[new[5]], ignore_eos=ignore_eos))
        assert answer["usage"]["completion_tokens"] == new.index(new[5]) + 1
        assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [True, False])
def test_log_probabilities(stream: bool) -> None:
    """One entry for every token, its own among the likeliest where it is likely, none above 0."""

    def ask(path: str, **body: Any) -> Any:
        with asking(app(model_of("model"))) as c:
            answer = c.post(path, json={**body, "max_tokens": 8, "seed": 1, "stream": stream, "ignore_eos": True})
        return [e["choices"][0] for e in events(answer.text)[:-1]] if stream else [answer.json()["choices"][0]]

    text = [one["logprobs"] for one in ask("/v1/completions", prompt="abc", logprobs=3)]
    tokens = [one for part in text for one in part["tokens"]]
    assert len(tokens) == 8
    assert all(value <= 0 for part in text for value in part["token_logprobs"])
    assert all(len(top) <= 3 for part in text for top in part["top_logprobs"])
    messages = [{"role": "user", "content": "abc"}]
    chat = ask("/v1/chat/completions", messages=messages, logprobs=True, top_logprobs=2)
    content = [one for part in chat for one in part["logprobs"]["content"]]
    assert len(content) == 8
    assert all(len(one["top_logprobs"]) == 2 for one in content)
    whole = [one for one in content if one["bytes"] is not None and not one["token"].startswith("bytes:")]
    assert all(bytes(one["bytes"]).decode() == one["token"] for one in whole)


def test_what_a_draft_did() -> None:
    """Figures on request, spans that spell the text, and counts of a prediction."""
    model = model_of("suffix")
    ids = TOKENIZER(PROMPT)["input_ids"]
    [expected] = model.generator.generate([ids], max_new_tokens=20, do_sample=False, eos_token_id=[]).texts
    with asking(app(model)) as c:
        body = request(temperature=0, ignore_eos=True)
        detailed = c.complete(**body, return_metrics=True, return_drafted=True)
        predicted = c.complete(**body, prediction={"type": "content", "content": expected}, return_metrics=True)
        quiet = c.complete(**body)
        plain = c.complete(**body, speculate=False, return_metrics=True)
    figures = detailed["metrics"]["speculative_decoding"]
    lengths = {"mean_acceptance_length", "acceptance_histogram"}
    assert lengths | {"draft_acceptance_rate", "num_draft_rounds"} <= set(figures)
    assert sum(figures["accepted_by_source"].values()) == figures["num_accepted_draft_tokens"]
    assert "".join(text for text, _ in detailed["choices"][0]["drafted"]) == detailed["choices"][0]["text"]
    accepted = predicted["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert predicted["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == accepted > 5
    assert "metrics" not in quiet
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert {one["choices"][0]["text"] for one in (detailed, predicted, quiet, plain)} == {expected}


@pytest.mark.parametrize("draft", ["model", "suffix", "none"])
def test_usage_counts_what_any_draft_brought(draft: str) -> None:
    """Without a prediction too, unless the server tells nothing of drafts. (It was 0 with a draft model.)"""
    body = request(temperature=0, ignore_eos=True, speculate=True)
    with asking(app(model_of(draft))) as c:
        answer = c.complete(**body, return_metrics=True)
    with asking(app(model_of(draft), details=False)) as c:
        silent = c.complete(**body)["usage"]["completion_tokens_details"]
    figures, counts = answer["metrics"]["speculative_decoding"], answer["usage"]["completion_tokens_details"]
    assert counts["accepted_prediction_tokens"] == figures["num_accepted_draft_tokens"]
    assert counts["rejected_prediction_tokens"] == figures["num_draft_tokens"] - figures["num_accepted_draft_tokens"]
    assert (sum(counts.values()) > 0) == (draft != "none")
    assert sum(silent.values()) == 0


def test_chunks_of_equal_size() -> None:
    """`stream_chunk` hides what was accepted: every event has as many tokens, and `include_obfuscation` pads it."""
    with asking(app(model_of("suffix"), stream_chunk=3)) as c:
        body = request(temperature=0, stream=True, ignore_eos=True, logprobs=0)
        body["stream_options"] = {"include_obfuscation": True}
        text = c.post("/v1/completions", json=body).text
        parts, sizes = (events(text), [len(line.encode()) for line in text.split("\n\n") if line.startswith("data: {")])
    assert [len(event["choices"][0]["logprobs"]["tokens"]) for event in parts[:-1]] == [3] * 6 + [2]
    assert [size % 128 for size in sizes] == [len("data: ")] * 7


@pytest.mark.parametrize("draft", ["none", "suffix"])
def test_scores_of_a_prompt(draft: str) -> None:
    """`echo` with `logprobs` tells the target's own of all its tokens but the first, then those of the answer."""

    with asking(app(model_of(draft))) as c:
        body = request(echo=True, logprobs=2, temperature=0, max_tokens=4, ignore_eos=True)
        [choice] = c.complete(**body)["choices"]
        parts = [part["choices"][0]["logprobs"] for part in c.complete(**body, stream=True)[:-1]]
    assert choice["text"].startswith(PROMPT)
    logprobs = choice["logprobs"]
    ids = TOKENIZER(choice["text"])["input_ids"]
    assert logprobs["tokens"] == [TOKENIZER.decode([token]) for token in ids]
    assert "".join(logprobs["tokens"])[: logprobs["text_offset"][3]] == "".join(logprobs["tokens"][:3])
    with torch.no_grad():
        expected = model_of(draft).generator.target.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    values = torch.tensor(logprobs["token_logprobs"][1:])
    expected = expected[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert all(len(top) <= 2 for top in logprobs["top_logprobs"][1:])
    assert {name: [one for part in parts for one in part[name]] for name in logprobs} == logprobs
    assert len(parts[0]["tokens"]) == len(TOKENIZER(PROMPT)["input_ids"])


def test_tokens() -> None:
    with asking(app()) as c:
        ids = c.post("/tokenize", json={"prompt": "héllo"}).json()
        same = c.post("/tokenize", json={"content": "héllo", "add_special": True}).json()  # llama.cpp's (it was a 400)
        text = c.post("/detokenize", json={"tokens": ids["tokens"]}).json()
        chat = c.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
        assert c.post("/detokenize", json={"tokens": [10_000]}).status_code == 400
        assert c.get("/version").json() == {"version": __version__}
    assert (ids["count"], same) == (6, ids)
    assert text["prompt"] == text["content"] == "héllo"
    assert decode(TOKENIZER, chat["tokens"]) == "<user>x|<assistant>"


def test_contexts(caplog: pytest.LogCaptureFixture) -> None:
    """One beyond the model's is told. The outer config of a model with further parts has no positions: the text
    decoder has them.
    """
    generator = SpecGenerator(tiny("llama", vocab=WIDTH, max_position_embeddings=96), tokenizer=TOKENIZER)
    assert [TextModel("text", generator, context=wanted).context for wanted in (96, 99)] == [96, 96]
    assert caplog.messages == ["`context` 99 of the model 'text' is more than it has: 96 tokens"]
    target = LanguageModel(tiny("llama", vocab=WIDTH, max_position_embeddings=96))
    outer = SpecGenerator(target, tokenizer=TOKENIZER)
    target.model.config = PretrainedConfig()
    assert TextModel("text", outer).context == 96


@pytest.mark.parametrize("draft", DRAFTS)
def test_drafts_have_the_names_that_users_gave(draft: str) -> None:
    """`suffix` was SuffixDraft."""
    with asking(app(model_of(draft))) as c:
        [card] = c.get("/v1/models").json()["data"]
    assert card["specdec"]["draft"] == {"none": None, "hybrid": "suffix+model"}.get(draft, draft)
    assert card["specdec"]["weights"] == "float32"
    assert card["specdec"]["draft_weights"] == ["float32"] * (draft in ("model", "hybrid"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choices_read_the_prompt_once(dtype: torch.dtype) -> None:
    """The second of two requests re-reads little. (Three choices had more cached tokens than their prompt has.)

    In every dtype. (`cached_tokens` was 0 for ever in bfloat16.)
    """
    target = tiny("llama", vocab=WIDTH).to(dtype)
    model = TextModel("text", SpecGenerator(target, tokenizer=TOKENIZER, prefix_cache=True))
    prompt = "a prompt of more than a block of tokens, which is read by all three choices at once"
    with asking(app(model)) as c:
        usages = [c.complete(prompt=prompt, max_tokens=4, n=3, seed=1)["usage"] for _ in range(2)]
        counts = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        metrics = c.get("/metrics").text
    assert counts == [0, usages[0]["prompt_tokens"] - 1]
    assert f'specdec_prompt_tokens_cached_total{{model="text"}} {sum(counts)}.0' in metrics
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds"):  # whole answers do not count
        assert re.search(f"HELP specdec_{name} .*of a stream", metrics)


@pytest.mark.parametrize("kind", KINDS)
def test_an_echo_joins_its_answer(kind: str) -> None:
    """As the tokenizer decodes both at once. (A blank between them was lost where a tokenizer strips the first one, and
    a character that began in the prompt became replacement characters.)
    """
    tokenizer = kinds()[kind]
    ids = tokenizer("the 日本 fox กข a", add_special_tokens=False)["input_ids"]
    generator = SpecGenerator(tiny("llama", vocab=len(tokenizer)), tokenizer=tokenizer)
    with asking(app(TextModel("text", generator, context=512))) as c:
        for cut in range(1, len(ids)):
            body = request(prompt=ids[:cut], echo=True, temperature=0, max_tokens=2, logit_bias={str(ids[cut]): 100})
            [plain] = c.complete(**body)["choices"]
            [scored] = c.complete(**body, logprobs=1)["choices"]
            assert plain["text"] == scored["text"] == decode(tokenizer, [*ids[:cut], *[ids[cut]] * 2])
            places = zip(scored["logprobs"]["tokens"], scored["logprobs"]["text_offset"], strict=True)
            for text, offset in places:
                assert text.startswith("bytes:") or plain["text"][offset:].startswith(text)
