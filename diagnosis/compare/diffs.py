"""Differences between two runs other than their numbers: configuration, code, environment."""

import difflib
import json
import pathlib
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

CODE = "code.zip"
FILE_BYTES = 400_000
"""A longer file is not compared line by line."""
DIFF_CHARS = 20_000
"""Maximum length of the diff of one file."""
ALL_CHARS = 400_000
"""Maximum length of all diffs together."""
MOST_FILES = 2_000
"""Maximum number of files compared."""


def value_diff(a: Any, b: Any) -> list[dict[str, Any]]:
    """Dotted keys whose values differ between two nested mappings; None stands for no value."""
    of_a, of_b = dict(_leaves(a)), dict(_leaves(b))
    keys = dict.fromkeys([*of_a, *of_b])
    return [
        {"key": key, "a": of_a.get(key), "b": of_b.get(key)}
        for key in keys
        if (key in of_a) != (key in of_b) or of_a[key] != of_b[key]
    ]


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything that is not a container."""
    if isinstance(value, Mapping) and (value or not prefix):
        items = [(str(key), one) for key, one in value.items()]
    elif isinstance(value, list) and value:
        items = [(str(index), one) for index, one in enumerate(value)]
    else:
        yield prefix, value
        return
    for key, one in items:
        yield from _leaves(one, f"{prefix}.{key}" if prefix else key)


def read_environment(folder: pathlib.Path) -> dict[str, Any]:
    """Of environment.json; empty if the run has no readable one."""
    try:
        found = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # not written yet, or by an older Tandem
        return {}
    return found if isinstance(found, dict) else {}


def code_diff(a: pathlib.Path, b: pathlib.Path) -> list[dict[str, str]]:
    """Differences in the code of two runs, file by file, as unified diffs.

    Args:
        a: folder of a run; its code.zip may be missing.
        b: of the other one.
    """
    of_a, of_b = _files(a / CODE), _files(b / CODE)
    if isinstance(of_a, str) or isinstance(of_b, str):
        if of_a == of_b == _MISSING:
            return []
        problems = [
            f"{name}: {one}" for name, one in (("A", of_a), ("B", of_b)) if type(one) is str
        ]
        return [{"file": CODE, "status": "changed", "diff": "\n".join(problems)}]
    found = []
    left = ALL_CHARS
    for name in sorted(of_a.keys() | of_b.keys()):
        before, after = of_a.get(name), of_b.get(name)
        if before == after:
            continue
        status = "added" if before is None else "removed" if after is None else "changed"
        diff = _shortened(_lines_diff(name, before or b"", after or b""), min(DIFF_CHARS, left))
        left -= len(diff)
        found.append({"file": name, "status": status, "diff": diff})
    return found


_MISSING = "the run has no code.zip"


def _files(path: pathlib.Path) -> dict[str, bytes] | str:
    """Up to FILE_BYTES + 1 bytes of each file of an archive, or why it cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if len(names) > MOST_FILES:
                return f"code.zip has {len(names)} files: at most {MOST_FILES} are compared"
            found = {}
            for name in names:
                with archive.open(name) as file:
                    found[name] = file.read(FILE_BYTES + 1)
            return found
    except FileNotFoundError:
        return _MISSING
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError) as error:
        # RuntimeError is what zipfile raises for an encrypted file
        return f"code.zip cannot be read: {error}"


def _lines_diff(name: str, before: bytes, after: bytes) -> Iterator[str]:
    if max(len(before), len(after)) > FILE_BYTES:
        yield f"longer than {FILE_BYTES} bytes: not compared line by line"
        return
    of_a, of_b = (one.decode("utf-8", "replace").splitlines() for one in (before, after))
    yield from difflib.unified_diff(of_a, of_b, f"a/{name}", f"b/{name}", lineterm="")


def _shortened(lines: Iterator[str], most: int) -> str:
    """As many whole lines as fit, and the number of the remaining ones."""
    kept: list[str] = []
    size = more = 0
    for line in lines:
        size += len(line) + 1
        if more or size > most:
            more += 1
        else:
            kept.append(line)
    if more:
        kept.append(f"... and {more} more lines")
    return "\n".join(kept)
