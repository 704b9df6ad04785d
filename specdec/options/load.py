"""How a model is loaded: one frozen value, filled by keyword arguments, flags and YAML files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from specdec.errors import OptionError, UnsupportedError

OFFLOADS = ("cpu", "disk")
DTYPES = ("auto", "float32", "float16", "bfloat16")
BACKENDS = ("auto", "eager", "packed")
"""How passes run: layers as they are, or packed weights; "auto" measures."""
PASSES = ("backend", "exactness")
"""Options that also apply to models that are already loaded."""
EXACTNESS = ("auto", "strict")
"""The promise: texts are equal as far as the dtype allows, or bit for bit."""
ACTIVATIONS = ("auto", "float")
"""The rows that multiply packed integers: rounded to 8 bits, or as they are."""
_BY_HAND = "load the model with transformers and pass it, `SpecGenerator(model, tokenizer=tokenizer)`"
# transformers' argument that has another name here, or none -> the way out.
FOREIGN = {
    "torch_dtype": "call it `dtype`",
    "load_in_8bit": "pass `quantization='int8'`",
    "load_in_4bit": "pass `quantization='nf4'`",
    "tp_plan": "`device_map='auto'` places whole layers on several devices",
    **dict.fromkeys(
        ("attn_implementation", "cache_dir", "force_download", "quantization_config", "subfolder", "token"), _BY_HAND
    ),
}


@dataclass(frozen=True)
class Quantization:
    """A way to quantize, as it is known before torch is loaded.

    `kind`: a `Quantizer` class, or "module:Class" in `specdec.models.loading`, which is imported when it is used.
    `package`: the package that it needs; `install`: the argument of `pip install` for the package. `offloads`: it works
    with `offload`.
    """

    kind: str | type[Any]
    package: str | None = None
    install: str | None = None
    offloads: bool = False


_BITSANDBYTES = Quantization("quantizers:BitsAndBytes", package="bitsandbytes", install="-e '.[quant]'")
QUANTIZATIONS: dict[str, Quantization] = {
    "int8-weight": Quantization("integer_layers:WeightOnly", offloads=True),
    "int4-weight": Quantization("integer_layers:FourBits"),
    "int8": _BITSANDBYTES,
    "nf4": _BITSANDBYTES,
    "fp4": _BITSANDBYTES,
}
"""Every quantization by its name."""
AUTO, NONE = "auto", "none"
"""Words beside the names: a draft in few bits where that makes it faster, and weights as they are stored."""


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a checkpoint is loaded; the defaults leave it as it is.

    `dtype`: a name, a torch.dtype, or "auto": the checkpoint's, but float32 for float16 weights on a CPU, where float16
    is at least twice as slow, and for speech bfloat16 and 8 bits where they are faster. `quantization`: a name in
    `QUANTIZATIONS`; "auto", which drafts have by default: 4 or 8 bits for a large draft on a CPU, whose rounding
    changes no text; "none". `gguf_file`: its name in the folder or repository. `device_map`, `max_memory` (bytes or
    text like "2GiB"), `revision`, `trust_remote_code`: as in transformers. `offload`: weights stay in memory ("cpu") or
    on "disk" and are read in every pass, all weights or, with `max_memory`, the weights that do not fit;
    `offload_folder`: for weights that must be rewritten, by default a temporary folder. `backend`: "eager" layers,
    "packed" weights in the order in which short passes on a CPU read them, or "auto", which measures.
    `activations`="float" multiplies packed integers by rows as they are, not rounded to 8 bits. `exactness`="strict"
    promises the text of plain decoding bit for bit, with any draft and beside any calls, and is verified.

    Raises OptionError for unknown values, and for fields that contradict one another or lack another.
    """

    dtype: Any = "auto"
    quantization: str | None = None
    gguf_file: str | PathLike[str] | None = None
    device_map: Any = None
    max_memory: Mapping[str | int, str | int] | None = None
    offload: str | None = None
    offload_folder: str | PathLike[str] | None = None
    backend: str = "auto"
    exactness: str = "auto"
    activations: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.quantization == NONE:
            object.__setattr__(self, "quantization", None)
        words = {"quantization": (*QUANTIZATIONS, AUTO, NONE), "offload": OFFLOADS, "backend": BACKENDS}
        words |= {"exactness": EXACTNESS, "activations": ACTIVATIONS}
        for name, choices in words.items():
            if getattr(self, name) not in (None, *choices):
                raise OptionError.of(name, f"one of {', '.join(choices)}", getattr(self, name))
        is_dtype = str(type(self.dtype)) == "<class 'torch.dtype'>"  # torch is not imported here
        if not (self.dtype in DTYPES if isinstance(self.dtype, str) else is_dtype):
            raise OptionError.of("dtype", f"a torch.dtype or one of {', '.join(DTYPES)}", self.dtype)
        if self.max_memory is not None and not isinstance(self.max_memory, Mapping):
            raise OptionError.of("max_memory", "a mapping such as {'cpu': '2GiB', 0: '10GiB'}", self.max_memory)
        if not isinstance(self.trust_remote_code, bool):
            raise OptionError.of("trust_remote_code", "true or false", self.trust_remote_code)
        if self.gguf_file is not None:
            self._check_gguf()
        if self.offload is not None and self.device_map is not None:
            raise OptionError("`device_map` and `offload` both place the weights: pass one of them")
        has_places = self.offload is not None or self.device_map is not None
        if self.max_memory is not None and not has_places:
            raise OptionError("`max_memory` limits `offload` or `device_map`: pass one of them too")
        if self.offload_folder is not None and (self.offload == "cpu" or not has_places):
            raise OptionError("`offload_folder` is for weights on disk: pass `offload='disk'` too")
        entry = QUANTIZATIONS.get(self.quantization or "")
        if self.offload is not None and entry is not None and not entry.offloads:
            names = ", ".join(repr(name) for name, kind in QUANTIZATIONS.items() if kind.offloads)
            raise OptionError(
                f"`quantization`={self.quantization!r} and `offload` do not go together, as such weights stay in "
                f"memory: use {names}, or leave out one of them"
            )

    def _check_gguf(self) -> None:
        if not isinstance(self.gguf_file, str | PathLike) or not fspath(self.gguf_file):
            raise OptionError.of("gguf_file", "the name of a file in the model's folder", self.gguf_file)
        if self.quantization not in (None, AUTO):
            raise OptionError(
                f"`quantization`={self.quantization!r} and `gguf_file` do not go together, as the file is quantized "
                "already: leave out one of them"
            )
        if self.offload is not None:
            raise OptionError(
                f"`offload`={self.offload!r} and `gguf_file` do not go together, as weights of such files stay in "
                "memory: leave out one of them, or offload a checkpoint in safetensors"
            )

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple[Loading, dict[str, Any]]:
        """A `Loading` of the fields in `options`, and the other options; None is a field's default.

        Raises UnsupportedError for arguments of transformers that have another name here, or none.
        """
        if foreign := [name for name in options if name in FOREIGN and options[name] is not None]:
            raise UnsupportedError(f"`{foreign[0]}` is no loading option of specdec: {FOREIGN[foreign[0]]}")
        values = {name: value for name, value in options.items() if name in NAMES and value is not None}
        return cls(**values), {name: value for name, value in options.items() if name not in NAMES}

    @property
    def changes(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    @property
    def beside(self) -> dict[str, Any]:
        """The fields that locate other files of the checkpoint, such as its tokenizer."""
        return {name: getattr(self, name) for name in ("gguf_file", "revision", "trust_remote_code")}

    def of_draft(self, options: Mapping[str, Any] | None) -> Loading:
        """The loading of a draft whose target is loaded like this.

        It has the target's `dtype`, `backend`, `trust_remote_code` and, unless the target is offloaded, `device_map`,
        and the quantization "auto", where `options` do not set them; a draft is never offloaded. Raises OptionError for
        unknown options and `offload`.
        """
        if options is not None and not isinstance(options, Mapping):
            raise OptionError.of("draft_options", "a mapping of loading options", options)
        options = {name: value for name, value in (options or {}).items() if value is not None}
        if unknown := [name for name in options if name not in NAMES]:
            raise OptionError.of("draft_options", f"fields among {', '.join(NAMES)}", unknown[0])
        if "offload" in options:
            raise OptionError("`draft_options` cannot offload: a draft is read for every token and stays in memory")
        # A draft is loaded first: "auto" finds its device still free.
        whole = not isinstance(self.device_map, Mapping) or self.device_map.keys() == {""}
        place = self.device_map if self.offload is None and whole else "auto"
        defaults = {
            "dtype": self.dtype,
            "backend": self.backend,
            "trust_remote_code": self.trust_remote_code,
            "device_map": place,
            "quantization": AUTO,
        }
        return Loading(**{**defaults, **options})


NAMES = tuple(field.name for field in fields(Loading))


def split_gguf(source: str) -> tuple[str, str | None]:
    """Folder and name of a GGUF file by its path; any other source unchanged, and None."""
    path = Path(source)
    return (str(path.parent), path.name) if is_gguf(path) else (source, None)


def is_gguf(path: Path) -> bool:
    """Whether this is a GGUF file, by its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except (OSError, ValueError):
        return False
