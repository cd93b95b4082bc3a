"""Folders and paths of a run, independent of where its driver was started.

`ray job submit --working-dir .` runs the driver in an unpacked copy of the working directory, which
lacks what git ignores and disappears with the cluster. TANDEM_HOME names the folder that relative
paths mean there; deploy/run_local.py sets it.
"""

import contextlib
import os
import pathlib
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol, Self, TextIO, TypeVar

from driver.config.run_config import RunConfig
from driver.config.sections.model import ModelSection
from driver.config.sections.run import NamedRun
from driver.errors import RunError
from rollout_worker.config.data_config import DataConfig, SourceConfig
from services.process.file_lock import lock_file

HOME_VARIABLE = "TANDEM_HOME"
RAY_PACKAGE = "_ray_pkg_"
"""Part of every folder that Ray unpacks a working directory into."""


def home(environ: Mapping[str, str], cwd: pathlib.Path) -> pathlib.Path:
    """The folder that relative outputs go to."""
    if environ.get(HOME_VARIABLE):
        return pathlib.Path(environ[HOME_VARIABLE])
    if RAY_PACKAGE in str(cwd):
        return pathlib.Path.home() / "tandem"
    return cwd


def output_folder(run: NamedRun) -> pathlib.Path:
    """The absolute folder of this run, with `{name}` and `{time}` filled in."""
    if run.resume and "{time}" in run.output_dir:
        raise FolderTaken(
            f"run.output_dir={run.output_dir} is another folder at every start: name the "
            "one to resume with --set run.output_dir=FOLDER"
        )
    filled = run.output_dir.replace("{name}", run.name)
    filled = filled.replace("{time}", time.strftime("%Y%m%d-%H%M%S"))
    return home(os.environ, pathlib.Path.cwd()) / pathlib.Path(filled).expanduser()


class ReadsInputs(Protocol):
    """A configuration with the sections that name what a run reads."""

    @property
    def model(self) -> ModelSection:
        """The model that it starts from."""
        ...

    @property
    def data(self) -> DataConfig:
        """The data that it trains on."""
        ...

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """The same with other sections."""
        ...


C = TypeVar("C", bound=ReadsInputs)


def locate(config: RunConfig) -> RunConfig:
    """The same run with input paths that every process of it understands; see `locate_inputs`."""
    algorithm, distillation = config.algorithm, config.algorithm.distillation
    if distillation is not None:
        teacher = _located(distillation.teacher)
        distillation = distillation.model_copy(update={"teacher": teacher})
        algorithm = algorithm.model_copy(update={"distillation": distillation})
    environment = config.environment
    if environment is not None:
        place, colon, attribute = environment.name.rpartition(":")
        name = f"{_located(place) or ''}{colon}{attribute}" if place.endswith(".py") else ""
        environment = environment.model_copy(update={"name": name or environment.name})
    learner, lora = config.learner, config.learner.lora
    if lora is not None and lora.init_from is not None:
        lora = lora.model_copy(update={"init_from": _located(lora.init_from)})
        learner = learner.model_copy(update={"lora": lora})
    return locate_inputs(config).model_copy(
        update={"algorithm": algorithm, "environment": environment, "learner": learner}
    )


def locate_inputs(config: C) -> C:
    """The same configuration with other paths of its model and data.

    A path that exists here or under the home folder becomes absolute, but for one in the working
    directory of a submitted job, which every actor unpacks for itself. Anything else is a hub id,
    or an error of the process that reads it.
    """

    def source(given: SourceConfig | tuple[SourceConfig, ...] | None) -> Any:
        if given is None or isinstance(given, tuple):
            return given and tuple(map(source, given))
        return given.model_copy(update={"source": _located(given.source)})

    return config.model_copy(
        update={
            "model": config.model.model_copy(
                update={
                    "path": _located(config.model.path),
                    "tokenizer": _located(config.model.tokenizer),
                }
            ),
            "data": config.data.model_copy(
                update={"train": source(config.data.train), "eval": source(config.data.eval)}
            ),
        }
    )


