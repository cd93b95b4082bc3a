"""Query parameters and their validation."""

import dataclasses
import math
from collections.abc import Mapping

from diagnosis.records.samples_index import MOST_LISTED, SampleQuery

MOST = 10**12
TEXT_CHARS = 1000


class BadQuery(ValueError):
    """An invalid parameter; the message names value, rule and fix."""


class Query:
    """The parameters of one request."""

    def __init__(self, given: Mapping[str, str], *known: str):
        """Raises:
        BadQuery: for an unknown name.
        """
        for name in given:
            if name not in known:
                raise BadQuery(f"{name[:40]!r} is not a parameter here: give {', '.join(known)}")
        self._given = given

    def whole(self, name: str, *, least: int = 0, most: int = MOST) -> int | None:
        """A whole number, or None if it is not given."""
        text = self._given.get(name, "")
        if not text:
            return None
        if not text.isdecimal() or len(text) > 15 or not least <= int(text) <= most:
            raise BadQuery(
                f"{name}={text[:40]!r} must be a whole number between {least} and {most}"
            )
        return int(text)

    def number(
        self, name: str, *, above: float = -math.inf, most: float = math.inf
    ) -> float | None:
        """A finite number, or None if it is not given."""
        text = self._given.get(name, "")
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and above < value <= most):
            raise BadQuery(
                f"{name}={text[:40]!r} must be a number above {above:g}, at most {most:g}"
            )
        return value

    def text(self, name: str) -> str | None:
        """A text, or None if it is empty or not given."""
        text = self._given.get(name, "")
        if len(text) > TEXT_CHARS:
            raise BadQuery(f"{name} has {len(text)} characters: give at most {TEXT_CHARS}")
        return text or None

    def names(self, name: str) -> list[str] | None:
        """Texts separated by commas, or None if it is not given."""
        text = self._given.get(name, "")
        return [one for one in text.split(",") if one] if text else None

    def flag(self, name: str) -> bool:
        """True for `1`, false for `0` or an empty value."""
        text = self._given.get(name, "0") or "0"
        if text not in ("0", "1"):
            raise BadQuery(f"{name}={text[:40]!r} must be 0 or 1")
        return text == "1"

    def choice(self, name: str, *choices: str) -> str | None:
        """One of these texts, or None if it is not given."""
        text = self._given.get(name, "")
        if text and text not in choices:
            raise BadQuery(f"{name}={text[:40]!r} must be {' or '.join(choices)}")
        return text or None


def sample_query(given: Mapping[str, str]) -> SampleQuery:
    """The query of /api/samples.

    Raises:
        BadQuery: naming the parameter.
    """
    names = (field.name for field in dataclasses.fields(SampleQuery))
    query = Query(given, *names)
    try:
        return SampleQuery(
            q=query.text("q") or "",
            kind=query.choice("kind", "train", "eval"),
            first=query.whole("first"),
            last=query.whole("last"),
            prompt=query.whole("prompt"),
            reward_min=query.number("reward_min"),
            reward_max=query.number("reward_max"),
            finish=query.text("finish"),
            why=query.text("why"),
            disagree=query.flag("disagree"),
            error=query.flag("error"),
            offset=query.whole("offset") or 0,
            limit=query.whole("limit", least=1, most=MOST_LISTED) or 50,
        )
    except ValueError as error:
        raise BadQuery(str(error)) from error
