"""Models and their passes: sessions, capabilities, loading.

Its layers from the bottom: `encoding` and `hf`, `protocols`, `capability`, `cache`, `probe`, `pictures`, `backends`,
`exactness`, `gguf`, `language_model`, `loading`.
"""

from specdec.models.cache.buffers import free_bytes, prefix_bytes
from specdec.models.encoding import EncoderOutput, Encoding
from specdec.models.hf.model_state import plain_modes
from specdec.models.language_model import LanguageModel
from specdec.models.loading.kept_weights import packed_weights, packed_weights_unwritten
from specdec.models.loading.lighten import may_draft, quantized
from specdec.models.loading.load import check_source, load_model, unwrapped
from specdec.models.pictures import NAMES as PICTURES
from specdec.models.pictures import needs_media_modules, place_tokens, read_pictures, reads_media_alike
from specdec.models.protocols import Session

__all__ = [
    "PICTURES",
    "EncoderOutput",
    "Encoding",
    "LanguageModel",
    "Session",
    "check_source",
    "free_bytes",
    "load_model",
    "may_draft",
    "needs_media_modules",
    "packed_weights",
    "packed_weights_unwritten",
    "place_tokens",
    "plain_modes",
    "prefix_bytes",
    "quantized",
    "read_pictures",
    "reads_media_alike",
    "unwrapped",
]
