"""What all objects of requests share: null means absent, unknown fields are refused, texts have no half characters."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from specdec.server.errors import FieldError

_UNKNOWN = 10  # unknown fields of an object that are checked
_LONGEST_NAME = 256


def _is_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise FieldError("the text holds half of a character (a lone surrogate): leave it out") from None
    return value


def without_nulls(data: Any) -> Any:
    """An object without its nulls; anything else as it is."""
    return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


Text = Annotated[str, AfterValidator(_is_text)]
Name = Annotated[Text, Field(max_length=_LONGEST_NAME)]


class Sent(BaseModel):
    """An object of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        present = without_nulls(data)
        unknown = [name for name in present if name not in known]
        for name in unknown[_UNKNOWN:]:  # each would be a fault
            del present[name]
        return present
