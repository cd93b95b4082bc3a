"""A Ray cluster over several hosts, and one run on it."""

import contextlib
import json
import os
import pathlib
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from benchmarks.chaos.run_checks import check_accounting, read_lines, read_run
from tests.cluster.hosts import Host, Network, open_network, plain_environment
from tests.deadlines import wait_until

CONFIG = "benchmarks/chaos/run.yaml"
GCS_PORT = 6379
LEARNER_CPUS, WORKER_CPUS = 3, 2
"""Of a host, and what the one process that fits it asks for."""
RAY_STARTS = 5
RAY_STARTED = "This command will now block"
STEP_S = 300.0
"""A run that closes no step in this time hangs."""


class ClusterRun:
    """Owns a cluster of a head with the driver, a learner's host and hosts of workers."""

    def __init__(self, network: Network, folder: pathlib.Path, *, workers: int, steps: int):
        """Args:
        folder: outside /tmp; the run's is in it, with the output of all that is started.
        workers: hosts of one rollout worker each.
        steps: of the run.
        """
        self.folder, self.logs = folder / "run", folder / "logs"
        self.logs.mkdir()
        self._network, self._steps = network, steps
        self._environment = plain_environment() | {
            "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "RAY_worker_niceness": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "TMPDIR": "/tmp",
        }
        self._environment.pop("RAY_ADDRESS", None)
        self._driver: subprocess.Popen | None = None
        self.head = network.add_host("head")
        self._start_ray(
            self.head, "--head", f"--port={GCS_PORT}", "--include-dashboard=false", "--num-cpus=0"
        )
        self.learner = self.add_learner_host("learner")
        self.workers = [self.add_worker_host(f"worker{number}") for number in range(workers)]

    def add_learner_host(self, name: str) -> Host:
        """A new host that the learner fits on."""
        return self._add_node(name, LEARNER_CPUS)

    def add_worker_host(self, name: str) -> Host:
        """A new host that one rollout worker fits on."""
        return self._add_node(name, WORKER_CPUS)

    def start(self, *settings: str) -> None:
        """Starts the driver on the head's host."""
        chosen = [
            f"run.output_dir={self.folder}",
            f"run.steps={self._steps}",
            f"rollout.workers={len(self.workers)}",
            f"placement.learner.cpus={LEARNER_CPUS}",
            f"placement.rollout.cpus={WORKER_CPUS}",
            "placement.bind_host=0.0.0.0",
            "placement.private_network=true",
            "placement.startup_timeout_s=300",
            "placement.resources_timeout_s=180",
            "placement.worker_restarts=3",  # the default, which the run of chaos has not
            "placement.learner_restarts=3",
            *settings,
        ]
        self._driver = self.head.start(
            [
                *(sys.executable, "-m", "driver", "--config", CONFIG),
                *(part for setting in chosen for part in ("--set", setting)),
            ],
            self._environment | {"RAY_ADDRESS": f"{self.head.address}:{GCS_PORT}"},
            self.logs / "driver.log",
        )

    def closed_step(self) -> int:
        """The last step that was closed; 0 before the first."""
        lines = read_lines(self.folder / "metrics.jsonl")
        return max((line["step"] for line in lines), default=0)

    def wait_for_step(self, step: int) -> None:
        """Waits until a step is closed.

        Raises:
            AssertionError: if the driver ends before, or no step is closed for STEP_S; with the
                end of its output.
        """
        closed, since = self.closed_step(), time.monotonic()
        while closed < step:
            assert self._driver is not None and self._driver.poll() is None, self.output()
            assert time.monotonic() < since + STEP_S, self.output()
            time.sleep(0.1)
            if (now := self.closed_step()) != closed:
                closed, since = now, time.monotonic()

    def recovery_s(self, fault_at_s: float) -> float:
        """Waits for the next step but one to close, and returns the seconds from a fault to it.

        The step in progress may need nothing more of what was lost.

        Args:
            fault_at_s: monotonic time.
        """
        self.wait_for_step(self.closed_step() + 2)
        return time.monotonic() - fault_at_s

    def finish(self) -> int:
        """Waits for the end of the driver; its exit code."""
        assert self._driver is not None
        self.wait_for_step(self._steps)
        return self._driver.wait(STEP_S)

    def status(self) -> dict:
        """status.json of the run."""
        return json.loads((self.folder / "status.json").read_text())

    def output(self) -> str:
        """The output of the driver so far."""
        return (self.logs / "driver.log").read_text(errors="replace")

    def worker_on(self, host: Host) -> str:
        """The name of the worker that was placed on a host."""
        return re.findall(rf"(rollout-\d+) is ready: .* on {host.name}$", self.output(), re.M)[-1]

    def wait_for_failure(self) -> int:
        """Waits for the end of a driver that is to take no step more; its exit code."""
        assert self._driver is not None
        return self._driver.wait(STEP_S)

    def check_finished(self) -> None:
        """Checks that the run ended well, with every group once and every step in order."""
        assert self.finish() == 0, self.output()
        accounting = check_accounting(read_run(self.folder), steps=self._steps)
        assert (accounting.lost, accounting.duplicated, accounting.problems) == ((), (), ())

    def _add_node(self, name: str, cpus: int) -> Host:
        host = self._network.add_host(name)
        self._start_ray(host, f"--address={self.head.address}:{GCS_PORT}", f"--num-cpus={cpus}")
        return host

    def _start_ray(self, host: Host, *options: str) -> None:
        """Starts Ray on a host; again if it ends, as its own 15 s are too short on a busy machine.

        Raises:
            AssertionError: if it cannot be started; with its output.
        """
        log = self.logs / f"ray-{host.name}.log"
        for _ in range(RAY_STARTS):
            log.write_text("")
            process = host.start(
                [
                    *("ray", "start", "--block", "--disable-usage-stats"),
                    *(f"--node-ip-address={host.address}", "--object-store-memory=100000000"),
                    *options,
                ],
                self._environment,
                log,
            )
            wait_until(
                lambda ray=process: ray.poll() is not None or RAY_STARTED in log.read_text(),
                f"Ray on {host.name}",
                0.2,
            )
            if process.poll() is None:
                return
            host.succeeds("ray", "stop", "--force")
        raise AssertionError(log.read_text())


@contextlib.contextmanager
def cluster_run(*, workers: int, steps: int) -> Iterator[ClusterRun]:
    """A cluster that ends with the block; its folder is kept after an error, and named."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="tandem-cluster-", dir="/var/tmp"))
    try:
        with open_network(folder) as network:
            yield ClusterRun(network, folder, workers=workers, steps=steps)
    except BaseException:
        print(f"what the run and its hosts left: {folder}")
        raise
    shutil.rmtree(folder, ignore_errors=True)
