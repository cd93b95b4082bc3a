"""The whole service as a user runs it: real processes, real sockets, real kills.

Every test starts `python -m driver` with a Ray head of its own and looks at what it leaves behind.
"""

import contextlib
import ipaddress
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import safetensors.numpy

from services.process.phases import PHASES
from tests.deadlines import HANG_S
from tests.ipv6 import HAS_IPV6
from tests.tiny_model import write_tiny_model

ROOT = pathlib.Path(__file__).resolve().parents[3]
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
  functions: [{{name: "tests.slow_reward:score", params: {{seconds: 0.02}}}}]
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

AT_ONCE = ("--set", "placement.resources_timeout_s=1")
"""For a run that is to be refused for what the machine lacks."""

pytestmark = [pytest.mark.slow, pytest.mark.service]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model_and_data(tmp_path_factory.mktemp("model"))


def write_model_and_data(folder: pathlib.Path) -> pathlib.Path:
    """Writes what RUN_YAML reads; returns the model's path, and the data lies beside it."""
    with (folder / DATA).open("w") as file:
        for i in range(13):
            file.write(json.dumps({"question": f"{i} + {i % 5} =", "answer": i + i % 5}) + "\n")
    return write_tiny_model(folder / "tiny")


class Service:
    """One `python -m driver` and what it says."""

    def __init__(self, folder: pathlib.Path, model: pathlib.Path, *arguments: str):
        self.out = folder / "out"
        self.log = folder / "driver.log"
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

    def wait(self) -> int:
        """Its exit code; it hangs if it writes nothing for HANG_S, however long it takes."""
        written = -1
        while written != (written := self._written()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(HANG_S)
        os.killpg(self.process.pid, signal.SIGKILL)
        raise AssertionError(f"wrote nothing for {HANG_S} s:\n{self.text}")

    def _written(self) -> int:
        files = (self.log, self.out / "metrics.jsonl")
        return sum(path.stat().st_size for path in files if path.exists())

    @property
    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, condition, what: str, timeout_s: float = HANG_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.text}"
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}:\n{self.text}"
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(
            lambda: any(line["step"] >= step for line in self.lines("metrics")), f"step {step}"
        )

    def pid_of(self, actor: str) -> int:
        found = re.findall(rf"^{actor} is (?:ready|back): .*process (\d+)", self.text, re.M)
        return int(found[-1])

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


@pytest.fixture
def start(tmp_path, model):
    """Starts services; kills what a failed test leaves."""
    services = []

    def one(*arguments: str, folder: pathlib.Path = tmp_path) -> Service:
        services.append(Service(folder, model, *arguments))
        return services[-1]

    yield one
    for service in services:
        if service.process.poll() is None:
            os.killpg(service.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, model):
    service = Service(tmp_path_factory.mktemp("undisturbed"), model)
    assert service.wait() == 0, service.text
    return service


def same_training(one: Service, other: Service) -> None:
    """Holds two runs equal, bit for bit, in what training made: groups, rewards and weights."""
    assert sorted(one.trained()) == sorted(other.trained())
    for mine, theirs in zip(one.lines("metrics"), other.lines("metrics"), strict=True):
        for name in ("step", "reward/total/mean", "train/loss", "train/learning_rate"):
            assert mine.get(name) == theirs.get(name), name
    for name, tensor in one.policy().items():
        bits, expected = tensor.view(np.uint8), other.policy()[name].view(np.uint8)
        np.testing.assert_array_equal(bits, expected, err_msg=name)


def test_a_run_computes_alike_whatever_its_shell_brings_along_N30(
    start, undisturbed, tmp_path, monkeypatch
):
    folder = tmp_path / ("d" * 80)  # too long for Ray's sockets
    folder.mkdir()
    switches = {
        "TMPDIR": str(folder),
        "JAX_ENABLE_X64": "1",
        "JAX_DEFAULT_MATMUL_PRECISION": "BF16_BF16_F32",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "JAX_RANDOM_SEED_OFFSET": "3",
    }
    for name, value in switches.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    service = start(*(("--set", "placement.bind_host='::1'") if HAS_IPV6 else ()))
    service.wait_for(lambda: "learner is ready" in service.text, "the learner")
    assert psutil.Process(service.pid_of("learner")).nice() == psutil.Process().nice()
    assert service.wait() == 0, service.text
    assert "JAX_ENABLE_X64=1 of this shell does not hold" in service.text
    same_training(service, undisturbed)


