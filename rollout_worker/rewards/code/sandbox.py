"""Processes for hostile code: with limits, and cut off from the rest of the host.

A completion is written by a model that is paid for what its code seems to do, so its code is taken
for hostile. Each process is new, has an environment and a folder of its own, and limits of memory,
processor time, processes, open files and output. Where the kernel lets it, it is confined as well:
another user, no other process, no network, no file of the host but the read-only ones of the system
and of Python (`confinement.py`). Without that, code of a completion can reach whatever the user of
the run can: the environment, files and processes of the run, and so its own verdict.
"""

import dataclasses
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any

from rollout_worker.rewards.processes.process_tree import end_descendants

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_START = "from rollout_worker.rewards.code.confinement import main; main()"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_MARK = "TANDEM_SCORERS"
"""Variable by which `reward_process.py` knows what scorers have started."""
_DISK_MB = 64
_PROBE_S = 30.0
_REAP_S = 1.0
"""For the guardian, to collect what has ended below it."""
_MOST_READ = 1 << 16


class SandboxFailed(RuntimeError):
    """A process could not be confined: a fault of the host, and of no completion."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What one process may take; more is an error in it, or ends it."""

    memory_mb: int
    seconds: int
    """Of the processor."""
    processes: int = 64
    """And threads, its own included."""
    files: int = 64
    """Open at once."""
    output_mb: int = 16
    """Of any file that it writes, its output included."""

    def by_resource(self) -> dict[str, int]:
        """By the name of the kernel's resource."""
        return {
            "AS": self.memory_mb * 2**20,
            "CPU": self.seconds,
            "NPROC": self.processes,
            "NOFILE": self.files,
            "FSIZE": self.output_mb * 2**20,
            "CORE": 0,
        }


class SandboxProcess:
    """One process with its folder; `end` leaves nothing of them."""

    def __init__(
        self,
        job: dict[str, Any],
        *,
        limits: Limits,
        confined: bool,
        stdin: IO[bytes] | None = None,
        stdout: IO[bytes] | None = None,
        keep: Sequence[int] = (),
    ):
        """Args:
        job: `role`, and what it needs, as `confinement.py` reads it.
        confined: whether it is to be cut off from the host, or an error.
        stdin: None is empty.
        stdout: None is dropped.
        keep: descriptors that it inherits.
        """
        self._folder = tempfile.mkdtemp(prefix="tandem-code-")
        self._status = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        job = {
            **job,
            "confined": confined,
            "root": self._folder,
            "readable": _readable(),
            "disk_mb": _DISK_MB,
            "limits": limits.by_resource(),
            "status": self._status.fileno(),
            "package": str(_ROOT),
            "site": sysconfig.get_path("purelib"),
        }
        home = "/tmp" if confined else self._folder
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(job).encode())
            file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-B", "-c", _START, str(file.fileno())],
                stdin=stdin or subprocess.DEVNULL,
                stdout=stdout or subprocess.DEVNULL,
                stderr=self._errors,
                cwd=self._folder,
                env=_environment(home),
                pass_fds=[file.fileno(), self._status.fileno(), *keep],
                start_new_session=True,
            )

    def wait(self, deadline_s: float) -> int | None:
        """Its exit code, 128 + n after signal n; None where it has not ended by a moment of the
        monotonic clock.
        """
        try:
            return self._process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def check_confined(self) -> bool:
        """Whether it came as far as to run foreign code; False where it is still at its start.

        Raises:
            SandboxFailed: if it never will.
        """
        ended = self._process.poll() is not None
        said = _read(self._status)
        if said != "ready" and (said or ended):
            raise SandboxFailed(said or f"it did not start: {self.errors.strip()[-300:]}")
        return said == "ready"

    @property
    def errors(self) -> str:
        """What it has written to stderr."""
        return _read(self._errors)

    def end(self) -> None:
        """Kills it with all that it has started, and removes its folder."""
        if self._process.poll() is None:
            end_descendants(self._process.pid)
            if self.wait(time.monotonic() + _REAP_S) is None:
                self._process.kill()
                self._process.wait()
        self._status.close()
        self._errors.close()
        for folder, names, _ in os.walk(self._folder):
            for name in names:
                path = os.path.join(folder, name)
                if not os.path.islink(path):
                    os.chmod(path, 0o700)
        shutil.rmtree(self._folder, ignore_errors=True)


@functools.cache
def confinement_problem() -> str:
    """Why processes cannot be confined on this host; empty where they can."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no namespaces"
    limits = Limits(memory_mb=1024, seconds=10)
    process = SandboxProcess({"role": "script", "code": ""}, limits=limits, confined=True)
    try:
        if process.wait(time.monotonic() + _PROBE_S) is None:
            return f"it took over {_PROBE_S:g} s"
        process.check_confined()
    except SandboxFailed as error:
        return str(error)
    finally:
        process.end()
    return ""


def describe_protections(confined: bool) -> str:
    """One line on what protects this host from the code of completions."""
    limits = "limits of memory, time, processes, files and output"
    if confined:
        return (
            "another user without rights, no network, no other process, none of the host's files "
            f"but Python's and the system's, read-only; {limits}"
        )
    return (
        f"{limits}, and nothing else ({confinement_problem() or 'confinement is off'}): code of "
        "completions can reach the network and all that the user of this run can, and forge rewards"
    )


def _read(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), _MOST_READ, 0).decode("utf-8", "replace")


def _environment(home: str) -> dict[str, str]:
    kept = {_MARK: os.environ[_MARK]} if _MARK in os.environ else {}
    return kept | {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(_ROOT),
        "PYTHONUTF8": "1",
        "PYTHONHASHSEED": "0",  # the same completion, the same order of a set, the same reward
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


@functools.cache
def _readable() -> list[str]:
    """Folders that Python needs, none within another."""
    paths = sysconfig.get_paths()
    wanted = [*_SYSTEM, sys.base_prefix, paths["purelib"], paths["platlib"], paths["stdlib"]]
    found: list[str] = []
    for path in sorted({os.path.abspath(path) for path in wanted}, key=len):
        if os.path.isdir(path) and not any(path.startswith(f"{one}/") for one in found):
            found.append(path)
    return found
