"""When models are compiled by themselves, and the process that does so; most tests put a shell script in its place."""

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from specdec import LanguageModel, SpecGenerator
from specdec.errors import OptionError
from specdec.kernels.kept import alone, make_room, put
from specdec.models.backends import compiled as compiled_module
from specdec.models.backends import compiler as compiler_module
from specdec.models.backends import packed_layers
from specdec.models.backends.compiled import code_key, compiling
from specdec.models.backends.compiler import KeptCode, compiled_code
from tests.models.test_compile import cache, compiler
from tests.tiny import tiny

__all__ = ["cache", "compiler"]
pytestmark = pytest.mark.usefixtures("built", "by_itself")
CALL = {"max_new_tokens": 8, "do_sample": False}
PATIENCE = 60  # seconds


@pytest.fixture
def by_itself(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Owned tiny models are packed, and compiled when their first pass has run."""
    monkeypatch.setattr(packed_layers, "_LEAST", 1)
    monkeypatch.setattr(packed_layers, "_pack_if_faster", packed_layers._pack)
    monkeypatch.delenv("SPECDEC_COMPILE")
    monkeypatch.setenv("SPECDEC_COMPILE_AFTER", "0")


def owned(model: PreTrainedModel | None = None, **how: str) -> LanguageModel:
    return LanguageModel(model or tiny("llama"), owned=True, **how)


def decode(language: LanguageModel) -> list[list[int]]:
    return SpecGenerator(language).generate(torch.tensor([[5, 9, 33]]), **CALL).sequences.tolist()


def until(holds: Callable[[], bool]) -> None:
    """Waits until something holds."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_seconds_of_all_programs_count(
    cache: Path, compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Compiling begins after a time of passes, some of them in earlier programs; one line says so."""
    compiler('echo no > "$failed"')
    monkeypatch.setenv("SPECDEC_COMPILE_AFTER", "100")

    def seconds() -> list[float]:
        gc.collect()  # a model is freed when the engine's thread, which ran it, has ended
        return [float(line) for file in cache.glob("*/seconds") for line in file.read_text().splitlines()]

    for count in (1, 2):
        language = owned()
        assert language.backend == "packed"
        decode(language)
        assert not language.wait_until_compiled(0)
        del language
        until(lambda count=count: len(seconds()) == count)  # type: ignore[misc]
    [file] = cache.glob("*/seconds")
    assert all(0 < one < 10 for one in seconds())
    with file.open("a") as more:
        more.write("99.999\n")
    language = owned()
    assert not caplog.messages
    decode(language)
    assert not language.wait_until_compiled()
    begun, failed = caplog.messages
    assert begun.endswith("LlamaForCausalLM in the background, once: about a minute (SPECDEC_COMPILE=0 prevents it)")
    assert failed.endswith("they run as before: no")


def test_a_failed_compiler_is_left_alone(
    cache: Path, compiler: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    """For a day, and without another word."""
    compiler('echo no > "$failed"')
    for _ in range(2):
        language = owned()
        decode(language)
        language.wait_until_compiled()
    assert len(caplog.messages) == 2
    [file] = cache.glob("*/failed")
    os.utime(file, (0, 0))
    compiled_module._tell.cache_clear()
    decode(language := owned())
    language.wait_until_compiled()
    assert len(caplog.messages) == 4


def test_who_is_compiled(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not packed models whose backend was named, strict ones, or any with SPECDEC_COMPILE=0."""
    assert owned().ragged.compiled is not None
    assert owned(backend="packed").ragged.compiled is None
    assert owned(exactness="strict").ragged.compiled is None
    assert owned().early_exit(1).ragged.compiled is not None
    assert owned(backend="packed").early_exit(1).ragged.compiled is None
    monkeypatch.setenv("SPECDEC_COMPILE", "0")
    assert owned().ragged.compiled is None
    owned().compile()
    assert not cache.exists()


def test_at_once(compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """`compile` does not wait for passes."""
    compiler('echo no > "$failed"')
    monkeypatch.setenv("SPECDEC_COMPILE_AFTER", "100")
    generator = SpecGenerator(owned())
    generator.compile()
    assert not generator.wait_until_compiled(PATIENCE)
    assert generator.target.ragged.compiled._code.failure() == "no"


def test_seconds_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_COMPILE_AFTER", "soon")
    with pytest.raises(OptionError, match=r"`SPECDEC_COMPILE_AFTER` must be a number of seconds, got 'soon'"):
        owned()


def test_one_compiler_for_all(cache: Path, compiler: Callable[[str], None], caplog: pytest.LogCaptureFixture) -> None:
    """The others wait for it. (The lock of a file does not know processes: two models of one are as good.)"""
    compiler(f'echo once >> {cache}/count; sleep 1; echo no > "$failed"')
    languages = [owned(), owned(tiny("llama", seed=1))]
    for language in languages:
        decode(language)
    assert not any(language.wait_until_compiled(PATIENCE) for language in languages)
    assert (cache / "count").read_text() == "once\n"
    assert sum("in the background" in message for message in caplog.messages) == 1


def test_a_deleted_model_is_not_waited_for(cache: Path, compiler: Callable[[str], None]) -> None:
    """The thread that waits for a compiler does not keep the model."""
    compiler(f"touch {cache}/begun; sleep 1")
    language = owned()
    decode(language)
    until((cache / "begun").exists)
    gone = weakref.ref(language.ragged.model)
    waiting = language.ragged.compiled._waiting
    del language
    until(lambda: gc.collect() >= 0 and gone() is None)
    waiting.join(PATIENCE)


def test_a_cache_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line, for all models of a program."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_COMPILED", str(tmp_path / "file" / "compiled"))
    for _ in range(2):
        language = owned()
        decode(language)
        assert not language.wait_until_compiled(PATIENCE)
    [line] = caplog.messages
    assert line.endswith(
        "cannot be written to (Not a directory): change that, or name another folder in SPECDEC_COMPILED"
    )


def test_old_code_is_deleted(cache: Path, tmp_path: Path) -> None:
    """What was not loaded for the longest time goes first; the new code stays, and what another process compiles."""
    codes = [KeptCode(name) for name in ("first", "second", "third", "busy", "new")]
    for age, code in enumerate(reversed(codes)):
        code.folder.mkdir(parents=True)
        for file in (code.calls, code.code):
            (made := tmp_path / "made").write_bytes(bytes(1000))
            put(made, file)
        os.utime(code.code, (10**9 - age, 10**9 - age))
    (others := codes[0].folder.parent / "photos").mkdir()
    (others / "file").write_bytes(bytes(10**6))  # of somebody who named this folder; it was deleted
    codes[0].check()  # as loading does
    with codes[3].alone():
        make_room(codes[4].folder, codes[4].code.name, 7000, "SPECDEC_COMPILED")
        assert [code.exists for code in codes] == [True, False, False, True, True]
        make_room(codes[4].folder, codes[4].code.name, 1, "SPECDEC_COMPILED")
    assert [code.exists for code in codes] == [False, False, False, True, True]
    assert (others / "file").exists()


def test_a_bound_that_is_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SPECDEC_COMPILED_BYTES", "1G")
    language = owned()
    decode(language)
    assert not language.wait_until_compiled(PATIENCE)
    assert "SPECDEC_COMPILED_BYTES must be a number of bytes, got '1G'" in caplog.text


def test_low_priority(tmp_path: Path) -> None:
    """Where Linux weighs sessions, the compiler's own has the low priority too."""
    (tmp_path / "shown.py").write_text("import os; print(os.nice(0), open('/proc/self/autogroup').read())")
    if not Path("/proc/self/autogroup").exists():
        pytest.skip("sessions have no priority here")
    command = [sys.executable, "-c", compiler_module._TURN, "shown", "turn.lock", "1"]
    done = subprocess.run(command, cwd=tmp_path, start_new_session=True, capture_output=True, text=True, check=True)
    nice, *_, session = done.stdout.split()
    assert nice == session != "0"


def test_a_turn_that_comes_too_late(tmp_path: Path) -> None:
    """A process whose program ended before it could begin ends too. (Seven of them waited for one another.)"""
    (tmp_path / "shown.py").write_text("print('begun')")
    (work := tmp_path / "work").mkdir()
    (program := subprocess.Popen([sys.executable, "-c", ""])).wait()
    command = [sys.executable, "-c", compiler_module._TURN, str(work), "shown", "turn.lock"]
    with alone(tmp_path / "turn.lock", "HERE"):
        waiting = [
            subprocess.Popen(
                [*command, str(pid)], cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            for pid in (program.pid, os.getpid())
        ]
        until(lambda: Path("/proc/locks").read_text().count("-> FLOCK") >= 2)
    assert [one.communicate(timeout=PATIENCE)[0] for one in waiting] == ["", "begun\n"]
    assert not work.exists()


@pytest.mark.parametrize(
    ("seconds", "most", "reason"),
    [
        (0, 2**40, "compiling took more than 0 seconds, which SPECDEC_COMPILE_SECONDS changes"),
        (600, 2**20, "compiling took more than 0.0 GiB of memory"),
    ],
)
def test_limits(seconds: int, most: int, reason: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler and the programs that it runs end, and the reason stays. (It stood at 5.4 GB for 36 minutes.)"""
    ended = list[tuple[int, int]]()
    monkeypatch.setattr(os, "killpg", lambda *given: ended.append(given))
    (work := cache / "key" / "tmp").mkdir(parents=True)
    compiler_module._watch(work, seconds, most)
    assert ended == [(0, signal.SIGKILL)]
    assert KeptCode("key").failure() == reason
    assert not work.exists()


def test_too_little_memory(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing begins, a line says why, and the next program looks again."""
    monkeypatch.setattr(compiler_module, "free_bytes", lambda device: 2**30)
    language = owned()
    decode(language)
    assert not language.wait_until_compiled(PATIENCE)
    [line] = caplog.messages
    assert "as before: compiling may take 1.0 GiB of memory, and 1.0 are free: end other programs" in line
    assert not [*cache.glob("*/*")]


def test_what_is_said_of_it(cache: Path) -> None:
    """How many models are compiled, which one is compiled now, and why one was not."""
    model, place = owned().ragged.model, f"of 0 models in {cache}"
    code = KeptCode(code_key(model))
    assert (compiling(model), compiled_code()) == (None, place)
    with code.alone(), alone(cache / "turn.lock", "HERE"):
        assert compiling(model) == "it is compiled in the background now"
        assert compiled_code() == f"{place}; one more is compiled now"
    code.folder.mkdir()
    code.fail("no room")
    assert str(compiling(model)).endswith("no room")
    assert compiled_code() == f"{place}; 1 could not be compiled, the last one because: no room"


# --- with a compiler

PROGRAM = """
import sys; from tests.models.test_compiler import decode, owned, packed_layers
packed_layers._LEAST, packed_layers._pack_if_faster = 1, packed_layers._pack
decode(owned())
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_compiler_outlives_the_program(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another program goes on while it works, and runs the code between two rounds, with the same text."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert "in the background, once" in done.stderr
    assert not [*cache.glob("*/passes.pt2")]
    language = owned()
    generator = SpecGenerator(language)
    [before] = decode(language)
    assert language.backend == "packed"
    ids, found = torch.tensor([before[:3]]), set()
    while language.backend == "packed":
        found.add(tuple(generator.generate(ids, max_new_tokens=60, do_sample=False).sequences[0].tolist()))
    for _ in range(2):
        found.add(tuple(generator.generate(ids, max_new_tokens=60, do_sample=False).sequences[0].tolist()))
    assert len(found) == 1
    assert language.ragged.compiled.ready
    assert not [message for message in caplog.messages if "in the background" in message]
    assert sorted(path.name for path in cache.glob("*/*") if not path.name.endswith("sha256")) == [
        "calls.pt",
        "passes.pt2",
        "seconds",
    ]
