"""The parts of a post-mortem: what is read, where from, and which facts about the end it gives.

The parts are independent: one may fail or take too long without harm to the others.
"""

import dataclasses
import json
import os
import pathlib
import re
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from driver.errors import RunError
from driver.postmortem import host_state
from driver.reports.redact import NotPlain, Redactor, is_secret, open_plain
from driver.reports.status import ExitCode, exit_code_of
from services.process.run_processes import FOLDER as STACKS
from services.process.run_processes import RunProcess, read_processes, state_of_run
from services.process.stacks import request_stacks

FILE_BYTES = 2**20
"""Most that is taken of one file."""
LAST_LINES = 200
STACKS_S = 4.0
PROCESSES = 48
"""Most processes whose stacks and logs are taken, the newest first."""
LISTED_FILES = 5000

WHOLE = ("status.json", "config.yaml", "identity.json", "run_id", "error.txt")
LOGS = (
    *("metrics.jsonl", "ledger.jsonl", "timeline.jsonl", "samples.jsonl", "eval.jsonl"),
    "dropped.jsonl",
)
RAY_LOGS = ("raylet.out", "raylet.err", "gcs_server.out", "gcs_server.err")
RAY_LOG_BYTES = 2**18
REFUSED = -1
LOGS_S = 4.0
"""What is found by then is kept."""
NOTABLE = re.compile(r"error|exception|fatal|killed|no space left|low on memory", re.I)
NOTABLE_LINES = 40
_WORDS = re.compile(r"[^\w.-]+")
"""What a name in the archive does not hold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sources:
    """What only the driver of the run knows."""

    config: str = ""
    """The configuration as run, YAML."""
    tables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Plain values by name, each a file of its own: `buffer`, `leases`, `fleet`,
    `device_memory`."""
    hosts: Callable[[], Sequence[Mapping[str, Any]]] = tuple
    """The hosts that have been in the cluster, as `cluster_hosts` gives them."""
    worker_errors: Sequence[str] = ()
    """Why workers were replaced since a step was last closed, the newest last, such as `rollout-0:
    its process ended`."""
    overcome_errors: Sequence[str] = ()
    """The same of the steps before, after which the run has gone on."""
    log_folders: Sequence[pathlib.Path] = ()
    """Of the run's Ray session on this host; those of actors that have registered are found by
    themselves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What one part found."""

    files: Mapping[str, bytes | str] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of Facts."""


def parts(
    folder: pathlib.Path, redactor: Redactor, cause: BaseException | None, sources: Sources
) -> list[tuple[str, Callable[[], Found]]]:
    """Name and function of each part, the important ones first: later ones may be left out."""
    return [
        ("how it ended", lambda: _ended(folder, cause)),
        ("records", lambda: _records_of_run(folder, redactor, sources)),
        ("state of the processes", lambda: _tables(folder, sources)),
        ("hosts of the cluster", lambda: _hosts(sources)),
        ("stacks", lambda: _stacks(folder, redactor)),
        ("machine", lambda: _machine(folder, redactor)),
        ("kernel log", lambda: _kernel(folder)),
        ("process logs", lambda: _process_logs(folder, redactor, sources.log_folders)),
        ("offending groups", lambda: _rejected(folder, redactor)),
        ("versions", lambda: Found(files={"versions.json": _json(host_state.versions())})),
        ("files of the run", lambda: _listing(folder)),
    ]


def _ended(folder: pathlib.Path, cause: BaseException | None) -> Found:
    """The error with its tracebacks; from what the run wrote, without one."""
    status = _status(folder)
    if cause is None:
        path = folder / "error.txt"
        facts = {
            "error": str(status.get("reason", "")),
            "details": _text(path, FILE_BYTES) if path.exists() else "",
            "exit_code": status.get("exit_code"),
            "driver_gone": state_of_run(folder, status) == "lost"
            or status.get("exit_code") == ExitCode.KILLED,
        }
        return Found(facts=facts | {"status": status})
    chain = _chain(cause)
    details = "".join(traceback.format_exception(cause))
    details += "".join(
        f"\ndetails of {type(error).__name__}:\n{error.details}\n"
        for error in chain
        if isinstance(error, RunError) and error.details
    )
    names = [kind.__name__ for error in chain for kind in type(error).__mro__[:-1]]
    facts = {
        "error": str(cause) if isinstance(cause, RunError) else described(cause),
        "error_types": tuple(dict.fromkeys(names)),
        "details": details,
        "exit_code": int(exit_code_of(cause)),
        "status": status,
    }
    return Found(files={"error.txt": details[-FILE_BYTES:]}, facts=facts)


def _records_of_run(folder: pathlib.Path, redactor: Redactor, sources: Sources) -> Found:
    """Status, configuration, and the last lines of the logs."""
    files: dict[str, bytes | str] = {
        f"run/{name}": _part(redactor.tail, folder / name, FILE_BYTES)
        for name in WHOLE
        if (folder / name).is_file()
    }
    if sources.config:
        files["run/config.yaml"] = sources.config
    for name in LOGS:
        if (folder / name).is_file():
            lines = _part(redactor.tail, folder / name, FILE_BYTES).splitlines(keepends=True)
            files[f"run/{name}"] = b"".join(lines[-LAST_LINES:])
    facts = {
        "metrics": _records(files.get("run/metrics.jsonl")),
        "samples": _records(files.get("run/samples.jsonl")),
        "worker_errors": tuple(sources.worker_errors),
        "overcome_errors": tuple(sources.overcome_errors),
    }
    return Found(files=files, facts=facts)


def _tables(folder: pathlib.Path, sources: Sources) -> Found:
    """What the driver knows of the processes, and what those on other hosts have sent."""
    tables = dict(sources.tables)
    elsewhere: Mapping[str, Mapping[str, str]] = tables.pop("elsewhere", {})
    files: dict[str, bytes | str] = {
        f"state/{name}.json": _json(table) for name, table in tables.items()
    }
    errors = [*sources.overcome_errors, *sources.worker_errors]
    files |= {"state/worker_errors.txt": "\n".join(errors)}
    for who, sent in elsewhere.items():
        files |= {
            f"elsewhere/{_WORDS.sub('-', who)}/{_WORDS.sub('-', name)}": text
            for name, text in sent.items()
        }
    sent_by = {who for who, sent in elsewhere.items() if sent}
    here = socket.gethostname()
    others = {
        f"{process.name} on {process.host}"
        for process in read_processes(folder)[:PROCESSES]
        if process.host != here
    }
    missing = sorted((others | set(elsewhere)) - sent_by)
    return Found(files=files, facts={"missing": tuple(missing)})


def _hosts(sources: Sources) -> Found:
    """The hosts of the cluster, and which of them are lost."""
    hosts = list(sources.hosts())
    lost = tuple(
        f"{one['host']} ({one['address']}): {one['end'] or 'Ray gives no reason'}"
        for one in hosts
        if not one["alive"]
    )
    return Found(files={"state/hosts.json": _json(hosts)}, facts={"lost_hosts": lost})


def _stacks(folder: pathlib.Path, redactor: Redactor) -> Found:
    """Asks running processes for their stacks, and reads those of crashed ones."""
    answers = request_stacks(folder, STACKS_S)
    processes = [answer.process for answer in answers]
    answered = [f"{a.process.name}-{a.process.pid}: {a.problem or 'answered'}" for a in answers]
    newest = read_processes(folder)[:PROCESSES]
    started = float(_status(folder).get("started", 0))
    files: dict[str, bytes | str] = {"stacks/answers.txt": "\n".join(answered)}
    dumps = {}
    for process in newest:
        files[f"{STACKS}/{process.path.name}"] = _part(redactor.tail, process.path, RAY_LOG_BYTES)
        if process.path.stat().st_mtime < started:
            continue  # a process of an earlier start, which a resume has nothing to do with
        text = _text(process.path, RAY_LOG_BYTES)
        dumps[process.path.stem] = text.rpartition("=== asked at")[2]
    for link in (path for path in (folder / STACKS).glob("*.txt") if path.is_symlink()):
        files[f"{STACKS}/{link.name}"] = f"refused: {link} is a link: it is not read\n"
    states = [host_state.read_process(process) for process in processes]
    files["processes.json"] = _json([dataclasses.asdict(state) for state in states])
    return Found(files=files, facts={"processes": tuple(states), "stacks": dumps})


def _machine(folder: pathlib.Path, redactor: Redactor) -> Found:
    """Memory, disks and the few variables that may be shown."""
    seen = host_state.read_machine([folder, pathlib.Path("/tmp"), pathlib.Path("/dev/shm")])
    files = {
        "machine.json": _json(dataclasses.asdict(seen)),
        "environment.json": _json(redactor.environment()),
    }
    return Found(files=files, facts={"machine": seen})


def _kernel(folder: pathlib.Path) -> Found:
    since = float(_status(folder).get("started", 0))
    lines = host_state.kernel_log_lines(since, host_state.read_machine([]).boot_time)
    return Found(files={"kernel.txt": "\n".join(lines)}, facts={"kernel": tuple(lines)})


def _process_logs(
    folder: pathlib.Path, redactor: Redactor, log_folders: Sequence[pathlib.Path]
) -> Found:
    """The last lines of the logs of the run's processes and of Ray."""
    processes = read_processes(folder)[:PROCESSES]
    files: dict[str, bytes | str] = {}
    notable, deadline = [], time.monotonic() + LOGS_S
    for name, path, limit in _log_paths(processes, log_folders):
        if name in files or is_secret(path):
            continue
        if limit == REFUSED:
            files[name] = f"refused: {path} is no log of Ray or of this process: it is not read\n"
            continue
        if time.monotonic() > deadline:
            files["logs/LEFT_OUT.txt"] = f"no time was left of {LOGS_S:g} s for the other logs"
            break
        files[name] = data = _part(redactor.tail, path, limit)
        lines = data.decode(errors="replace").splitlines()
        notable += [f"{name}: {x}" for x in lines if NOTABLE.search(x)][-NOTABLE_LINES:]
    return Found(files=files, facts={"logs": tuple(notable)})


