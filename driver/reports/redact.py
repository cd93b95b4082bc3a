"""Texts that may leave the machine: no keys, no tokens, and no more of a file than requested."""

import errno
import os
import pathlib
import re
import stat
from collections.abc import Mapping
from typing import BinaryIO

from services.wire.secret_text import SecretFilter, names_secret

SHOWN = ("JAX_", "XLA_", "TANDEM_")
SHOWN_WHOLE = ("RAY_ADDRESS",)
"""Environment variables whose values may be shown; of all others not even the name is."""

GUARD_BYTES = 8192
"""Read beyond a cut and thrown away after redaction, so that no half of a secret stays. A PEM block
and a token are shorter."""

SECRET_FOLDERS = ("control", "dashboard")
"""In a run's folder: credentials that its driver writes for the owner."""

_SECRET_FILE = re.compile(r"\.(pem|key|crt|p12)$|token$|^\.netrc$", re.I)


class NotPlain(PermissionError):
    """A path that is not itself a file: a link leads elsewhere, and a pipe may never end."""


def open_plain(path: pathlib.Path) -> BinaryIO:
    """Opens a file that is no link, in a folder that is none.

    Raises:
        NotPlain: for anything else that is there.
    """
    if path.parent.is_symlink():
        raise NotPlain(f"{path.parent} is a link: {path.name} is not read")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise NotPlain(f"{path} is a link: it is not read") from error
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise NotPlain(f"{path} is no file: it is not read")
    return file


class Redactor(SecretFilter):
    """Replaces secrets in text: those of this process's environment, and all that look like one."""

    def __init__(self, environ: Mapping[str, str]):
        super().__init__(environ)
        self._environ = dict(environ)

    def environment(self) -> dict[str, str]:
        """The variables that may be shown, with their values."""
        return {
            name: self.clean(value)
            for name, value in sorted(self._environ.items())
            if (name.startswith(SHOWN) or name in SHOWN_WHOLE) and not names_secret(name, value)
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
        with open_plain(path) as file:
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


def is_secret(path: pathlib.Path) -> bool:
    """Whether a file holds keys or tokens, by its folder or name."""
    return path.parent.name in SECRET_FOLDERS or bool(_SECRET_FILE.search(path.name))
