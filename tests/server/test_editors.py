"""What plug-ins of editors ask for: text in a gap, predictions, scores alone, fields of other servers' clients."""

import json
from functools import cache
from typing import Any

import pytest
from transformers import AddedToken

from specdec import SpecGenerator
from specdec.server.infill import Infill
from specdec.server.text import TextModel
from tests.folders import WIDTH, byte_tokenizer
from tests.generator.test_tokenizers import kinds
from tests.server.served import TOKENIZER, app, asking, events, model_of, text_model
from tests.tiny import tiny

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
QWEN += ["<|repo_name|>", "<|file_sep|>", "<|endoftext|>"]
GAPS = {
    "qwen": QWEN,
    "starcoder": ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    "codellama": ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"],
    "deepseek": ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
}
CHATS = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
USER = {"role": "user", "content": "abc abc abc ab"}


def tokenizer_of(kind: str) -> Any:
    """A tokenizer over bytes with a model's tokens for gaps."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True) for token in GAPS[kind]], special_tokens=True)
    return tokenizer


@cache
def gap_model(kind: str) -> TextModel:
    """A tiny model with such a tokenizer."""
    target = tiny("llama", vocab=WIDTH + len(GAPS[kind]), max_position_embeddings=512)
    return TextModel("text", SpecGenerator(target, "suffix", tokenizer=tokenizer_of(kind)), context=512)


@pytest.mark.parametrize("kind", GAPS)
def test_suffixes(kind: str) -> None:
    """The tokens of the tokenizer stand around both texts. (`suffix` was refused.)"""
    model, (before, after, middle) = gap_model(kind), GAPS[kind][:3]
    ids = model.tokenizer(f"{before}def f({after}):{middle}", add_special_tokens=False)["input_ids"]
    ends = range(WIDTH, WIDTH + len(GAPS[kind]))
    [text] = model.generator.generate([ids], max_new_tokens=20, do_sample=False, eos_token_id=[2, *ends]).texts
    with asking(app(model)) as c:
        body = {"prompt": "def f(", "suffix": "):", "temperature": 0, "max_tokens": 20}
        whole, stream = c.complete(**body), c.complete(**body, stream=True)
        infill = {"input_prefix": "def ", "prompt": "f(", "input_suffix": "):", "temperature": 0, "n_predict": 20}
        filled = c.post("/infill", json=infill).json()
    assert whole["choices"][0]["text"] == filled["content"] == text
    assert "".join(event["choices"][0]["text"] for event in stream[:-1]) == text
    assert whole["usage"]["prompt_tokens"] == filled["tokens_evaluated"] == len(ids)
    assert filled["stop"] is True


def test_models_say_what_they_are() -> None:
    """Whether they fill gaps, and the name that a client may have meant. (Editors tried, and got a 400.)"""
    with asking(app(gap_model("qwen"))) as c:
        [card] = c.get("/v1/models").json()["data"]
        assert card["specdec"]["infill"] is True
        name = card["id"] + "x"
        wrong = [c.get(f"/v1/models/{name}"), c.post("/v1/completions", json={"model": name, "prompt": "a"})]
        assert all(f"(did you mean {card['id']!r}?)" in answer.json()["error"]["message"] for answer in wrong)
    with asking(app()) as c:
        assert c.get("/v1/models").json()["data"][0]["specdec"]["infill"] is False
        assert "did you mean" not in c.get("/v1/models/whisper-1").json()["error"]["message"]


@pytest.mark.parametrize("place", range(len(QWEN)), ids=QWEN)
def test_a_gap_ends_at_its_tokens(place: int) -> None:
    """Any token of the form ends the text, as it would begin another file.

    Texts of Qwen2.5-Coder-0.5B-Instruct ran to their limit, as in transformers: that model writes none of these tokens.
    """
    with asking(app(gap_model("qwen"))) as c:
        body = {"prompt": "a", "suffix": "b", "max_tokens": 9, "logit_bias": {str(WIDTH + place): 100}}
        [choice] = c.complete(**body)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_other_files_come_first() -> None:
    """With Qwen's tokens for repositories, else as text."""
    tokenizer = tokenizer_of("qwen")
    text = tokenizer.decode(Infill(tokenizer, "m").prompt("a", "b", [("x.py", "x = 1")]))
    begin = "<|repo_name|>repository\n<|file_sep|>x.py\nx = 1\n<|file_sep|>this file\n"
    assert text == f"{begin}<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    tokenizer = tokenizer_of("starcoder")
    text = tokenizer.decode(Infill(tokenizer, "m").prompt("a", "b", [("x.py", "x = 1")]))
    assert text == "<fim_prefix>x = 1\n\na<fim_suffix>b<fim_middle>"
    with asking(app(gap_model("qwen"))) as c:
        extra = {"filename": "x", "text": "y", "time": [1, 2]}  # llama.vim's (it was a 400)
        filled = c.post("/infill", json={"input_extra": [extra], "n_predict": 2})
    assert filled.json()["tokens_predicted"] <= 2


