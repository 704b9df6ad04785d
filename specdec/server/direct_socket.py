"""Streams written to their socket by the decoding thread, unless the event loop must write first."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import suppress

from starlette.types import Scope

WIRE, LOST = "specdec.wire", "specdec.lost"
"""In the scope of a request: its `Wire`, and the event that its connection is lost."""


class Wire:
    """The connection of one response with a chunked body (HTTP/1.1).

    Python runs one thread at a time: a decoder that wakes the event loop for every token waits for it several times.
    So the decoding thread writes the chunk itself while the loop has nothing to write; otherwise (the head, or data
    that a slow client has not read), events go through the loop, in order.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._loop = transport, asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._waiting = 0  # events that the loop has not written yet
        self._full = False
        self.bytes, self.last = 0, time.monotonic()

    def open(self) -> None:
        """Opens the wire once the event loop has written the head."""
        own = self._transport.get_extra_info("socket")
        if own is not None and not self._transport.is_closing():
            self._socket = socket.fromfd(own.fileno(), own.family, own.type)  # a descriptor of our own
            self._socket.setblocking(False)
            self._full = self._transport.get_write_buffer_size() > 0

    def close(self) -> None:
        """Ends direct writing."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def send(self, event: bytes) -> bool:
        """Writes an event, from any thread. False: the caller must send it through the loop, then call `passed`."""
        with self._lock:
            if self._socket is None or self._waiting or self._full:
                self._waiting += 1
                return False
            chunk = b"%x\r\n%b\r\n" % (len(event), event)
            sent = 0
            with suppress(BlockingIOError):
                try:
                    sent = self._socket.send(chunk)
                except (ConnectionError, TimeoutError):
                    # The loop may not notice: it does not read while requests wait.
                    sent = len(chunk)
                    self._loop.call_soon_threadsafe(self._transport.abort)
            self.bytes, self.last = self.bytes + len(event), time.monotonic()
            if sent < len(chunk):
                self._waiting += 1
                self._loop.call_soon_threadsafe(self._finish, chunk[sent:])
        return True

    def passed(self) -> None:
        """Notes that the loop has written an event."""
        with self._lock:
            self._waiting -= 1
            self._full = self._transport.get_write_buffer_size() > 0

    def _finish(self, rest: bytes) -> None:
        self._transport.write(rest)
        self.passed()


def wire_of(scope: Scope) -> Wire | None:
    """The wire of a request; None under another server or without chunked bodies."""
    return scope.get(WIRE) if scope.get("http_version") == "1.1" else None
