"""Where an instrument writes its report, looked at before the work and not after it."""

import os
import pathlib

STDOUT = "-"


def check_report_file(file: str | None) -> None:
    """Refuses what `--json` could not write.

    Args:
        file: None where nothing is written; STDOUT is no file.

    Raises:
        ValueError: naming the value, the rule and the fix.
    """
    if file is None or file == STDOUT:
        return
    path = pathlib.Path(file)
    if path.is_dir():
        raise ValueError(f"--json {file!r} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"--json {file}: its folder does not exist: make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--json {file} may not be written: name another file")