def _located(path: str | None) -> str | None:
    if not path:  # an empty one is no path, and not the working directory
        return path
    cwd = pathlib.Path.cwd()
    base = home(os.environ, cwd)
    if pathlib.Path(path).exists():
        return path if RAY_PACKAGE in str(cwd) else str(cwd / path)
    return str(base / path) if (base / path).exists() else path


LOCK = "driver.lock"
OF_A_START = (
    *("status.json", "run_id", "identity.json", "error.txt", "config.yaml"),
    *("stacks", "control", "spool", "spool.lock", "quarantine.json", "spending.json", LOCK),
    *("curriculum.jsonl", "dropped.jsonl"),
    *("dashboard", "dashboard.log", "environment.json", "code.zip", "tensorboard", "wandb"),
    "tpu_logs",
)
"""What a run leaves before its first step."""


class FolderTaken(RunError):
    """The output folder cannot be used for this run."""

    exit_code = 2


def check_folder(folder: pathlib.Path, *, resume: bool) -> None:
    """Checks that a run may write there, without changing anything.

    Files of a run that never closed a step do not prevent the next try.

    Raises:
        FolderTaken: naming the folder and what to do.
    """
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise FolderTaken(
            f"run.output_dir={folder}: {existing} is not a folder that can be written to; choose "
            "another run.output_dir"
        )
    if resume or existing != folder:
        return
    kept = [path.name for path in folder.iterdir() if not _left_by_a_start(path)]
    if kept:
        raise FolderTaken(
            f"run.output_dir={folder} is not empty (it contains {kept[0]}): continue that run with "
            "--resume, or choose another run.name or run.output_dir"
        )


def _left_by_a_start(path: pathlib.Path) -> bool:
    empty_log = path.suffix == ".jsonl" and path.stat().st_size == 0
    archive = path.name.startswith(("postmortem-", ".control-", ".dashboard-"))
    return path.name in OF_A_START or empty_log or archive or _is_half_written(path)


def _is_half_written(path: pathlib.Path) -> bool:
    """Whether a process was killed while it wrote this file under its temporary name."""
    return path.name.startswith(".") and path.suffix in (".part", ".tmp")


def lock_folder(folder: pathlib.Path) -> TextIO:
    """Makes the folder, and locks it against other drivers while the file is open.

    Raises:
        FolderTaken: if another driver is at work there, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise FolderTaken(
            f"run.output_dir={folder} cannot be made ({error.strerror}): choose another"
        ) from error
    try:
        if not lock_file(file.fileno()):
            print(
                f"note: the file system of {folder} has no locks: start no other driver of this "
                "run before this one has ended",
                file=sys.stderr,
                flush=True,
            )
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise FolderTaken(
            f"run.output_dir={folder} is in use by another driver ({holder}): wait for its end, or "
            "choose another run.output_dir"
        ) from None
    except OSError as error:
        file.close()
        raise FolderTaken(
            f"run.output_dir={folder} cannot be locked ({error.strerror}): mend its file system, "
            "or choose another run.output_dir"
        ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def clear_folder(folder: pathlib.Path, *, resume: bool) -> None:
    """Removes what earlier tries left half written, and what a new run must not find of them.

    Args:
        folder: locked.
        resume: whether its groups and suspects are gone on with.

    Raises:
        FolderTaken: if those of an earlier try cannot be removed.
    """
    for path in filter(_is_half_written, list(folder.iterdir())):
        with contextlib.suppress(OSError):
            path.unlink()
    if resume:
        return
    spool = folder / "spool"
    try:
        for name in ("quarantine.json", "curriculum.jsonl", "dropped.jsonl", "spending.json"):
            (folder / name).unlink(missing_ok=True)
        if spool.is_symlink():
            spool.unlink()
        elif spool.is_dir():
            shutil.rmtree(spool)
    except OSError as error:
        raise FolderTaken(
            f"run.output_dir={folder}: {error.filename or spool} of an earlier try cannot be "
            f"removed ({error.strerror}): remove it, or choose another run.output_dir"
        ) from error
