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
    """Of each evaluation, in order; the first is that before the first step."""
    seconds: float
    """From the start of the driver to its end, that of the last resume."""


def read_run(folder: pathlib.Path) -> HeldOutRun | None:
    """The run in a folder; None where it has not finished, or was not evaluated before its
    first step and later.
    """
    try:
        status = json.loads((folder / "status.json").read_text())
    except FileNotFoundError:
        return None
    if status["state"] != "finished":
        return None
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    found = [row for row in rows if ACCURACY in row]
    if len(found) < 2 or found[0]["eval/step"] != 0:
        return None
    accuracies = tuple(row[ACCURACY] for row in found)
    return HeldOutRun(accuracies, status["ended"] - status["started"])


def finish_run(
    config: str, arguments: Sequence[str], seed: int, folder: pathlib.Path
) -> HeldOutRun:
    """Runs a configuration, unless the folder has its finished run.

    Args:
        config: path of the file, from the root of the repository.
        arguments: further ones of the driver.

    Raises:
        RunFailed: if it does not finish, is not evaluated before and after, or if the folder has a
            run of another configuration.
    """
    given = json.dumps([*arguments, (ROOT / config).read_text(encoding="utf-8")])
    note = folder.with_name(f"{folder.name}.given.json")
    if folder.exists() and (not note.is_file() or note.read_text(encoding="utf-8") != given):
        raise RunFailed(f"{folder} has a run of another configuration: name another folder")
    if found := read_run(folder):
        return found
    folder.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(given, encoding="utf-8")
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
        raise RunFailed(
            f"{folder.name}: exit code {ended.returncode}, or no evaluation before the first step "
            f"and after the last\n{last}"
        )
    return found
