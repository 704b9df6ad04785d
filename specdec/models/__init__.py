"""The only folder that runs a transformers forward: sessions, capabilities, loading."""

from specdec.models.cache.buffers import prefix_bytes
from specdec.models.cache.session import Session
from specdec.models.capability import Capability
from specdec.models.encoding import Encoding
from specdec.models.hf.memory import digest, free_bytes
from specdec.models.hf.model_state import ModelState, plain_modes
from specdec.models.language_model import LanguageModel
from specdec.models.loading.load import load, unwrapped

__all__ = [
    "Capability",
    "Encoding",
    "LanguageModel",
    "ModelState",
    "Session",
    "digest",
    "free_bytes",
    "load",
    "plain_modes",
    "prefix_bytes",
    "unwrapped",
]
