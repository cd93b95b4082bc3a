"""The whole service as a user runs it: real processes, real sockets, real kills.

Every test starts `python -m driver` with a Ray head of its own and looks at what it leaves behind.
What is done to a live run is done while the run is held, so that no test depends on being quick.
"""

import os
import re
import signal
import subprocess
import sys
import tarfile
import time

import httpx
import psutil
import pytest

from dashboard import auth
from driver import cli
from services.process.phases import PHASES
from tests.deadlines import HANG_S
from tests.driver.service_run import (
    ONE_WORKER,
    ROOT,
    STEPS,
    RunFolder,
    Service,
    same_training,
    undisturbed_run,
    write_model_and_data,
)
from tests.ipv6 import HAS_IPV6

AT_ONCE = ("--set", "placement.resources_timeout_s=1")
"""For a run that is to be refused for what the machine lacks."""

pytestmark = [pytest.mark.slow, pytest.mark.service]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model_and_data(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(tmp_path, model):
    """Starts services; kills what a failed test leaves."""
    services = []

    def one(*arguments: str, hold_after: int | None = None) -> Service:
        services.append(Service(tmp_path, model, *arguments, hold_after=hold_after))
        return services[-1]

    yield one
    for service in services:
        service.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return undisturbed_run(tmp_path_factory)


def test_a_run_computes_alike_in_any_shell_and_when_a_worker_is_killed_N30_R14(
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
    bind_host = ("--set", "placement.bind_host='::1'") if HAS_IPV6 else ()
    service = start(*bind_host, hold_after=2)
    service.wait_for_step(2)
    assert psutil.Process(service.pid_of("learner")).nice() == psutil.Process().nice()
    assert service.reached_from_elsewhere() == []
    os.kill(service.pid_of("rollout-0"), signal.SIGKILL)
    service.wait_for(lambda: "rollout-0 failed, restart 1 of 3" in service.text, "the loss")
    service.release()
    assert service.wait() == 0, service.text
    assert "JAX_ENABLE_X64=1 of this shell does not hold" in service.text
    lanes_say_what_the_ledger_says(service)
    assert service.lines("metrics")[-1]["workers/restarts"] == 1
    same_training(service, undisturbed)


def test_two_devices_of_the_learner_share_the_rows(start, undisturbed, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    service = start(*ONE_WORKER, "--set", "learner.mesh={data: 1, fsdp: 1, context: 2}")
    assert service.wait() == 0, service.text
    assert "mesh data=1 x fsdp=1 x context=2" in service.text
    assert sorted(service.trained()) == sorted(undisturbed.trained())
    ours, theirs = (
        next(line for line in run.lines("metrics") if "train/grad_norm" in line)
        for run in (service, undisturbed)
    )
    # Of the first update: later ones are of weights that float32 rounds in another order.
    assert theirs["train/grad_norm"] > 1e-3
    for name in ("reward/total/mean", "train/grad_norm", "train/entropy"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name


def scale(service: Service, workers: int, then=lambda: None) -> None:
    """`python -m driver.scale`, which waits until the fleet has that size; `then` is done once the
    run has accepted the wish."""
    command = ["driver.scale", "--run", str(service.out), "--rollout-workers", str(workers)]
    scaling = subprocess.Popen(
        [sys.executable, "-m", *command, "--wait", str(HANG_S)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    service.wait_for(lambda: f"asked for: {workers} rollout" in service.text, "the wish")
    then()
    said, _ = scaling.communicate(timeout=2 * HANG_S)
    assert scaling.returncode == 0, said + service.text


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


def lanes_say_what_the_ledger_says(service: RunFolder) -> None:
    """Also of processes that were not there all the time."""
    for line, ledger in zip(service.lines("timeline"), service.lines("ledger"), strict=True):
        assert line["step"] == ledger["step"]
        # A lap of a busy worker may end some milliseconds beside the driver's.
        overlap_s = ledger["overlap_s"]
        assert max(overlap_s.values(), default=0.0) < 0.02 * ledger["wall_s"]
        assert line["end"] - line["start"] == pytest.approx(ledger["wall_s"], abs=1e-5)
        assert line["processes"].keys() <= ledger["processes"].keys()
        for process, row in ledger["processes"].items():
            reported_s = sum(row.values())
            absent_s = ledger["absent_s"].get(process, 0.0)
            present_s = ledger["wall_s"] + overlap_s.get(process, 0.0)
            assert reported_s + absent_s == pytest.approx(present_s, rel=1e-6), process
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
    # It is complete when its files were read back, beside the steps after it.
    assert any((step, "learner", "checkpoint 2") in seen for step in range(3, STEPS + 1))
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


def test_sigint_at_start_leaves_nothing_that_blocks_the_next_which_asks_for_too_much(start):
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
    assert "CPU: asked 128.5, cluster has" in again.text
    assert "Traceback" not in again.text
    assert again.status["state"] == "failed"


def test_a_second_signal_ends_at_once_and_says_so(start):
    service = start(*ONE_WORKER, hold_after=1)
    service.wait_for_step(1)
    service.process.send_signal(signal.SIGTERM)
    service.wait_for(
        lambda: "interrupted by SIGTERM" in service.text, "the first signal to be noticed"
    )
    service.process.send_signal(signal.SIGTERM)
    assert service.wait() == 143
    assert service.status["state"] == "interrupted"
    assert "second signal" in service.status["reason"] or service.status["last_checkpoint"]


def test_a_resume_of_another_run_is_refused_before_anything_starts(undisturbed, capsys):
    config = ["--config", str(undisturbed.folder / "run.yaml"), "--resume"]
    for arguments, message in (
        (["--set", "run.seed=4"], "put run.seed back"),
        ([], "run.steps a higher number"),
    ):
        assert cli.main([*config, *arguments]) == 2
        assert message in capsys.readouterr().err
        assert undisturbed.status["state"] == "finished", "status.json stays as it was"


def test_a_run_that_is_interrupted_fails_and_is_damaged_resumes_as_if_nothing(start, undisturbed):
    """One run in three lives: ended by SIGTERM; failed for a learner that is killed too often;
    resumed from the checkpoint before a damaged one."""
    service = start(*ONE_WORKER, hold_after=3)
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

    settings = ("--set", "placement.learner_restarts=1", "--set", "log.dashboard.port=0")
    failing = start(*ONE_WORKER, "--resume", *settings, hold_after=4)
    failing.wait_for_step(4)
    assert f"resumed at step {saved}" in failing.text
    url, tokens = auth.read_access(failing.out / "dashboard")
    with httpx.Client(trust_env=False, timeout=HANG_S) as browser:
        assert browser.get(auth.link(url, tokens)).status_code == 303
    os.kill(failing.pid_of("learner"), signal.SIGKILL)
    failing.wait_for(lambda: failing.text.count("learner is ready") == 2, "the next learner")
    assert len(re.findall("resumed at step", failing.text)) == 2
    os.kill(failing.pid_of("learner"), signal.SIGKILL)
    assert failing.wait() == 1, failing.text
    assert failing.status["state"] == "failed"
    assert "the learner died" in failing.status["reason"]
    assert "placement.learner_restarts=1 is used up" in failing.status["reason"]
    holds_no_token(failing, tokens)

    newest = max((failing.out / "checkpoints").glob("step-*[0-9]"))
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1])
    resumed = start(*ONE_WORKER, "--resume")
    assert resumed.wait() == 0, resumed.text
    assert f"checkpoint skipped: {newest.name}" in resumed.text
    assert f"resumed at step {int(newest.name[5:])}" not in resumed.text
    same_training(resumed, undisturbed)


def holds_no_token(service: Service, tokens: auth.Tokens) -> None:
    """Looks for them in the post-mortem of a run that failed, and in what it printed."""
    (path,) = service.out.glob("postmortem-*.tar.gz")
    with tarfile.open(path) as archive:
        held = {entry.name: archive.extractfile(entry).read() for entry in archive}
    assert any(name.endswith("dashboard.log") for name in held), list(held)
    for name, raw in (*held.items(), (service.log.name, service.log.read_bytes())):
        for token in (tokens.view, tokens.control):
            assert token.encode() not in raw, name
    listing = next(raw for name, raw in held.items() if name.endswith("files.txt"))
    assert b"dashboard/view_token" in listing, "the tokens were there while it was written"
    assert not (service.out / "dashboard").exists()


def test_workers_that_come_and_go_change_nothing(start, undisturbed):
    small = ("--set", "placement.rollout.cpus=0.25")
    service = start(*ONE_WORKER, *small, hold_after=1)
    service.wait_for_step(1)
    scale(service, 4)
    service.hold(3)
    service.wait_for_step(3)
    scale(service, 2, then=lambda: service.hold(4))  # what they have begun ends first
    service.release()
    assert service.wait() == 0, service.text
    same_training(service, undisturbed)
    crews = [set(line["processes"]) - {"learner"} for line in service.lines("ledger")]
    assert {"rollout-0", "rollout-1", "rollout-2", "rollout-3"} in crews
    assert len(crews[-1]) == 2
    lanes_say_what_the_ledger_says(service)
    absent = {name for line in service.lines("ledger") for name in line["absent_s"]}
    assert absent == {"rollout-1", "rollout-2", "rollout-3"}, "they came in the middle of a step"
