"""Settings of a server: one frozen value from flags and YAML, checked before a model is loaded."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, IPvAnyNetwork, ValidationError, model_validator

from specdec.errors import OptionError, closest_name
from specdec.options.drafts import read_draft
from specdec.server.errors import Place, place_of, predicate

Count = Annotated[int, Field(ge=1, le=2**20)]
Bytes = Annotated[int, Field(ge=1, le=2**40)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


def host_of(netloc: str) -> str:
    """The host of `HOST` or `HOST:PORT`, in lower case."""
    host, _, port = netloc.rpartition(":")
    has_port = port.isdecimal() and (":" not in host or host.endswith("]"))  # ::1 has none
    return (host if has_port else netloc).lower()


def address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address of `HOST` or `HOST:PORT`; None for anything else."""
    host = host_of(text).removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _host(text: str) -> str:
    if not text or "/" in text or text != text.strip():
        raise ValueError(f"must be a name without scheme or path, as in models.example.org, got {text!r}")
    return text.lower()


def _draft(text: str) -> str:
    read_draft(text)
    return text


def _origin(text: str) -> str:
    if text != "*" and not re.fullmatch(r"[\w.+-]+://[^\s/]+", text):
        raise ValueError(f"must be an origin without path, as in vscode-webview://*, or *, got {text!r}")
    return re.sub(r"^(http://.*):80$|^(https://.*):443$", r"\1\2", text, flags=re.IGNORECASE)  # browsers leave it out


Origin = Annotated[str, AfterValidator(_origin)]
HostName = Annotated[str, AfterValidator(_host)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSettings(_Frozen):
    """One model of a server, which clients call `name`.

    `loading`: fields of `Loading`. `options`: defaults of calls, without sampling, length and number of answers, which
    requests set. `context`: the most tokens of prompt and answer, by default the model's own. `kv_budget`,
    `prefix_cache`: as in `SpecGenerator`; the models share half of the free memory by default. `memory`: likewise, and
    by default on; clients share none.
    """

    name: Annotated[str, Field(pattern=r"^[\w.:/@-]{1,128}$")]
    target: str
    draft: Annotated[str, AfterValidator(_draft)] | None = None
    task: Literal["auto", "text", "speech"] = "auto"
    loading: dict[str, Any] = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)
    context: Count | None = None
    kv_budget: int | float | None = None
    prefix_cache: bool | int | None = None
    memory: bool | int | str | list[str] = True


class Limits(_Frozen):
    """Limits on clients; each model runs `running` prompts at a time, and `waiting` more wait."""

    running: Annotated[int, Field(ge=1, le=1024)] = 32
    waiting: Annotated[int, Field(ge=0, le=65_536)] = 128
    per_key: Count | None = None
    request_seconds: Seconds = 600.0
    upload_seconds: Seconds = 60.0
    drain_seconds: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 30.0
    notice_seconds: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 5.0
    connections: Count = 1024
    head_seconds: Seconds = 10.0
    send_seconds: Seconds = 30.0
    unread_bytes: Bytes = 2**20
    body_bytes: Bytes = 2 * 2**20
    header_bytes: Annotated[int, Field(ge=1024, le=2**20)] = 16 * 2**10
    prompt_characters: Count = 400_000
    prompts: Annotated[int, Field(ge=1, le=256)] = 16
    choices: Annotated[int, Field(ge=1, le=64)] = 16
    beams: Annotated[int, Field(ge=1, le=64)] = 16
    new_tokens: Count | None = None
    pictures: Annotated[int, Field(ge=0, le=256)] = 8
    picture_bytes: Bytes = 2**20
    picture_pixels: Annotated[int, Field(ge=1, le=2**30)] = 2**23
    audio_bytes: Bytes = 25 * 2**20
    audio_seconds: Seconds = 1800.0
    recordings: Annotated[int, Field(ge=1, le=64)] = 2


class ServeSettings(_Frozen):
    """A whole server.

    `api_key_file` lists keys; an address that other machines reach needs one, or `insecure`. `hosts`: further names
    that browsers may use for it. `origins`: pages that may use it, too, where * stands for any text.
    `trusted_proxies`: whose header X-Forwarded-For is believed.
    With `stream_chunk`, every event of a stream has that many tokens, so that sizes and times of packets do not reveal
    what the target accepted. `details`: whether clients may request figures about drafts.
    """

    models: Annotated[tuple[ModelSettings, ...], Field(min_length=1)]
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    api_key_file: Path | None = None
    insecure: bool = False
    hosts: tuple[HostName, ...] = ()
    origins: tuple[Origin, ...] = ()
    trusted_proxies: tuple[IPvAnyNetwork, ...] = ()
    stream_chunk: Annotated[int, Field(ge=1, le=1024)] | None = None
    details: bool = True
    log: Literal["json", "text", "none"] = "text"
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _check(self) -> ServeSettings:
        names = [model.name for model in self.models]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two models are called {twice[0]!r}: give each a name of its own")
        if not self.is_local and self.api_key_file is None and not self.insecure:
            raise ValueError(
                f"host {self.host!r} can be reached from other machines, and there are no keys: pass --api-key-file, "
                "or --insecure where a proxy before the server asks for keys, with --trusted-proxy ADDRESS so that its "
                "users count as one client each"
            )
        return self

    @property
    def origin_pattern(self) -> str:
        """A regular expression for the origins, in any case of letters, which matches nothing without them."""
        patterns = (re.escape(origin).replace(r"\*", ".*") for origin in self.origins)
        return f"(?i:{'|'.join(patterns) or '(?!)'})"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the address."""
        address = address_of(self.host)
        return self.host == "localhost" or (address is not None and address.is_loopback)


def read_settings(values: Mapping[str, Any]) -> ServeSettings:
    """The settings; raises an OptionError that names every invalid key."""
    try:
        return ServeSettings.model_validate(values)
    except ValidationError as error:
        faults: dict[Place, list[Any]] = {}  # a key of a union type has one for each member
        for fault in error.errors():
            faults.setdefault(place_of(fault, values), []).append(fault)
        inner = [place for place in faults if not any(place == other[: len(place)] != other for other in faults)]
        raise OptionError("; ".join(_fault_text(place, faults[place]) for place in inner)) from None


def _fault_text(place: Place, faults: Sequence[Any]) -> str:
    """What is wrong with the value at one place."""
    where, first = ".".join(map(str, place)), faults[0]
    if first["type"] == "extra_forbidden":
        kinds: dict[str, type[BaseModel]] = {"models": ModelSettings, "limits": Limits}
        near = closest_name(str(place[-1]), kinds.get(str(place[0]), ServeSettings).model_fields)
        return f"`{where}`: unknown key{f' (did you mean `{near}`?)' if near else ''}"
    is_ours = first["type"] == "value_error"
    message = None if is_ours else predicate(first, faults)
    if message is None:
        message = str(first["msg"]).removeprefix("Value error, ")
        return f"`{where}`: {message}" if where else message
    return f"`{where}` {message}"
