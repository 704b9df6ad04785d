"""Pictures and recordings in the prompts of decoder-only models: which arguments they are, and which row reads
which.
"""

from specdec.models.pictures.places import NAMES, needs_eyes, place_tokens, read_pictures, sees, sees_alike

__all__ = ["NAMES", "needs_eyes", "place_tokens", "read_pictures", "sees", "sees_alike"]
