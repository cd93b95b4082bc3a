"""Texts that may leave the machine: no keys, no tokens, and no more of a file than requested."""

import os
import pathlib
import re
from collections.abc import Mapping

SHOWN = ("JAX_", "XLA_", "TANDEM_")
SHOWN_WHOLE = ("RAY_ADDRESS",)
"""Environment variables whose values may be shown; of all others not even the name is."""

GUARD_BYTES = 8192
"""Read beyond a cut and thrown away after redaction, so that no half of a secret stays. A PEM block
and a token are shorter."""

SECRET_FOLDERS = ("control", "dashboard")
"""In a run's folder: credentials that its driver writes for the owner."""

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|CREDENTIAL|PRIVATE|_KEY$", re.I)
_SECRET_CHARS = 8
"""A shorter value is a word such as `on`, not a secret."""
_SECRET_FILE = re.compile(r"\.(pem|key|crt|p12)$|token$|^\.netrc$", re.I)

_PATTERNS = (
    (re.compile(r"-----BEGIN [A-Z0-9 ]+-----.*?(?:-----END [A-Z0-9 ]+-----|\Z)", re.S), "<PEM>"),
    (re.compile(r"(://)[^/\s:@\"']+:[^/\s@\"']+@"), r"\1<credentials>@"),
    (re.compile(r"\b(bearer[ \t]+)[\w.~+/=-]{8,}", re.I), r"\1<secret>"),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), "<secret>"),
    (
        re.compile(
            r"((?:token|secret|password|passwd|api[_-]?key|credentials?)"
            r"[\"']?[ \t]*[:=][ \t]*[\"']?)"
            r"(?![\d.eE+-]+(?:[\s,;}\"')]|$))[\w./+=~-]{16,}",
            re.I,
        ),
        r"\1<secret>",
    ),
)
"""Patterns of secrets; a number of many digits is none."""


class Redactor:
    """Replaces secrets in text: those of this process's environment, and all that look like one."""

    def __init__(self, environ: Mapping[str, str]):
        self._environ = dict(environ)
        named = {
            value.strip(): name
            for name, value in environ.items()
            if _SECRET_NAME.search(name) and len(value.strip()) >= _SECRET_CHARS
        }
        # The longest first: a secret may be a part of another.
        self._values = sorted(named.items(), key=lambda pair: -len(pair[0]))

    def clean(self, text: str) -> str:
        """The text with `<NAME>` in place of a secret variable's value, `<secret>` or `<PEM>`."""
        for value, name in self._values:
            text = text.replace(value, f"<{name}>")
        for pattern, shown in _PATTERNS:
            text = pattern.sub(shown, text)
        return text

    def environment(self) -> dict[str, str]:
        """The variables that may be shown, with their values."""
        return {
            name: self.clean(value)
            for name, value in sorted(self._environ.items())
            if (name.startswith(SHOWN) or name in SHOWN_WHOLE) and not _SECRET_NAME.search(name)
        }

    def tail(self, path: pathlib.Path, limit_bytes: int) -> bytes:
        """The last whole lines of a text file, redacted, at most `limit_bytes`."""
        return self._part(path, limit_bytes, from_end=True)

    def head(self, path: pathlib.Path, limit_bytes: int) -> bytes:
        """The first bytes of a text file, redacted, at most `limit_bytes`."""
        return self._part(path, limit_bytes, from_end=False)

    def _part(self, path: pathlib.Path, limit_bytes: int, *, from_end: bool) -> bytes:
        if is_secret(path):
            raise PermissionError(f"{path.name} holds a secret and is never copied")
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit_bytes - GUARD_BYTES) if from_end else 0)
            raw = file.read(limit_bytes + GUARD_BYTES)
        text = self.clean(raw.decode("utf-8", "replace")).encode()
        if size <= limit_bytes:
            return text[:limit_bytes]
        if not from_end:
            return text[: max(0, min(limit_bytes, len(text) - GUARD_BYTES))]
        text = text[GUARD_BYTES if size > limit_bytes + GUARD_BYTES else 0 :][-limit_bytes:]
        return text.partition(b"\n")[2] or text


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables but for those that hold a secret by their name or by what they look like."""
    patterns = Redactor({})
    return {
        name: value
        for name, value in environ.items()
        if not _SECRET_NAME.search(name) and patterns.clean(value) == value
    }


def is_secret(path: pathlib.Path) -> bool:
    """Whether a file holds keys or tokens, by its folder or name."""
    return path.parent.name in SECRET_FOLDERS or bool(_SECRET_FILE.search(path.name))