def scale(service: Service, workers: int) -> None:
    """`python -m driver.scale`, which waits until the fleet has that size."""
    command = ["driver.scale", "--run", str(service.out), "--rollout-workers", str(workers)]
    done = subprocess.run(
        [sys.executable, "-m", *command, "--wait", str(HANG_S)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr + service.text


def test_a_run_trains_each_group_once_and_its_accounting_adds_up(undisturbed):
    assert undisturbed.status["state"] == "finished" and undisturbed.status["exit_code"] == 0
    expected = [f"g{index:08d}" for index in range(4 * STEPS)]
    assert sorted(undisturbed.trained()) == expected
    metrics = undisturbed.lines("metrics")
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    for line in undisturbed.lines("ledger"):
        assert set(line["processes"]) == {"learner", "rollout-0", "rollout-1"}
        assert line["absent_s"] == {}
    for line in metrics:
        assert line["offpolicy/staleness_max"] == 0
        assert line["offpolicy/logprob_gap_max"] < 1e-4, "both sides define the same logprob"
    assert len(undisturbed.lines("eval")) == 3 * 6, "steps 2, 4 and the last"
    last = undisturbed.text.strip().splitlines()[-1]
    assert re.fullmatch(
        r"service: accuracy n/a -> 0\.\d\d, reward \d\.\d\d -> \d\.\d\d, steps 6, seconds \d+",
        last,
    )


def marks_of(line: dict) -> list[tuple[str, str]]:
    """Process and text of every mark of a step."""
    return [
        (process, text)
        for process, track in line["processes"].items()
        for _, text in track["marks"]
    ]


def lanes_say_what_the_ledger_says(service: Service) -> None:
    """Also of processes that were not there all the time."""
    for line, ledger in zip(service.lines("timeline"), service.lines("ledger"), strict=True):
        assert line["step"] == ledger["step"] and ledger["overlap_s"] == {}
        assert line["end"] - line["start"] == pytest.approx(ledger["wall_s"], abs=1e-5)
        assert line["processes"].keys() <= ledger["processes"].keys()
        for process, row in ledger["processes"].items():
            reported_s = sum(row.values())
            absent_s = ledger["absent_s"].get(process, 0.0)
            assert reported_s + absent_s == pytest.approx(ledger["wall_s"], rel=1e-6), process
            spans = line["processes"].get(process, {"spans": []})["spans"]
            assert len(spans) <= 200
            shown = dict.fromkeys(PHASES, 0.0)
            for phase, _, seconds in spans:
                shown[PHASES[phase]] += seconds
            assert sum(shown.values()) == pytest.approx(reported_s, abs=0.01), process
            for phase, seconds in row.items():
                assert shown[phase] == pytest.approx(seconds, abs=0.02 * ledger["wall_s"]), process


def test_the_timeline_shows_when_what_the_ledger_adds_up(undisturbed):
    lines = undisturbed.lines("timeline")
    lanes_say_what_the_ledger_says(undisturbed)
    for line in lines:
        assert 1 <= len(line["gauges"]) <= 60
    seen = {(line["step"], process, text) for line in lines for process, text in marks_of(line)}
    assert {(step, "learner", f"version {step}") for step in range(1, STEPS + 1)} <= seen
    assert (3, "learner", "checkpoint 2") in seen
    for worker in ("rollout-0", "rollout-1"):
        mine = [text for line in lines for process, text in marks_of(line) if process == worker]
        assert mine == sorted(set(mine)) and len(mine) > STEPS // 2, "version 0 may come before"
        assert set(mine) <= {f"version {version}" for version in range(STEPS + 1)}
    starts = [line["start"] for line in lines[1:]]
    assert starts == pytest.approx([line["end"] for line in lines[:-1]], abs=0.01)
    for line in undisturbed.lines("metrics"):
        assert line["queue/out_max"] > 0
        for process in ("learner", "rollout-0", "rollout-1"):
            assert line[f"mem/{process}/host_bytes"] > 2**27


def test_a_killed_worker_is_replaced_and_nothing_changes(start, undisturbed):
    service = start()
    service.wait_for_step(2)
    os.kill(service.pid_of("rollout-0"), signal.SIGKILL)
    assert service.reached_from_elsewhere() == [], "R14"
    assert service.wait() == 0, service.text
    assert "rollout-0 failed, restart 1 of 3" in service.text
    lanes_say_what_the_ledger_says(service)
    assert service.lines("metrics")[-1]["workers/restarts"] == 1
    same_training(service, undisturbed)


def test_sigterm_ends_in_a_checkpoint_and_resume_goes_on_as_if_nothing(start, undisturbed):
    service = start()
    service.wait_for_step(3)
    processes = service.descendants()
    service.process.send_signal(signal.SIGTERM)
    assert service.wait() == 143, service.text
    assert service.status["state"] == "interrupted"
    assert service.status["exit_code"] == 143
    saved = service.status["last_checkpoint"]
    assert saved >= 3
    _, alive = psutil.wait_procs(processes, timeout=HANG_S)
    assert not alive, "no process may outlive the run"
    resumed = start("--resume")
    assert resumed.wait() == 0, resumed.text
    assert f"resumed at step {saved}" in resumed.text
    same_training(resumed, undisturbed)


def test_sigint_at_start_leaves_nothing_that_blocks_the_next(start):
    service = start()
    service.wait_for(lambda: "outputs in" in service.text, "the start")
    time.sleep(1)
    processes = service.descendants()
    service.process.send_signal(signal.SIGINT)
    assert service.wait() == 130, service.text
    assert service.status["state"] == "interrupted"
    _, alive = psutil.wait_procs(processes, timeout=HANG_S)
    assert not alive
    again = start("--set", "placement.rollout.cpus=64", *AT_ONCE)
    assert again.wait() == 3, again.text


def test_a_second_signal_ends_at_once_and_says_so(start):
    service = start()
    service.wait_for_step(1)
    service.process.send_signal(signal.SIGTERM)
    service.wait_for(
        lambda: "interrupted by SIGTERM" in service.text, "the first signal to be noticed"
    )
    service.process.send_signal(signal.SIGTERM)
    assert service.wait() == 143
    assert service.status["state"] == "interrupted"
    assert "second signal" in service.status["reason"] or service.status["last_checkpoint"]


def test_a_resume_of_another_run_is_refused_before_anything_starts(start, undisturbed):
    for arguments, message in (
        (["--set", "run.seed=4"], "put run.seed back"),
        ([], "run.steps a higher number"),
    ):
        resumed = start("--resume", *arguments, "--set", f"run.output_dir={undisturbed.out}")
        assert resumed.wait() == 2, resumed.text
        assert message in resumed.text
        assert undisturbed.status["state"] == "finished", "status.json stays as it was"


def test_a_killed_learner_is_replaced_as_often_as_allowed_and_a_resume_loses_nothing(
    start, undisturbed
):
    service = start("--set", "placement.learner_restarts=1")
    service.wait_for_step(3)
    os.kill(service.pid_of("learner"), signal.SIGKILL)
    service.wait_for(lambda: "resumed at step 2" in service.text, "the next learner")
    service.wait_for(lambda: service.text.count("learner is ready") == 2, "it to serve")
    os.kill(service.pid_of("learner"), signal.SIGKILL)
    assert service.wait() == 1
    assert service.status["state"] == "failed"
    assert "the learner died" in service.status["reason"]
    assert "placement.learner_restarts=1 is used up" in service.status["reason"]
    assert list(service.out.glob("postmortem-*.tar.gz")), "what is known of the end is kept"
    resumed = start("--resume")
    assert resumed.wait() == 0, resumed.text
    same_training(resumed, undisturbed)


def test_workers_that_come_and_go_change_nothing(start, undisturbed):
    slow = "reward.functions=[{name: 'tests.slow_reward:score', params: {seconds: 0.5}}]"
    small = ("--set", "placement.rollout.cpus=0.25")
    service = start("--set", "rollout.workers=1", "--set", slow, *small)
    service.wait_for_step(1)
    scale(service, 4)
    service.wait_for_step(2)
    scale(service, 2)
    assert service.wait() == 0, service.text
    same_training(service, undisturbed)
    crews = [set(line["processes"]) - {"learner"} for line in service.lines("ledger")]
    assert {"rollout-0", "rollout-1", "rollout-2", "rollout-3"} in crews
    assert max(map(len, crews[-1:])) == 2
    lanes_say_what_the_ledger_says(service)
    absent = {name for line in service.lines("ledger") for name in line["absent_s"]}
    assert absent == {"rollout-1", "rollout-2", "rollout-3"}, "they came in the middle of a step"


def test_a_damaged_newest_checkpoint_is_passed_over_and_named(start, undisturbed, tmp_path):
    import shutil

    shutil.copytree(undisturbed.out, tmp_path / "out")
    newest = max((tmp_path / "out" / "checkpoints").iterdir())
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1])
    status = json.loads((tmp_path / "out" / "status.json").read_text())
    (tmp_path / "out" / "status.json").write_text(json.dumps({**status, "state": "failed"}))
    service = start("--resume")
    assert service.wait() == 0, service.text
    assert f"checkpoint skipped: {newest.name}" in service.text
    assert "resumed at step 4" in service.text
    same_training(service, undisturbed)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["placement.rollout.cpus=64"], "CPU: asked 128.5, cluster has"),
        (
            ["placement.platform=gpu", "placement.learner.gpus=0.5", "placement.rollout.gpus=0.5"],
            "GPU: asked 1.5, cluster has 0",
        ),
    ],
)
def test_what_the_machine_lacks_is_refused_with_asked_and_there(start, overrides, message):
    service = start(
        *AT_ONCE, *(argument for override in overrides for argument in ("--set", override))
    )
    assert service.wait() == 3, service.text
    assert message in service.text
    assert "Traceback" not in service.text
    assert service.status["state"] == "failed"
