"""Functions that users name by an import path, `package.module:function`, or by a file.

A process that loads one runs foreign code: it may raise, print, or never return.
"""

import difflib
import importlib
import os
import pathlib
import sys
import traceback
from typing import Any


class BadImportPath(ValueError):
    """Nothing can be loaded under a name; the message says why, where, and what to do."""


class NoSuchModule(BadImportPath):
    """There is no module of this name; the name may be meant for something built in."""


def nearest_hint(name: str, known: list[str]) -> str:
    """Returns ` (nearest: 'x')`, or an empty text if no known name is similar."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" (nearest: {close[0]!r})" if close else ""


def load_attribute(path: str) -> Any:
    """Imports a module and returns what is named in it.

    Args:
        path: `package.module:attribute`.

    Raises:
        NoSuchModule: if there is none.
        BadImportPath: if it has no such attribute, or importing it fails.
    """
    module_name, _, attribute = path.partition(":")
    module = _import(module_name)
    found = getattr(module, attribute, None)
    if found is None:
        public = [each for each in vars(module) if not each.startswith("_")]
        raise BadImportPath(
            f"module {module_name!r} ({getattr(module, '__file__', '')}) has no {attribute!r}"
            f"{nearest_hint(attribute, public)}"
        )
    return found


def load_named(name: str) -> Any:
    """The same as `load_attribute`, but the module may be a file, `my_pkg/retry.py:attribute`.

    The folder of the file is on the import path from then on, as that of a script is.

    Raises:
        BadImportPath: also if there is no such file, or another module has its name.
    """
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        return load_attribute(name)
    path = pathlib.Path(place)
    if not path.is_file():
        there = [str(one) for one in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise BadImportPath(
            f"file {place!r} does not exist (looked in {path.absolute().parent})"
            f"{nearest_hint(place, there)}"
        )
    folder = str(path.absolute().parent)
    if folder not in sys.path[:1]:
        sys.path.insert(0, folder)
    found = getattr(_import(path.stem), "__file__", None) or "built in"
    if not os.path.exists(found) or not path.samefile(found):
        raise BadImportPath(
            f"file {place!r} is imported as {path.stem!r}, but that is another module here "
            f"({found}): give the file another name"
        )
    return load_attribute(f"{path.stem}:{attribute}")


def _import(module_name: str):
    """Imports a user's module; what it raises becomes one line that names the place."""
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise BadImportPath(
                f"importing {module_name!r} fails: {error}{_place(error)}; install it beside this "
                "package"
            ) from error
        raise NoSuchModule(
            f"cannot import {module_name!r} ({error}); it must be importable from {os.getcwd()} or "
            "installed"
        ) from error
    # The module is foreign code: it may raise anything, SystemExit too, and that is the answer.
    except BaseException as error:
        text = traceback.format_exception_only(error)[-1].strip()
        if isinstance(error, SyntaxError):
            text = f"{type(error).__name__}: {error.msg}"
        if isinstance(error, SystemExit):
            text = f"it calls sys.exit({error.code!r})"
        if isinstance(error, EOFError):
            text += " (it has no standard input)"
        text = " ".join(text.split())
        raise BadImportPath(
            f"importing {module_name!r} fails: {text[:300]}{_place(error)}; correct the module"
        ) from error


def _place(error: BaseException) -> str:
    """` (file:line)` of the error that a module raised during import; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    own = ("<frozen ", importlib.__file__, __file__)
    frames = traceback.extract_tb(error.__traceback__)
    places = [
        f"{frame.filename}:{frame.lineno}" for frame in frames if not frame.filename.startswith(own)
    ]
    if not places:
        return ""
    reached = f", reached from {places[0]}" if len(places) > 1 else ""
    return f" ({places[-1]}{reached})"
