"""Folders with keys and tokens of a run, which only their owner may read."""

import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping


def replace_private(folder: pathlib.Path, contents: Mapping[str, bytes]) -> None:
    """Puts a folder of mode 0700 with files of mode 0600 in place at once.

    Args:
        folder: is replaced, with what drivers that were killed meanwhile left beside it.
        contents: of each file by its name.
    """
    parent, name = folder.parent, folder.name
    made = pathlib.Path(tempfile.mkdtemp(prefix=f".{name}-", dir=parent))  # with mode 0700
    for file_name, content in contents.items():
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(made / file_name, flags, 0o600), "wb") as file:
            file.write(content)
    for left in parent.glob(f".{name}-*"):
        if left != made:
            shutil.rmtree(left, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    made.rename(folder)