LETTER = TOKENIZER.decode([70])


@pytest.mark.parametrize(
    ("token", "stop", "reason"),
    [
        *((70, ["zz"], ("limit", "", 4)), (WIDTH + 6, ["zz"], ("eos", "", 1))),
        (70, ["zz", 2 * LETTER, LETTER], ("word", LETTER, 1)),
    ],
)
def test_why_a_gap_ends(token: int, stop: list[str], reason: tuple[str, str, int]) -> None:
    """llama.cpp's words. (`stop_type` was "eos" at a stop text.)"""
    with asking(app(gap_model("qwen"))) as c:
        body = {"n_predict": 4, "stop": stop, "logit_bias": {str(token): 100}, "temperature": 0}
        filled = c.post("/infill", json=body).json()
    assert (filled["stop_type"], filled["stopping_word"], filled["tokens_predicted"]) == reason
    assert filled["content"] == LETTER * 4 * (reason[0] == "limit")


def test_a_gap_has_no_blank_of_sentencepiece() -> None:
    """A suffix that follows a word without a blank stays so."""
    tokenizer = kinds()["prefix"]
    tokenizer.add_tokens([AddedToken(one, special=True) for one in GAPS["codellama"]], special_tokens=True)
    ids = Infill(tokenizer, "m").prompt("the fox", "a fox")
    assert not any(token.startswith("▁a") for token in tokenizer.convert_ids_to_tokens(ids))


def test_gaps_that_cannot_be_filled() -> None:
    with asking(app()) as c:
        error = c.complete(prompt="a", suffix="b")["error"]
        assert (error["param"], "no tokens" in error["message"]) == ("suffix", True)
        error = c.post("/infill", json={}).json()["error"]
        assert (error["param"], "no tokens" in error["message"]) == ("input_suffix", True)
        error = c.post("/infill", json={"include_stop_str_in_output": True}).json()["error"]
        assert error["param"] == "include_stop_str_in_output"
        assert c.complete(prompt=["a", "b"], suffix="b")["error"]["param"] == "suffix"
        assert c.complete(prompt="a", suffix="b", echo=True)["error"]["param"] == "suffix"
        assert c.post("/infill", json={"stream": True}).json()["error"]["param"] == "stream"
        assert c.post(CHATS, json={"messages": [USER], "suffix": "a"}).json()["error"]["param"] == "suffix"
        assert "choices" in c.complete(prompt="a", suffix="", max_tokens=1)


@pytest.mark.parametrize("draft", ["none", "suffix", "model", "hybrid"])
def test_predictions_with_any_draft(draft: str) -> None:
    """A draft that does not copy reads it beside a suffix draft, and the text is the same. (It was a 400.)"""
    body = {"prompt": USER["content"], "temperature": 0, "ignore_eos": True, "max_tokens": 24}
    with asking(app(model_of(draft))) as c:
        [plain] = c.complete(**body)["choices"]
        for content in (plain["text"], "something else", ""):
            answer = c.complete(**body, prediction={"type": "content", "content": content}, return_metrics=True)
            assert answer["choices"] == [plain]
            if content == plain["text"]:
                assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] >= 8


