"""The only room that touches a transformers forward: sessions over keys and values, capabilities, loading."""

from specdec.models.capability import Capability
from specdec.models.encoding import Encoding
from specdec.models.language_model import LanguageModel
from specdec.models.loading import load
from specdec.models.session import Session, add_rows

__all__ = ["Capability", "Encoding", "LanguageModel", "Session", "add_rows", "load"]
