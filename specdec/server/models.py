"""Models of a server: each with its turns, its threads, and whether it decodes."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from specdec.engine.openmp import release_helpers
from specdec.errors import OptionError
from specdec.generator import memories
from specdec.generator.generator import SpecGenerator
from specdec.models.hf.load_errors import check_reached
from specdec.options import bundled_models
from specdec.options.load import NAMES as LOADING
from specdec.options.load import is_gguf
from specdec.pipelines import Transcriber
from specdec.pipelines.speech.audio import check_readers
from specdec.server.admission import Admission
from specdec.server.settings import Limits, ModelSettings
from specdec.server.speech import SpeechModel
from specdec.server.text import TextModel

_SET_BY_REQUESTS = ("do_sample", "max_new_tokens", "max_length", "num_return_sequences", "penalty_alpha")
_READY_SECONDS = 30.0  # seconds after a decoded token in which a model counts as ready
_PROBE_SECONDS = 20.0  # seconds to wait for a token
_LIGHT = 2  # requests at a time that tokenize alone


class Host:
    """One model, the turns and threads of its requests, and when it last decoded."""

    def __init__(self, model: TextModel | SpeechModel, limits: Limits) -> None:
        running = limits.running if isinstance(model, TextModel) else min(limits.recordings, limits.running)
        self.model = model
        self.turns = Admission(running, limits.waiting)
        self.light = Admission(_LIGHT, limits.waiting)
        self.pool = ThreadPoolExecutor(running + 1, thread_name_prefix=f"specdec-{model.name}")
        self.created, self._alive = int(time.time()), float("-inf")
        self._probe: asyncio.Future[None] | None = None

    def note_token(self) -> None:
        self._alive = time.monotonic()

    @property
    def load(self) -> dict[str, int | None]:
        """Requests that run and wait, tokens that are held, and tokens that still fit (None: no limit)."""
        engine = self.model.generator.engine
        rows = [*engine.running, *engine.scheduler.prefilling]
        tokens = sum(row.length for row in rows)
        memory, token_bytes = engine.memory, engine.model.kv_bytes
        free = max(memory.limit // token_bytes - tokens, 0) if memory is not None and token_bytes else None
        requests = {"running": self.turns.running, "waiting": self.turns.waiting}
        return {**requests, "kv_tokens_held": tokens, "kv_tokens_free": free}

    async def is_ready(self) -> bool:
        """Whether it has decoded lately, or decodes a token now; concurrent calls share that token."""
        if time.monotonic() - self._alive < _READY_SECONDS:
            return True
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self.warm_up())
        try:
            await asyncio.wait_for(asyncio.shield(self._probe), _PROBE_SECONDS)
        except Exception:
            return False
        return True

    async def warm_up(self) -> None:
        """Decodes a token."""
        await asyncio.get_running_loop().run_in_executor(self.pool, self.model.warm_up)
        self.note_token()

    def close(self) -> None:
        """Takes no more requests; running ones go on."""
        self.pool.shutdown(wait=False, cancel_futures=True)


def load_served(settings: ModelSettings, limits: Limits, share: float = 0.5) -> TextModel | SpeechModel:
    """Loads a model; `share` of free memory is its default `kv_budget`.

    Frees the calling thread's OpenMP workers, which would slow down decoding threads. Raises OptionError and LoadError
    as `from_pretrained` does, and SpecdecError where audio files cannot be read.
    """
    unknown = [name for name in settings.loading if name not in (*LOADING, "draft_options")]
    if unknown:
        raise OptionError.of("loading", f"fields among {', '.join(LOADING)}, draft_options", unknown[0])
    target = bundled_models.locate(settings.target, "target")
    is_speech = _is_speech(settings, target)
    if not is_speech and (refused := [name for name in _SET_BY_REQUESTS if name in settings.options]):
        raise OptionError(f"`options` of a model may not name `{refused[0]}`, which every request sets: leave it out")
    if is_speech:
        check_readers()
    memory: dict[str, Any] = {"kv_budget": settings.kv_budget or share, "prefix_cache": settings.prefix_cache}
    memory["memory"] = settings.memory if "memory" in settings.model_fields_set else memories.DEFAULT
    kind = Transcriber if is_speech else SpecGenerator
    try:
        pipeline: Any = kind.from_pretrained(target, settings.draft, **memory, **settings.loading, **settings.options)
    finally:
        release_helpers()
    if is_speech:
        return SpeechModel(settings.name, pipeline, limits.audio_seconds)
    return TextModel(settings.name, pipeline, context=settings.context, pixels=limits.picture_pixels)


def _is_speech(settings: ModelSettings, target: str) -> bool:
    """Whether the settings say so, or the checkpoint's config; loading raises the error of one that cannot be read.

    Raises LoadError where the hub cannot be reached.
    """
    if settings.task != "auto":
        return settings.task == "speech"
    how = settings.loading
    if how.get("gguf_file") or is_gguf(Path(target)):
        return False
    hub = {"revision": how.get("revision"), "trust_remote_code": bool(how.get("trust_remote_code"))}
    try:
        return bool(AutoConfig.from_pretrained(target, **hub).model_type == "whisper")
    except (OSError, ValueError) as error:
        check_reached(error, target, "target")
        return False
