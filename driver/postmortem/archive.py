"""One archive of everything that explains how a run ended: `python -m driver.postmortem --run DIR`.

The driver writes it on an abnormal end. Where it could not, as after SIGKILL, the command makes it
from the run's folder; for a run that is still going on it shows where every process is.

Each part is collected within its time or is listed as missing, and no part can hide the error that
ended the run. No key, token or value of the environment goes in (`driver/reports/redact.py`).
"""

import argparse
import dataclasses
import io
import os
import pathlib
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from driver.errors import NoRun, RunError
from driver.postmortem.evidence import FILE_BYTES, Found, Sources, described, parts
from driver.postmortem.probable_cause import page, probable_causes
from driver.postmortem.run_facts import Facts
from driver.reports.redact import Redactor
from services.process.whole_file import whole_file

TOTAL_BYTES = 64 * 2**20
PARTS_S = 14.0
"""Bound on finding everything; writing the archive has what is left of TOTAL_S."""
TOTAL_S = 20.0
PART_S = 5.0

T = TypeVar("T")


def collect(
    run_folder: pathlib.Path,
    cause: BaseException | None,
    sources: Sources,
    say: Callable[[str], None],
) -> pathlib.Path | None:
    """Writes `<run>/postmortem-<UTC time>.tar.gz`, of at most 64 MiB unpacked, within 20 s.

    Args:
        run_folder: of the run.
        cause: the error that ended it; None takes what status.json says.
        sources: what the folder does not hold.
        say: receives one line with the probable cause and one with the path.

    Returns:
        The archive, or None where it could not be written: stderr says why.
    """
    deadline = time.monotonic() + TOTAL_S
    try:
        redactor = Redactor(os.environ)
        bundle = Bundle(run_folder, redactor)
        title = bundle.fill(parts(run_folder, redactor, cause, sources))
        say(f"probable cause: {title}")
        left_s = max(1.0, deadline - time.monotonic())
        path = in_time(bundle.write, left_s, "writing it")
    # Whatever fails in here, the error that ended the run is the one that must travel on.
    except Exception as error:
        print(f"no post-mortem in {run_folder}: {described(error)}", file=sys.stderr, flush=True)
        return None
    say(f"post-mortem: {path}")
    return path


def in_time(function: Callable[[], T], timeout_s: float, what: str) -> T:
    """The result of a function that may hang, as on a disk that is gone.

    Raises:
        TimeoutError: naming `what`; the thread is left behind.
    """
    ended: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            ended.append((function(), None))
        except BaseException as error:
            ended.append((None, error))

    thread = threading.Thread(target=run, name=f"postmortem {what}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not ended:
        raise TimeoutError(f"{what} was not done within {timeout_s:.1f} s")
    result, error = ended[0]
    if error is not None:
        raise error
    return result  # pyright: ignore[reportReturnType]


class Bundle:
    """The archive while it is filled."""

    def __init__(self, run_folder: pathlib.Path, redactor: Redactor):
        self._folder = run_folder
        self._redactor = redactor
        self._files: dict[str, bytes] = {}
        self._contents: list[str] = []
        self._facts = Facts()

    def fill(
        self,
        parts: Sequence[tuple[str, Callable[[], Found]]],
        part_s: float = PART_S,
        all_s: float = PARTS_S,
    ) -> str:
        """Adds each part that is collected in time; returns the title of the likeliest cause."""
        deadline = time.monotonic() + all_s
        for name, find in parts:
            left_s = deadline - time.monotonic()
            try:
                if left_s <= 0:
                    raise TimeoutError(f"no time was left of {all_s:g} s")
                found = in_time(find, min(part_s, left_s), name)
                self._facts = dataclasses.replace(self._facts, **found.facts)
                self._contents.append(f"{name}: {self._add_files(found.files)}")
            # A part that fails becomes one line of the archive; the others are still collected.
            except Exception as error:
                self._contents.append(f"{name}: missing, {self.clean(described(error))}")
        causes = probable_causes(self._facts)
        shown = page(self._facts, causes, self._contents)
        self._files = {"PROBABLE_CAUSE.md": self.clean(shown).encode()} | self._files
        return self.clean(causes[0].title)

    def clean(self, text: str) -> str:
        """The text without secrets."""
        return self._redactor.clean(text)

    def write(self) -> pathlib.Path:
        """Writes the archive; returns its path."""
        name = f"postmortem-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
        path = self._folder / f"{name}.tar.gz"
        if path.exists():
            name += f"-{os.getpid()}"
            path = self._folder / f"{name}.tar.gz"
        with (
            whole_file(path) as raw,
            tarfile.open(fileobj=raw, mode="w:gz", compresslevel=3) as archive,
        ):
            for file, data in self._files.items():
                entry = tarfile.TarInfo(f"{name}/{file}")
                entry.size, entry.mtime = len(data), int(time.time())
                archive.addfile(entry, io.BytesIO(data))
        return path

    def _add_files(self, files: Mapping[str, bytes | str]) -> str:
        """Adds files while there is room; returns their names, or what was left out."""
        named = []
        for name, data in files.items():
            raw = data if isinstance(data, bytes) else self.clean(data).encode(errors="replace")
            room = TOTAL_BYTES - FILE_BYTES - sum(map(len, self._files.values()))
            if len(raw) > room:
                named.append(f"{name} left out for its size")
                continue
            self._files[name] = raw[:FILE_BYTES]
            named.append(name)
        return ", ".join(named) or "nothing there"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 written, 1 not written, 2 no run there."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m driver.postmortem",
        description="Makes a post-mortem archive from the folder of a run, whether it has ended or "
        "not; running processes are asked for their stacks.",
    )
    parser.add_argument("--run", required=True, metavar="DIR", help="the run's output folder")
    folder = pathlib.Path(parser.parse_args(arguments).run).resolve()
    try:
        if not (folder / "status.json").is_file():
            raise NoRun(f"--run {folder}: no status.json there: give the run's output folder")
    except RunError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 1 if collect(folder, None, Sources(), print) is None else 0


if __name__ == "__main__":
    sys.exit(main())
