"""Sound as it comes, in blocks of samples at a model's rate: of a stream or a microphone, read ahead in a thread."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from queue import Queue
from threading import Event, Thread
from typing import Any, BinaryIO

import numpy as np

from specdec.errors import OptionError, SpecdecError
from specdec.pipelines.speech.audio import Resampler, Samples

_PER_SECOND = 10  # blocks
_AHEAD = 600  # blocks that may wait
_END: Any = object()
_KBITS = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)  # of MPEG 1, layer III, from index 1 on
_LOW_KBITS = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)  # of MPEG 2 and 2.5
_WAY = "convert it, as with ffmpeg -i FILE -f s16le -ac 1 -ar 16000 -"


def microphone_library() -> Any:
    """The package sounddevice; raises SpecdecError where it, or the library that it needs, is not installed."""
    try:
        import sounddevice
    except ImportError:
        raise SpecdecError(
            "--microphone needs sounddevice: pip install -c constraints.txt -e '.[microphone]'"
        ) from None
    except OSError:
        message = "sounddevice finds no PortAudio: install it, as with apt install libportaudio2"
        raise SpecdecError(message) from None
    return sounddevice


def recorded(library: Any, rate: int) -> Iterator[Samples]:
    """The sound of the microphone, without end; raises SpecdecError where there is none, or where sound was lost."""
    try:
        with library.InputStream(channels=1, dtype="float32") as device:
            resample = Resampler(device.samplerate, rate)
            while True:
                block, is_torn = device.read(round(device.samplerate / _PER_SECOND))
                if is_torn:
                    raise SpecdecError(
                        "sound comes faster than it is transcribed, and some was lost: take a smaller model"
                    )
                yield resample(block[:, 0].copy())
    except library.PortAudioError as error:
        raise SpecdecError(f"no microphone can be heard ({error}): connect one, or pipe sound to --stdin") from None


def pcm_samples(content: bytes, channels: int = 1) -> Samples:
    """One channel of 16-bit little-endian PCM; raises OptionError where it ends within a sample."""
    if left := len(content) % (2 * channels):
        raise OptionError(f"the sound ends with {left} of a sample's {2 * channels} bytes: send whole 16-bit samples")
    samples = np.frombuffer(content, "<i2").astype(np.float32) / np.float32(2**15)
    return samples if channels == 1 else samples.reshape(-1, channels).mean(1, dtype=np.float32)


def streamed(stream: BinaryIO, rate: int, source_rate: int) -> Iterator[Samples]:
    """The sound of a stream: WAV, as its header says, or else raw mono samples, `source_rate` per second.

    Both have 16 bits, little-endian. The length that a WAV's header names is often wrong in a stream: all that comes is
    sound. Raises OptionError for other WAVs and kinds of files, and at the end for half a sample.
    """
    head, channels = _exactly(stream, 4), 1
    if head == b"RIFF":
        head, (source_rate, channels) = b"", _wav_format(stream)
    is_whole = head in (b"fLaC", b"OggS") or head[:3] == b"ID3"
    if length := _mp3_frame(head):  # loud raw sound may begin as a frame, but not as two
        head += _exactly(stream, length)
        is_whole = _mp3_frame(head[length:]) > 0
    if is_whole:
        raise OptionError(f"the stream is flac, ogg or mp3, which come whole: pass - in place of --stdin, or {_WAY}")
    resample, frame = Resampler(source_rate, rate), 2 * channels
    size = max(source_rate // _PER_SECOND, 2) * frame
    while content := head + _exactly(stream, size - len(head)):
        whole = len(content) // frame * frame
        yield resample(pcm_samples(content[:whole], channels))
        pcm_samples(content[whole:], channels)
        head = b""
    yield resample.rest()


def _wav_format(stream: BinaryIO) -> tuple[int, int]:
    """Rate and channels of a WAV stream, which is read up to its samples."""
    chunks: dict[bytes, bytes] = {}
    try:
        _exactly(stream, 8)  # its length and "WAVE"
        while (head := struct.unpack("<4sI", _exactly(stream, 8)))[0] != b"data":
            chunks[head[0]] = _exactly(stream, head[1] + head[1] % 2)
        kind, channels, rate, bits = struct.unpack("<HHI6xH", chunks[b"fmt "][:16])
    except (struct.error, KeyError):
        raise OptionError(f"the WAV stream has no whole header: {_WAY}") from None
    if kind not in (1, 0xFFFE) or bits != 16 or not channels or not rate:
        raise OptionError(f"the WAV stream is not 16-bit PCM: {_WAY}")
    return rate, channels


def _mp3_frame(head: bytes) -> int:
    """The bytes of the MP3 frame that begins with these four; 0 where they are no frame's header."""
    word = int.from_bytes(head, "big") if len(head) == 4 else 0
    version, kbits, rate, padding = (word >> 19) & 3, (word >> 12) & 15, (word >> 10) & 3, (word >> 9) & 1
    if word >> 21 != 0x7FF or (word >> 17) & 3 != 1 or version == 1 or kbits in (0, 15) or rate == 3:
        return 0
    per_second = (44_100, 48_000, 32_000)[rate] >> {3: 0, 2: 1, 0: 2}[version]
    size = 144 * _KBITS[kbits - 1] if version == 3 else 72 * _LOW_KBITS[kbits - 1]
    return size * 1000 // per_second + padding


def _exactly(stream: BinaryIO, count: int) -> bytes:
    """So many bytes, fewer at the end; raw streams return what there is."""
    content = b""
    while len(content) < count and (piece := stream.read(count - len(content))):
        content += piece
    return content


def arriving(blocks: Iterable[Samples], is_over: Callable[[], bool] = lambda: False) -> Iterator[Samples]:
    """The blocks, which a thread reads while the caller works; blocks that wait come as one. An error of `blocks` is
    raised after them. At most a minute of sound waits, then the source does. Once `is_over()`, waiting blocks are the
    last.
    """
    queue, is_left = Queue[Any](_AHEAD), Event()

    def read() -> None:
        try:
            for block in blocks:
                queue.put(block)
                if is_left.is_set():
                    return
            queue.put(_END)
        except Exception as error:
            queue.put(error)

    Thread(target=read, name="specdec-sound", daemon=True).start()
    try:
        while not (is_over() and queue.empty()):
            items = [queue.get(), *(queue.get() for _ in range(queue.qsize()))]
            last = None if isinstance(items[-1], np.ndarray) else items.pop()
            if items:
                yield np.concatenate(items)
            if last is _END:
                return
            if last is not None:
                raise last
    finally:
        is_left.set()
        while not queue.empty():  # for a thread that waits for room
            queue.get()