def _log_paths(
    processes: Sequence[RunProcess], log_folders: Sequence[pathlib.Path]
) -> list[tuple[str, pathlib.Path, int]]:
    """Name in the archive, path and most bytes of each log; REFUSED for a path that only a file of
    the run names, and that is no log: it could be any file.
    """
    found, folders = [], set(log_folders)
    here = [process for process in processes if process.host == socket.gethostname()]
    for process in here:
        for log in map(pathlib.Path, process.logs):
            if log.is_file():
                end = log.suffix if log.suffix in (".out", ".err") else f"-{log.name}"
                known = log.parent in folders or _is_log_folder(log.parent)
                limit = FILE_BYTES if known or process.pid == os.getpid() else REFUSED
                found.append((f"logs/{process.name}-{process.pid}{end}", log, limit))
            if _is_log_folder(log.parent):
                folders.add(log.parent)
    for folder in sorted(folders):
        found += [(f"logs/ray/{x}", folder / x, RAY_LOG_BYTES) for x in RAY_LOGS]
        for process in here:
            found += [
                (f"logs/ray/{process.name}-{log.name}", log, RAY_LOG_BYTES)
                for log in folder.glob(f"*[_-]{process.pid}.*")
                if str(log) not in process.logs
            ]
    return [one for one in found if one[1].is_file()]


