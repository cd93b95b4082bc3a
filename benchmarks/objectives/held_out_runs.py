"""Whole runs of `python -m driver`, and their held-out accuracy before, between and after."""

import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[2]
ACCURACY = "eval/accuracy/strict"


class RunFailed(RuntimeError):
    """A run did not end well; the message has the last lines of its output."""


@dataclasses.dataclass(frozen=True)
class HeldOutRun:
    """A run that has finished."""

    accuracies: tuple[float, ...]
    """Of each evaluation, in order."""
    seconds: float
    """From the start of the driver to its end, that of the last resume."""


def read_run(folder: pathlib.Path) -> HeldOutRun | None:
    """The run in a folder; None where it has not finished, or was not evaluated."""
    try:
        status = json.loads((folder / "status.json").read_text())
    except FileNotFoundError:
        return None
    if status["state"] != "finished":
        return None
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    found = tuple(row[ACCURACY] for row in rows if ACCURACY in row)
    return HeldOutRun(found, status["ended"] - status["started"]) if found else None


def finish_run(
    config: str, arguments: Sequence[str], seed: int, folder: pathlib.Path
) -> HeldOutRun:
    """Runs a configuration, unless the folder has its finished run.

    Args:
        config: path of the file, from the root of the repository.
        arguments: further ones of the driver.

    Raises:
        RunFailed: if it does not finish.
    """
    if found := read_run(folder):
        return found
    settings = [f"run.seed={seed}", f"run.output_dir={folder}", "run.resume=auto"]
    settings += ["log.dashboard.enabled=false"]
    command = [sys.executable, "-m", "driver", "--config", config, *arguments]
    command += [part for one in settings for part in ("--set", one)]
    ended = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    found = read_run(folder)
    if ended.returncode or not found:
        last = "\n".join(ended.stdout.splitlines()[-12:])
        raise RunFailed(f"{folder.name}: exit code {ended.returncode}\n{last}")
    return found
