"""`specdec batch`: rows in, the same rows with their answers out, in order, whatever comes in between."""

import datetime
import json
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specdec import EngineError, SpecGenerator
from specdec.batch import BatchSpec, Source
from specdec.batch import run_batch as run_batch
from specdec.batch.rows import InputRow
from specdec.batch.run import Worker, _warn_misplaced, failure_of
from specdec.cli.commands import run_command
from specdec.decoding.noise import fold
from specdec.options import bundled_models
from specdec.pipelines import Summarizer, Transcriber
from tests.folders import saved_model
from tests.pipelines.models import CHAT

NEW = ["--max-new-tokens", "8"]
PROMPTS = [f"{'row ' * (n % 5)}number {n}" for n in range(12)]
SAMPLE = ["--sample", "--seed", "3"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that name a target and a draft that often disagrees with it."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = AutoTokenizer.from_pretrained(saved_model(folder / "target"))
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder / "target")
    return ["--model", str(folder / "target"), "--draft", saved_model(folder / "draft", seed=1)]


def write(path: Path, rows: Sequence[Any]) -> Path:
    """A file of these rows; text as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def prompts(path: Path) -> Path:
    return write(path, [{"id": n, "prompt": prompt} for n, prompt in enumerate(PROMPTS)])


def batch(*arguments: Any) -> int:
    return run_command(["batch", *map(str, arguments), "-q"])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize("sample", [[], SAMPLE], ids=["greedy", "sampled"])
def test_rows_get_the_text_of_a_call_of_their_own(models: list[str], tmp_path: Path, sample: list[str]) -> None:
    """Rows keep their fields and their order; a row's seed depends on its number alone."""
    source, out = prompts(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    assert batch(source, out, *models, *NEW, *sample, "--at-once", 3) == 0
    generator = SpecGenerator.from_pretrained(models[1])
    options = {"max_new_tokens": 8, "do_sample": bool(sample)}
    for number, row in enumerate(read(out)):
        alone = generator.generate(PROMPTS[number], seed=fold(3, number), **options)
        assert row == {
            "id": number,
            "prompt": PROMPTS[number],
            "output": alone.texts[0],
            "finish_reason": alone.stats.finish_reasons[0],
            "usage": {"prompt_tokens": len(PROMPTS[number]), "completion_tokens": alone.stats.num_new_tokens},
            "error": None,
        }
    assert number == len(PROMPTS) - 1
    again = tmp_path / "again.jsonl"
    assert batch(source, again, *models, *NEW, *sample, "--at-once", 12) == 0
    assert again.read_bytes() == out.read_bytes()


def test_errors_stay_in_their_rows(models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that cannot be read or answered say why, the others are answered, and the exit code is 1."""
    rows = ["no JSON", [1], {"id": 1}, {"prompt": 5}, {"prompt": [70000]}, {"prompt": "x", "options": {"top_q": 1}}]
    right = {"prompt": "good", "options": {"max_new_tokens": 2, "top_p": None}}
    odd = '{"prompt": [5, 6], "note": "\\ud800", "options": ["x"], "score": NaN, "more": {"at": [1, Infinity]}}'
    source = write(tmp_path / "in.jsonl", [*rows, "", right, odd])
    out = tmp_path / "out.jsonl"
    with source.open("ab") as file:
        file.write(b'{"prompt": "\xff"}\n')
    assert batch(source, out, *models, *NEW) == 1
    lines = read(out)
    texts = ["not JSON", "must be a JSON object", "no field `prompt`", "must be text or list", "token 70000", "top_q"]
    for row, text in zip(lines, texts, strict=False):
        assert text in row["error"]
        assert row["output"] is row["finish_reason"] is row["usage"] is None
    assert lines[3]["prompt"] == 5
    assert lines[6]["usage"]["completion_tokens"] == 2
    assert (lines[7]["error"], lines[7]["note"], lines[7]["options"]) == (None, "\ud800", ["x"])
    assert (lines[7]["score"], lines[7]["more"]) == (None, {"at": [1, None]})  # what JSON has no word for
    assert "UTF-8" in lines[8]["error"]
    assert len(lines) == 9
    assert sum(failure_of(line) is not None for line in out.read_bytes().splitlines()) == 7
    errors = capsys.readouterr().err.splitlines()
    assert [line.split(" (")[0] for line in errors[:2]] == [
        "error: row 1: the line is not JSON in UTF-8: Expecting value: line 1 column 1",
        "error: row 2: the line must be a JSON object, got list",
    ]
    assert errors[2].startswith("error: row 3: the row has no field `prompt`")
    assert errors[3:] == [f"error: 4 more rows, each with its `error` in {out}"]
    assert batch(source, out, *models, *NEW, "--overwrite", "--task", "chat") == 1
    assert "row 3: the row has no field `messages`" in capsys.readouterr().err


def test_a_run_that_was_ended_goes_on(models: list[str], tmp_path: Path) -> None:
    """Stopped anywhere, with other settings refused in between: the same file as in one go, no row done twice."""
    rows = Source.of(prompts(tmp_path / "in.jsonl"))
    spec = BatchSpec("generate", models[1], models[3], options={"max_new_tokens": 6, "do_sample": True}, seed=5)
    run_batch(rows, whole := tmp_path / "whole.jsonl", spec)
    out, ends = tmp_path / "out.jsonl", [run_batch(rows, tmp_path / "out.jsonl", spec, stop=lambda: True)]
    assert (ends[0].done, out.read_bytes()) == (0, b"")
    while ends[-1].done < len(PROMPTS):
        news: list[int] = []
        tell, stop = lambda p, news=news: news.append(p.done), lambda news=news: len(news) > 3
        ends.append(run_batch(rows, out, spec, at_once=1, tell=tell, stop=stop))
        assert ends[-1].before == ends[-2].done < ends[-1].done
    assert len(ends) > 3
    assert out.read_bytes() == whole.read_bytes()


def test_settings_must_be_the_same_to_go_on(
    models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another seed, model or input would make another file; `--overwrite` begins it."""
    source, out = prompts(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    assert batch(source, out, *models, *NEW, *SAMPLE) == 0
    whole = out.read_bytes()
    assert batch(source, out, *models, *NEW, *SAMPLE) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert batch(source, out, *models, *NEW, *SAMPLE, "--overwrite") == 0
    assert out.read_bytes() == whole
    assert batch(source, source, *models) == 2
    assert "is the input too" in capsys.readouterr().err
    for arguments, text in [
        ([tmp_path / "none.jsonl", out], "cannot be read"),
        ([source, "out.parquet"], "so name it .jsonl"),
        ([write(tmp_path / "empty.txt", [""]), out], "is empty"),
        ([source, out, "--system", "x"], "--system is for the task chat"),
        ([source, out, "--task", "transcribe", "--sample"], "--sample is for"),
        ([source, tmp_path / "o.jsonl", "--set", "seed=[1, 2]"], "one number"),
        ([source, tmp_path / "o.jsonl", "--set", "num_return_sequences=7"], "num_beam"),
    ]:
        assert batch(*arguments, *models) == 2
        assert text in capsys.readouterr().err


def test_fields_that_an_answer_replaces(tmp_path: Path) -> None:
    """A row's own `output` is not lost without a word."""
    source = Source.of(write(tmp_path / "in.jsonl", [{"prompt": "a", "output": "mine"}] * 2))
    with pytest.warns(UserWarning, match="row 1: the answer replaces its field `output`: rename it") as caught:
        assert len([*_warn_misplaced(source.read("prompt"), BatchSpec("generate", "nowhere"))]) == 2
    assert len(caught) == 1


@pytest.mark.filterwarnings("ignore:row 1. the answer replaces:UserWarning")
def test_lines_of_text_and_parquet(models: list[str], tmp_path: Path) -> None:
    """The other forms of input have the same answers; a table's values that JSON has no word for become text."""
    pq, pa = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed"), pytest.importorskip("pyarrow")
    columns = {"prompt": PROMPTS[:4], "day": [datetime.date(2020, 1, 2)] * 4, "output": [1] * 4}
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    (tmp_path / "in.txt").write_text("\n\n".join(PROMPTS[:4]))
    outs = [tmp_path / "of-table.jsonl", tmp_path / "of-text.jsonl"]
    for name, out in zip(("in.parquet", "in.txt"), outs, strict=True):
        assert batch(tmp_path / name, out, *models, *NEW) == 0
    of_table, of_text = map(read, outs)
    assert of_table == [{**row, "day": "2020-01-02"} for row in of_text]
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "bad.parquet")
    assert batch(tmp_path / "bad.parquet", tmp_path / "bad.jsonl", *models, *NEW) == 1
    assert read(tmp_path / "bad.jsonl")[0]["error"].startswith("the row has no field")


@pytest.mark.filterwarnings("default:row:UserWarning")
def test_options_beside_their_field(models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are data, and the first row that has one is told. (A limit in a row was passed over without a word.)"""
    rows = [{"prompt": "a"}, {"prompt": "b", "max_new_tokens": 3}, {"prompt": "c", "max_new_tokens": 2, "stop": "x"}]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert run_command(["batch", str(source), str(out), *models, *NEW]) == 0
    err = " ".join(capsys.readouterr().err.split())
    assert err.count("sets no option") == 2
    assert "row 2: its field `max_new_tokens` sets no option" in err
    assert "row 3: its field `stop` sets no option" in err
    assert [row["usage"]["completion_tokens"] for row in read(out)] == [8, 8, 8]


def test_a_full_disk(models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is named, and with room the same command goes on to the same bytes. (An errno was all.)"""
    source, out, whole = prompts(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    assert batch(source, whole, *models, *NEW) == 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        assert batch(source, out, *models, *NEW) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    err = " ".join(capsys.readouterr().err.split())
    assert f"error: {out}" in err
    assert "cannot be written (File too large): what was written stays" in err
    assert batch(source, out, *models, *NEW) == 0
    assert out.read_bytes() == whole.read_bytes()


def test_chats(models: list[str], tmp_path: Path) -> None:
    """Messages go through the chat template, behind --system; a text is a message of a user."""
    messages_of_row = [{"role": "user", "content": "hello"}]
    source = write(tmp_path / "in.jsonl", [{"messages": messages_of_row}, {"messages": "hello"}, {"messages": 5}])
    out = tmp_path / "out.jsonl"
    assert batch(source, out, *models, *NEW, "--task", "chat", "--system", "be brief") == 1
    one, other, wrong = read(out)
    messages = [{"role": "system", "content": "be brief"}, *messages_of_row]
    alone = SpecGenerator.from_pretrained(models[1]).generate(messages=messages, max_new_tokens=8)
    assert one["output"] == other["output"] == alone.texts[0]
    assert one["usage"] == other["usage"]
    assert one["usage"]["prompt_tokens"] == alone.sequences.shape[1] - alone.stats.lengths[0]
    assert wrong["error"]


def test_summaries_and_several_texts(models: list[str], tmp_path: Path) -> None:
    """Summaries are the pipeline's; where several texts are asked for, output and reason are lists."""
    source = write(tmp_path / "in.jsonl", [{"text": "One. Two. Three."}, {"text": " "}])
    out = tmp_path / "out.jsonl"
    flags = ["--task", "summarize", "--template", "{text} =>", *NEW]
    assert batch(source, out, *models, *flags) == 1
    first, empty = read(out)
    summarizer = Summarizer.from_pretrained(models[1], template="{text} =>")
    assert first["output"] == summarizer.summarize(["One. Two. Three."], max_new_tokens=8).documents[0].texts[0]
    assert "empty" in empty["error"]
    source, out = prompts(tmp_path / "several.jsonl"), tmp_path / "n.jsonl"
    assert batch(source, out, *models, *NEW, *SAMPLE, "--set", "num_return_sequences=2") == 0
    assert {(len(row["output"]), len(row["finish_reason"])) for row in read(out)} == {(2, 2)}
    for options, kind in ((["num_beams=2", "num_return_sequences=2"], list), (["num_samples=3"], str)):
        sets = [part for option in options for part in ("--set", option)]
        flags = [*NEW, *(SAMPLE if kind is str else []), *sets, "--overwrite"]
        assert batch(source, out, *models, *flags) == 0
        assert {(type(row["output"]), type(row["finish_reason"])) for row in read(out)} == {(kind, kind)}


def test_recordings(tmp_path: Path) -> None:
    """Paths are relative to the file that names them; what is no recording is an error of its row."""
    path, _ = bundled_models.recordings()[0]
    (tmp_path / "here.wav").symlink_to(path)
    source = write(tmp_path / "in.txt", ["here.wav", "none.wav"])
    out = tmp_path / "out.jsonl"
    flags = ["--task", "transcribe", "--model", "zoo:speech", "--set", "return_timestamps=true"]
    assert batch(source, out, *flags) == 1
    heard, missing = read(out)
    alone = Transcriber.from_pretrained("zoo:speech")(str(path), return_timestamps=True)
    assert (heard["audio"], heard["output"], heard["seconds"]) == ("here.wav", alone["text"], round(alone.duration, 3))
    assert heard["chunks"] == json.loads(json.dumps(alone["chunks"]))
    assert "none.wav" in missing["error"]
    assert batch(source, out, *flags, "--max-new-tokens", 3, "--overwrite") == 1
    assert [row["finish_reason"] for row in (heard, read(out)[0])] == ["eos", "length"]


def test_requests_in_the_form_of_openai(models: list[str], tmp_path: Path) -> None:
    """Each line is a response as OpenAI's batches have it, whatever model it names; nothing depends on the clock."""
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    messages = [{"role": "user", "content": "hello"}]
    chat = {"model": "gpt", "messages": messages, "max_tokens": 6, "temperature": 0}
    text = {"prompt": ["ab", "cd"], "n": 2}
    rows = [("/v1/chat/completions", chat), ("/v1/completions", text), ("/v1/completions", {"prompt": "a", "n": 0})]
    rows += [("/v1/embeddings", {"input": "a"}), ("/v1/completions", {"prompt": "a", "colour": 1})]
    rows += [("/v1/completions", {"prompt": "a", "stream": True})]
    source = write(
        tmp_path / "in.jsonl",
        [{"custom_id": f"c{i}", "method": "POST", "url": url, "body": body} for i, (url, body) in enumerate(rows)]
        + ["nonsense"],
    )
    outs = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for at_once, out in enumerate(outs, 1):
        assert batch(source, out, *models, "--at-once", at_once) == 1
    lines = read(outs[0])
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert [row["custom_id"] for row in lines] == ["c0", "c1", "c2", "c3", "c4", "c5", None]
    codes = [row["response"] and row["response"]["status_code"] for row in lines]
    assert codes == [200, 200, 400, 404, 400, 400, None]
    alone = SpecGenerator.from_pretrained(models[1]).generate(messages=messages, max_new_tokens=6)
    answer = lines[0]["response"]["body"]
    assert answer["choices"][0]["message"]["content"] == alone.texts[0]
    assert answer["usage"]["completion_tokens"] == alone.stats.num_new_tokens
    assert len(lines[1]["response"]["body"]["choices"]) == 4
    assert "colour" in lines[4]["response"]["body"]["error"]["message"]
    assert lines[6]["error"]["code"] == "invalid_request"
    for idle in (["--task", "chat"], NEW, SAMPLE):
        assert batch(source, tmp_path / "three.jsonl", *models, *idle) == 2


class Broken:
    """A task whose device is gone after the first row; some rows are wrong by themselves."""

    def answer(self, fields: dict[str, Any], seed: int) -> Any:
        if fields["n"] % 10 == 9:
            raise ValueError("this row is wrong")
        raise RuntimeError("device lost")

    def failure(self, fields: dict[str, Any], error: Exception, seed: int) -> dict[str, Any]:
        return {"error": str(error)}


def test_what_is_no_row_s_fault_ends_the_run() -> None:
    """Not every row that is left is told so: the same command goes on when the machine is well again."""
    worker = Worker(BatchSpec("generate", "nowhere"), Broken())  # type: ignore[arg-type]
    rows = [InputRow(n, {"n": n}) for n in range(30)]
    lines = [worker(row) for row in rows[5:17]]  # the wrong one in between is the row's own fault
    assert all(failure_of(line.data) for line in lines)
    with pytest.raises(EngineError, match=r"device lost.*the same command goes on"):
        worker(rows[17])