@pytest.mark.parametrize("draft", ["none", "suffix", "model", "hybrid"])
def test_predictions_beside_a_memory(draft: str) -> None:
    """The text is the same, whether the prediction, the memory or neither is right; the memory serves where it is."""
    body = {"prompt": USER["content"], "temperature": 0, "ignore_eos": True, "max_tokens": 24, "return_metrics": True}
    with asking(app(text_model(draft=draft, memory=True))) as c:
        right, wrong = model_of(draft).generator, "something else, and then more of it"
        [text] = right.generate(USER["content"], do_sample=False, eos_token_id=[], max_new_tokens=24).texts
        accepted = list[int]()
        for content in (wrong, wrong, text):
            answer = c.complete(**body, prediction={"type": "content", "content": content})
            assert answer["choices"][0]["text"] == text
            accepted.append(answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"])
        other = c.complete(**{**body, "prompt": "xyz"}, prediction={"type": "content", "content": text})
        alone = c.complete(**{**body, "prompt": "xyz", "speculate": draft == "none"})
    assert other["choices"] == alone["choices"]
    assert min(accepted[1:]) >= 8


def test_greedy_choices_are_equal() -> None:
    """As many as there should be, whole and streamed. (It was a 400: greedy decoding has only one answer.)"""
    with asking(app()) as c:
        body = {"prompt": USER["content"], "temperature": 0, "n": 3, "max_tokens": 8, "ignore_eos": True}
        whole, stream = c.complete(**body), c.complete(**body, stream=True)[:-1]
        alone = c.complete(**{**body, "n": 1})
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts == [alone["choices"][0]["text"]] * 3
    assert whole["usage"]["completion_tokens"] == 24
    parts = [[event["choices"][0] for event in stream if event["choices"][0]["index"] == row] for row in range(3)]
    assert ["".join(part_event["text"] for part_event in part) for part in parts] == texts


@pytest.mark.parametrize("stream", [False, True])
def test_scores_without_an_answer(stream: bool) -> None:
    """`max_tokens` 0 scores the prompt alone. (It was a 400.)"""
    with asking(app()) as c:
        body = {"prompt": USER["content"], "max_tokens": 0, "echo": True, "logprobs": 1, "n": 2, "temperature": 0}
        scored = c.complete(**body, stream=stream)
        longer = c.complete(**{**body, "max_tokens": 1, "n": 1})["choices"][0]["logprobs"]
        silent = c.complete(prompt="abc", max_tokens=0)
    choices = [event["choices"][0] for event in scored[:-1]] if stream else scored["choices"]
    assert [choice["text"] for choice in choices] == [USER["content"]] * 2 + [""] * (2 * stream)  # and two ends
    assert choices[-1]["finish_reason"] == "length"
    assert choices[0]["logprobs"]["token_logprobs"] == longer["token_logprobs"][:-1]
    assert stream or scored["usage"]["completion_tokens"] == 0
    assert (silent["choices"][0]["text"], silent["usage"]["completion_tokens"]) == ("", 0)


def test_fields_of_other_clients() -> None:
    """Fields of llama.cpp's clients that change no text, its name of `max_tokens`, and stop texts that are empty.

    Continue sends a dozen of `stop`. (More than four were a 400.)
    """
    body = {"prompt": USER["content"], "temperature": 0, "ignore_eos": True}
    harmless = {"cache_prompt": True, "id_slot": -1, "samplers": ["top_k"], "t_max_predict_ms": 0, "stop": ""}
    with asking(app()) as c:
        plain = c.complete(**body, max_tokens=5)
        assert c.complete(**body, **harmless, n_predict=5)["choices"] == plain["choices"]
        assert c.complete(**body, max_tokens=5, n_predict=9, stop=["", ""])["choices"] == plain["choices"]
        stops = ["a", *(f"<|{word}|>" for word in ("endoftext", "fim_prefix", "fim_pad", "im_end")), "\n\n", "/src/"]
        first, among = (c.complete(**body, max_tokens=16, stop=some)["choices"] for some in (stops[:1], stops))
        long = c.complete(prompt="a" * 480, n_predict=-1, ignore_eos=True)["usage"]  # (-1 meant 16 tokens)
        same = c.complete(prompt="a" * 480, max_tokens=-1, ignore_eos=True)["usage"]  # (-1 was a 400)
        wrong = c.complete(prompt="a", n_predict=-2)["error"]
        talk = {"messages": [USER], "ignore_eos": True}
        lengths: list[dict[str, int]] = [{"max_tokens": -1}, {"max_completion_tokens": -1}, {}, {"max_tokens": 0}]
        talks = [c.post(CHATS, json={**talk, **length}).json()["usage"] for length in lengths]
        chat = c.post(CHATS, json={"messages": [USER], "n_predict": 3, "ignore_eos": True, **harmless}).json()
    assert chat["usage"]["completion_tokens"] == 3
    assert among == first
    assert (long["total_tokens"], same["total_tokens"], wrong["param"]) == (512, 512, "n_predict")
    assert [usage["total_tokens"] for usage in talks[:3]] == [512] * 3
    assert talks[3]["completion_tokens"] == 0


def test_paths_and_fields_of_ollama() -> None:
    """An error names the path and the field that do the same. (It was a 404, and a 400, without a way out.)"""
    with asking(app()) as c:
        for path in ("/api/chat", "/api/generate", "/chat/completions"):
            answer = c.post(path, json={"messages": [USER]})
            words = "this path does not exist (did you mean /v1/chat/completions?)"
            assert (answer.status_code, answer.json()["error"]["message"][: len(words)]) == (404, words), path
        for field, words in {
            "num_predict": "did you mean `max_tokens`?", "num_ctx": "`--context`", "temprature": "`temperature`?)",
            "options": "beside `model`", "repeat_penalty": "`repetition_penalty`", "mirostat": "`min_p`",
        }.items():  # fmt: skip
            for path, body in {"/v1/completions": {"prompt": "a"}, CHATS: {"messages": [USER]}}.items():
                error = c.post(path, json={**body, field: 5}).json()["error"]
                assert (error["param"], words in error["message"]) == (field, True), error
        neutral = {"repeat_penalty": 1.0, "mirostat": 0, "mirostat_tau": 5.0}  # as clients with sliders send them
        assert "choices" in c.complete(prompt="a", max_tokens=1, **neutral)
        far = c.complete(prompt="a", **{"x" * 9999: 5})["error"]["message"]
        half = c.post("/v1/completions", content=rb'{"prompt": "a", "max_token\ud800": 1}', headers=JSON)
    assert far.endswith("is not known here: leave it out")
    assert half.status_code == 400


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_schemas_beside_their_type(kind: str) -> None:
    """As llama.cpp's clients send them. (`schema` was a 400.)"""
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": [5]}}, "required": ["a"], "additionalProperties": False}
    with asking(app()) as c:
        form = {"type": kind, "schema": schema}
        text = c.complete(prompt="x", response_format=form, max_tokens=60, seed=1)["choices"][0]["text"]
        wrong = c.complete(prompt="x", response_format={"type": kind, "schema": 5})["error"]["param"]
        text_form = c.complete(prompt="x", response_format={"type": "text", "schema": schema})["error"]["param"]
    assert json.loads(text) == {"a": 5}
    assert (wrong, text_form) == ("response_format.schema", "response_format")


def test_lengths_are_cut_to_the_context() -> None:
    """Where `max_tokens` does not fit, and in a chat without one. (It was a 400, and still above 1,048,576.)"""
    model = text_model(draft="none")
    with asking(app(model)) as c:
        text = c.complete(prompt="a" * 500, max_tokens=9_999_999, ignore_eos=True)
        chat = {"messages": [{"role": "user", "content": "a" * 480}], "max_tokens": 99_999, "ignore_eos": True}
        chats = [c.post(CHATS, json=body).json() for body in (chat, {**chat, "max_tokens": None})]
        long = c.complete(prompt="a" * 512, max_tokens=1)["error"]
    assert {answer["usage"]["total_tokens"] for answer in (text, *chats)} == {model.context}
    assert text["choices"][0]["finish_reason"] == "length"
    assert (long["param"], long["code"]) == ("prompt", "context_length_exceeded")


def test_a_final_message_is_continued() -> None:
    """With `continue_final_message` the answer goes on in the assistant's last message; without, a new one begins."""
    messages = [USER, {"role": "assistant", "content": "he"}]
    prompts = [
        TOKENIZER.apply_chat_template(messages, tokenize=False, **how)
        for how in ({"continue_final_message": True}, {"add_generation_prompt": True})
    ]
    with asking(app()) as c:
        body = {"messages": messages, "max_tokens": 9, "temperature": 0}
        answers = [c.post(CHATS, json={**body, "continue_final_message": goes_on}).json() for goes_on in (True, False)]
        texts = [c.complete(prompt=prompt, max_tokens=9, temperature=0) for prompt in prompts]
        streamed = events(c.post(CHATS, json={**body, "continue_final_message": True, "stream": True}).text)
    contents = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert contents == [text["choices"][0]["text"] for text in texts]
    assert "".join(event["choices"][0]["delta"]["content"] for event in streamed[:-1]) == contents[0]
