"""A small run as a user starts it, for the tests that start processes of the product."""

import contextlib
import fcntl
import ipaddress
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import psutil
import safetensors.numpy

from services.process.whole_file import write_whole
from tests.deadlines import HANG_S, wait_until
from tests.tiny_model import write_tiny_model

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 6
DATA = "sums.jsonl"
RUN_YAML = """
run: {{name: service, steps: {steps}, seed: 3, output_dir: {folder}/out}}
model: {{path: {model}}}
data:
  train: {{source: {data}, size: 7}}
  eval: {{source: {data}, skip: 7, size: 6}}
rollout:
  workers: 2
  prompts_per_step: 4
  completions_per_prompt: 4
  max_prompt_tokens: 128
  max_completion_tokens: 12
  decode: {{slots: 4, compute_dtype: float32}}
reward:
  functions:
    - {{name: "tests.slow_reward:score", params: {{seconds: 0.02, gate: {folder}/gate}}}}
  timeout_s: {patience_s:g}
learner:
  microbatch_tokens: 512
  compute_dtype: float32
  optimizer: {{learning_rate: 1e-3, schedule: cosine, warmup_steps: 2}}
weights: {{dtype: float32}}
checkpoint: {{every_steps: 2}}
eval: {{at_start: false, every_steps: 2}}
placement:
  platform: cpu
  learner: {{cpus: 0.5}}
  rollout: {{cpus: 0.5}}
  resources_timeout_s: {patience_s:g}
"""

ONE_WORKER = ("--set", "rollout.workers=1")
"""For what does not depend on their number: each costs as much as the learner."""


def write_model_and_data(folder: pathlib.Path) -> pathlib.Path:
    """Writes what RUN_YAML reads; returns the model's path, and the data lies beside it."""
    with (folder / DATA).open("w") as file:
        for i in range(13):
            file.write(json.dumps({"question": f"{i} + {i % 5} =", "answer": i + i % 5}) + "\n")
    return write_tiny_model(folder / "tiny")


class RunFolder:
    """What one run leaves behind."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.out = folder / "out"
        self.log = folder / "driver.log"

    @property
    def text(self) -> str:
        return self.log.read_text()

    def pid_of(self, actor: str) -> int:
        found = re.findall(rf"^{actor} is (?:ready|back): .*process (\d+)", self.text, re.M)
        return int(found[-1])

    def lines(self, name: str) -> list[dict]:
        path = self.out / f"{name}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    @property
    def status(self) -> dict:
        return json.loads((self.out / "status.json").read_text())

    def trained(self) -> list[str]:
        return [g for line in self.lines("ledger") for g in line["groups"].get("trained", [])]

    def policy(self) -> dict[str, np.ndarray]:
        return safetensors.numpy.load_file(self.out / "export" / "model.safetensors")


class Service(RunFolder):
    """One `python -m driver` and what it says."""

    def __init__(
        self,
        folder: pathlib.Path,
        model: pathlib.Path,
        *arguments: str,
        hold_after: int | None = None,
    ):
        """Args:
        hold_after: as `hold`, from the start.
        """
        super().__init__(folder)
        self._gate = folder / "gate"
        self._gate.unlink(missing_ok=True)
        if hold_after is not None:
            self.hold(hold_after)
        config, data = folder / "run.yaml", model.with_name(DATA)
        config.write_text(
            RUN_YAML.format(folder=folder, model=model, data=data, steps=STEPS, patience_s=HANG_S)
        )
        self.config = config
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "driver", "--config", str(config), *arguments],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"},
                start_new_session=True,
            )

    def hold(self, after: int) -> None:
        """Lets the run take this many steps in all, and no more until `release`: what is done to
        it meanwhile may take as long as a busy machine needs."""
        write_whole(self._gate, str(after))

    def release(self) -> None:
        self._gate.unlink()

    def wait(self) -> int:
        """Its exit code; it hangs if it writes nothing for HANG_S, however long it takes."""
        written = -1
        while written != (written := self._written()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(HANG_S)
        self.kill()
        raise AssertionError(f"wrote nothing for {HANG_S} s:\n{self.text}")

    def kill(self) -> None:
        """Ends it and what it has started, if it runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _written(self) -> int:
        files = (self.log, self.out / "metrics.jsonl")
        return sum(path.stat().st_size for path in files if path.exists())

    def wait_for(self, condition, what: str) -> None:
        """Returns once `condition()` is true; the run must not end before."""

        def is_there() -> bool:
            assert self.process.poll() is None, f"ended before {what}:\n{self.text}"
            return condition()

        wait_until(is_there, what, every_s=0.1)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(
            lambda: any(line["step"] >= step for line in self.lines("metrics")), f"step {step}"
        )

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def reached_from_elsewhere(self) -> list[str]:
        """The sockets of its processes that listen beyond loopback, the page's included."""
        found = []
        for process in [psutil.Process(self.process.pid), *self.descendants()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                for socket in process.net_connections("inet"):
                    address = ipaddress.ip_address(socket.laddr.ip)
                    address = getattr(address, "ipv4_mapped", None) or address
                    if socket.status == psutil.CONN_LISTEN and not address.is_loopback:
                        found.append(f"{process.name()}: {address} port {socket.laddr.port}")
        return found


def undisturbed_run(tmp_path_factory) -> RunFolder:
    """The run with two workers that nothing happens to: made once for all processes of the tests.

    Raises:
        AssertionError: if it fails.
    """
    base = tmp_path_factory.getbasetemp()
    # Processes of pytest-xdist have folders of their own beside each other.
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "undisturbed"
    shared.mkdir(exist_ok=True)
    run, done = RunFolder(shared), shared / "done"
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            for left in (run.out, shared / "model"):  # by one that failed
                shutil.rmtree(left, ignore_errors=True)
            (shared / "model").mkdir()
            service = Service(shared, write_model_and_data(shared / "model"))
            assert service.wait() == 0, service.text
            done.touch()
    return run


def same_training(one: RunFolder, other: RunFolder) -> None:
    """Checks that two runs are equal, bit for bit, in what training made: groups, rewards and
    weights."""
    assert sorted(one.trained()) == sorted(other.trained())
    for mine, theirs in zip(one.lines("metrics"), other.lines("metrics"), strict=True):
        for name in ("step", "reward/total/mean", "train/loss", "train/learning_rate"):
            assert mine.get(name) == theirs.get(name), name
    for name, tensor in one.policy().items():
        bits, expected = tensor.view(np.uint8), other.policy()[name].view(np.uint8)
        np.testing.assert_array_equal(bits, expected, err_msg=name)
