"""API keys from a file, read again when it changes, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from pathlib import Path

from specdec.errors import OptionError

LOG = logging.getLogger(__name__)
_LEAST = 16  # characters
_KEY = re.compile(f"[!-~]{{{_LEAST},}}")
_NUMBERED = re.compile(r"key-\d+")
_NAMED = re.compile(r"(.+?):\s+(.+)")  # a colon without a space after it is part of a key


class Keys:
    """The keys of a file: `KEY` or `NAME: KEY` per line; lines that begin with # are comments.

    Keys of one name are one client, so that two are valid while one replaces the other. Stores digests only. Raises
    OptionError for a file that cannot be read, has no key, or has an invalid line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names, faults = self._read()
        if faults:
            raise OptionError(f"`api_key_file`: {faults[0]}")

    def name(self, key: str) -> str | None:
        """The name of a key, None for an unknown one; compares all keys, for constant time.

        Reads a changed file first. Invalid lines are logged and allow nothing: a revoked key must not stay valid.
        """
        if self._stat() != self._stamp:
            self._names, faults = self._read()
            for fault in faults:
                LOG.error("`api_key_file`: %s", fault)
            LOG.info("%s was read again: %d keys", self._path, len(self._names))
        digest = _digest(key)
        names = [name for stored, name in self._names.items() if hmac.compare_digest(digest, stored)]
        return names[0] if names else None

    def _stat(self) -> tuple[int, ...] | None:
        """What changes with the file, its mode included; None without a file."""
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino

    def _read(self) -> tuple[dict[bytes, str], list[str]]:
        """Names by digest of the valid keys, and the errors of the file."""
        self._stamp = self._stat()
        try:
            if self._path.exists() and not self._path.is_file():  # reading a pipe may block
                raise OSError("it is no regular file")
            lines = self._path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            return {}, [f"{self._path} cannot be read as text ({error}): no key is valid until it can be"]
        names: dict[bytes, str] = {}
        faults: list[str] = []
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            match = _NAMED.fullmatch(text)
            name, key = (match[1].strip(), match[2]) if match else (f"key-{number}", text)
            owner = names.get(_digest(key), name)
            if not _KEY.fullmatch(key):
                faults.append(f"line {number} has no key of {_LEAST} or more ASCII characters, no space: write one")
            elif match and _NUMBERED.fullmatch(name):
                faults.append(f"the name in line {number} is one that keys without a name get: choose another")
            elif owner != name:
                faults.append(
                    f"the key in line {number} is a key of {owner!r}, too: write another, or leave the line out"
                )
            else:
                names[_digest(key)] = name
        if not names and not faults:
            faults.append(f"{self._path} has no key in it: write one key a line")
        return names, faults


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
