"""The base class of the configuration sections that a process receives at its start."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError


class Section(BaseModel):
    """A frozen configuration section that forbids unknown keys and non-finite numbers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


S = TypeVar("S", bound=Section)


def validated(kind: type[S], values: Mapping[str, Any]) -> S:
    """A section from plain values that were written by a program.

    Raises:
        ValueError: one line with every key at fault.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        faults = []
        for fault in error.errors():
            key, said = ".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")
            faults.append(f"{key}: {said}" if key else said)
        raise ValueError("; ".join(faults)) from None
