"""A Ray cluster that outlives the drivers that join it, with a token of its own.

All of its hosts are on this machine: each has a raylet and an address of loopback of its own. One
that is lost ends with all that runs there, at one moment; its address then refuses connections,
where that of a real one would be silent (tests/cluster/).
"""

import contextlib
import itertools
import pathlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import psutil

from deploy.run_local import (
    end_group,
    free_ports,
    head_environment,
    head_folder,
    start_head,
    wait_for_head,
)

CPUS = 8
"""CPUs that a head alone reports: enough for an old learner beside the one that replaces it."""
LEARNER_CPUS, WORKER_CPUS = 5, 2
"""Of a run over several hosts: what its processes ask for."""
HOSTS = (LEARNER_CPUS, 2 * WORKER_CPUS, 2 * WORKER_CPUS)
"""CPUs of the hosts beside the head: the learner fits on the first alone, and fills it."""
SPREAD = [
    f"placement.learner.cpus={LEARNER_CPUS}",
    f"placement.rollout.cpus={WORKER_CPUS}",
    "placement.bind_host=0.0.0.0",
    "placement.private_network=true",
]
"""Settings of a run that is spread over them."""
LOOPBACK = "127.0.1"
"""Of their addresses; Ray takes 127.0.0.1 for the address of every host."""
STARTED = "This command will now block"
STARTS, START_S = 5, 300.0
"""How often a host is started, since Ray's own 15 s are too short on a busy machine, and how long
it may then take.
"""
POLL_S = 0.1
OBJECT_STORE_BYTES = 100_000_000


class HostNotStarted(RuntimeError):
    """Ray did not come up on a host."""


class _Host(NamedTuple):
    process: subprocess.Popen
    cpus: int
    session: pathlib.Path
    """Its folder of Ray, which no other host has: each shows the logs in its own."""


class Head:
    """A running Ray head and the hosts that joined it, and the environment of a driver of it."""

    def __init__(
        self, process: subprocess.Popen, environment: Mapping[str, str], folder: pathlib.Path
    ):
        """Args:
        environment: of a driver that joins it.
        folder: gets the logs of its hosts.
        """
        self.environment = dict(environment)
        self._process = process
        self._folder = folder
        self._hosts: list[_Host] = []
        self._numbers = itertools.count(1)

    def add_host(self, cpus: int) -> None:
        """Starts a host that reports this number of CPUs.

        Raises:
            HostNotStarted: names its log.
        """
        number = next(self._numbers)
        log = self._folder / f"host-{number}.log"
        for _ in range(STARTS):
            host = self._start_host(f"{LOOPBACK}.{number}", cpus, log)
            deadline = time.monotonic() + START_S
            while host.process.poll() is None and time.monotonic() < deadline:
                if STARTED in log.read_text(errors="replace"):
                    self._hosts.append(host)
                    return
                time.sleep(POLL_S)
            self._end_host(host)
        raise HostNotStarted(f"a host of the Ray cluster was started {STARTS} times: {log}")

    def lose_host(self, process: psutil.Process) -> None:
        """Ends the host on which a process runs, and starts another one of its size.

        Raises:
            LookupError: if it runs on the head, or no longer.
        """
        above = {parent.pid for parent in process.parents()}
        lost = next((host for host in self._hosts if host.process.pid in above), None)
        if lost is None:
            raise LookupError(f"process {process.pid} runs on no host that could be lost")
        self._hosts.remove(lost)
        self._end_host(lost)
        self.add_host(lost.cpus)

    def end_hosts(self) -> None:
        """Ends all hosts but the head."""
        while self._hosts:
            self._end_host(self._hosts.pop())

    def actors(self, name: str) -> list[psutil.Process]:
        """The processes of actors of this class, oldest first."""
        found = []
        for process in self._descendants():
            with contextlib.suppress(psutil.Error, IndexError):
                if process.cmdline()[0].startswith(f"ray::{name}"):
                    found.append((process.create_time(), process.pid, process))
        return [process for _, _, process in sorted(found)]

    def _descendants(self) -> list[psutil.Process]:
        roots = [self._process, *(host.process for host in self._hosts)]
        return [child for root in roots for child in _descendants(root)]

    def _end_host(self, host: _Host) -> None:
        _kill_tree(host.process)
        _keep_logs(host.session, self._folder)

    def _start_host(self, address: str, cpus: int, log: pathlib.Path) -> _Host:
        session = head_folder()
        tpu_logs = session / "tpu_logs"  # else Ray shows those of other programs
        tpu_logs.mkdir()
        with log.open("w") as file:
            process = subprocess.Popen(
                [
                    *("ray", "start", "--block", "--disable-usage-stats"),
                    *("--address", self.environment["RAY_ADDRESS"], "--node-ip-address", address),
                    *("--num-cpus", str(cpus), "--object-store-memory", str(OBJECT_STORE_BYTES)),
                    *("--min-worker-port", "0", "--max-worker-port", "0"),
                    *("--temp-dir", str(session)),
                ],
                env={"TPU_LOG_DIR": str(tpu_logs), **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        return _Host(process, cpus, session)


def _descendants(process: subprocess.Popen) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def _kill_tree(process: subprocess.Popen) -> None:
    """Kills a process and all below it, those that are nearest to it first."""
    below = _descendants(process)
    process.kill()
    for one in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


@contextlib.contextmanager
def running_head(
    folder: pathlib.Path, extra: dict[str, str], *, hosts: bool = False
) -> Iterator[Head]:
    """Starts a head, and ends it with all that it started.

    Args:
        folder: its log goes there.
        extra: environment of the head, its actors and the drivers.
        hosts: whether actors run on HOSTS, which settings of SPREAD ask for, or on the head.
    """
    session = head_folder()
    (port,) = free_ports(1)
    environment = head_environment() | extra
    address, cpus, options = "127.0.0.1", CPUS, []
    if hosts:
        address, cpus, options = f"{LOOPBACK}.254", 0, ["--node-ip-address", f"{LOOPBACK}.254"]
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"
    log_path = folder / "head.log"
    with log_path.open("w") as log:
        process, jobs = start_head(
            environment, str(session), log, "--num-cpus", str(cpus), *options, port=port
        )
        head = Head(process, {**environment, "RAY_ADDRESS": f"{address}:{port}"}, folder)
        try:
            wait_for_head(process, jobs, log_path)
            for cpus in HOSTS if hosts else ():
                head.add_host(cpus)
            yield head
        finally:
            head.end_hosts()
            end_group(process, 20)
            _keep_logs(session, folder)


def _keep_logs(session: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies the logs of the actors to `folder`, and removes the session."""
    logs = (session / "session_latest").resolve() / "logs"
    if logs.is_dir():
        target = folder / "ray-logs"
        target.mkdir(exist_ok=True)
        for path in [*logs.glob("worker-*.out"), *logs.glob("worker-*.err"), logs / "raylet.out"]:
            if path.exists() and path.stat().st_size:
                shutil.copy(path, target / f"{session.name}-{path.name}")
    shutil.rmtree(session, ignore_errors=True)
