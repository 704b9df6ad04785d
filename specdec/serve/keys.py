"""API keys: a file of them, read again when it changes, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from specdec.errors import OptionError

_LEAST = 16  # characters


class Keys:
    """The keys of a file: one a line, or `name: key`; lines that begin with # are comments.

    Only digests are held. Raises OptionError for a file that cannot be read, has no key, or has a short one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._stat()
        self._digests = self._read()

    def name(self, given: str) -> str | None:
        """The name of a key, None for one that is not in the file; all keys are compared, equal or not."""
        self._refresh()
        digest, found = _digest(given), None
        for name, known in self._digests.items():
            if hmac.compare_digest(digest, known):
                found = name
        return found

    def _refresh(self) -> None:
        """Reads a changed file; one that is broken or gone leaves the keys as they were."""
        try:
            stamp = self._stat()
            if stamp != self._stamp:
                self._digests, self._stamp = self._read(), stamp
        except OptionError:
            return

    def _stat(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except OSError as error:
            raise OptionError.of("api_key_file", "a readable file", str(self._path), str(error)) from None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> dict[str, bytes]:
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError.of("api_key_file", "a readable text file", str(self._path), str(error)) from None
        found: dict[str, bytes] = {}
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            name, colon, key = text.partition(":")
            name, key = (name.strip(), key.strip()) if colon else (f"key-{number}", text)
            if len(key) < _LEAST:
                raise OptionError(f"`api_key_file`: the key in line {number} is shorter than {_LEAST} characters")
            found[name] = _digest(key)
        if not found:
            raise OptionError(f"`api_key_file`: {self._path} has no key in it: write one key a line")
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
