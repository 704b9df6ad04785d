"""Where older releases of transformers are no reference, because they go wrong themselves."""

import pytest
import transformers
from packaging.version import Version

OLD = Version(transformers.__version__) < Version("5.18")


def wrong_before(what: str) -> pytest.MarkDecorator:
    """Skips a test whose reference, transformers up to 5.17, goes wrong in `what`."""
    return pytest.mark.skipif(OLD, reason=f"transformers {transformers.__version__} goes wrong in {what}")