def _is_log_folder(folder: pathlib.Path) -> bool:
    """Whether a folder is that of the logs of a Ray session, by its names and content."""
    return (
        folder.name == "logs"
        and folder.parent.name.startswith("session_")
        and folder.resolve() == folder
        and (folder / "raylet.out").is_file()
    )


def _rejected(folder: pathlib.Path, redactor: Redactor) -> Found:
    """Groups that did not train: of updates that were not finite, the newest files first."""
    paths = sorted((folder / "rejected").glob("*.jsonl"), reverse=True)[:8]
    files = {f"rejected/{path.name}": _part(redactor.head, path, FILE_BYTES) for path in paths}
    not_finite = tuple(path.name for path in paths if path.name.startswith("version-"))
    return Found(files=files, facts={"rejected": not_finite})


def _listing(folder: pathlib.Path) -> Found:
    """Size, time and name of every file of the run, spool and checkpoints included."""
    lines = []
    for inner, _, names in os.walk(folder):
        for path in (pathlib.Path(inner, name) for name in sorted(names)):
            stat = path.lstat()
            moment = host_state.utc(stat.st_mtime)
            lines.append(f"{stat.st_size:>14,} {moment} {path.relative_to(folder)}")
        if len(lines) > LISTED_FILES:
            lines[LISTED_FILES:] = [f"and more: only the first {LISTED_FILES} are listed"]
            break
    return Found(files={"files.txt": "\n".join(lines)})


def described(error: BaseException) -> str:
    """A RunError as it is shown; any other with its type."""
    if isinstance(error, RunError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _chain(error: BaseException) -> list[BaseException]:
    """An error and those that it came from, as its traceback shows them."""
    found: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in found:
        found.append(following)
        context = None if following.__suppress_context__ else following.__context__
        following = following.__cause__ or context
    return found


def _status(folder: pathlib.Path) -> dict[str, Any]:
    path = folder / "status.json"
    return json.loads(_text(path, FILE_BYTES)) if path.is_file() and not path.is_symlink() else {}


def _part(read: Callable[[pathlib.Path, int], bytes], path: pathlib.Path, limit: int) -> bytes:
    """What a redactor reads of a file of the run, or why it does not."""
    try:
        return read(path, limit)
    except NotPlain as error:
        return f"refused: {error}\n".encode()


def _text(path: pathlib.Path, limit: int) -> str:
    """The last bytes of a file as they are, for what is only looked at here; '' of a link."""
    try:
        with open_plain(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
            return file.read(limit).decode("utf-8", "replace")
    except NotPlain:
        return ""


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, default=str)


def _records(raw: bytes | str | None) -> tuple[dict[str, Any], ...]:
    """The records of a log's last lines; one that a crash cut short is left out."""
    found = []
    for line in (raw or b"").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.append(record)
    return tuple(found)
