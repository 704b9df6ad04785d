"""Flags of loading a draft: in every command that takes one, and in what it loads."""

import inspect
from typing import Any

from specdec.cli.commands import app
from specdec.cli.request import DRAFT_FLAGS, loading_flags
from specdec.cli.serve import settings_keys
from specdec.cli.transcribe import read_speech

COMMANDS: dict[str, Any] = {command.name or "": command.callback for command in app.registered_commands}


def test_every_command_with_a_draft_takes_its_flags() -> None:
    """They were flags of `generate` alone."""
    for name, command in COMMANDS.items():
        parameters = inspect.signature(command).parameters
        takes_draft = "draft" in parameters or "drafts" in parameters
        assert takes_draft == (DRAFT_FLAGS.keys() <= parameters.keys()), name


def test_they_reach_what_is_loaded() -> None:
    """As `draft_options` of `from_pretrained`, in every form of a command's request."""
    given = {"draft_quantization": "none", "dtype": "bfloat16"}
    expected = {"dtype": "bfloat16", "draft_options": {"quantization": "none"}}
    assert loading_flags(given) == expected
    assert loading_flags({}) == {}
    speech = {"model": "zoo:speech", "draft": None, "set_": None, **given}
    assert read_speech(speech).loading == expected
    names = ("config", "demo", "target", "draft", "name", "context", "prefix_cache", "kv_budget")
    served = settings_keys({**dict.fromkeys(names), "target": "zoo:python-code", **given})
    assert served["models"][0]["loading"] == expected
