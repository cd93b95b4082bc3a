"""Failpoints: each armed file does its one thing, once, in one process."""

import errno
import multiprocessing
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from services.process import failpoints
from tests.deadlines import HANG_S

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture
def folder(tmp_path):
    """Installed for the test."""
    failpoints.install(tmp_path)
    yield tmp_path
    failpoints.install(None)


def reach_in_a_process(folder, name: str, **options) -> subprocess.Popen:
    code = (
        "import sys; from services.process import failpoints; failpoints.install(sys.argv[1]); "
        "failpoints.reach(sys.argv[2]); print('passed', flush=True)"
    )
    return subprocess.Popen([sys.executable, "-c", code, str(folder), name], cwd=ROOT, **options)


def test_a_point_that_is_not_installed_or_not_armed_does_nothing(tmp_path):
    failpoints.install(None)
    armed = failpoints.arm(tmp_path, "driver.step", "raise at once")
    failpoints.reach("driver.step")
    assert armed.exists()
    failpoints.install(tmp_path / "never made")
    failpoints.reach("driver.step")
    failpoints.install(tmp_path)
    failpoints.reach("worker.push")
    failpoints.install(None)
    assert [path.name for path in tmp_path.iterdir()] == ["driver.step"]


def test_kill_ends_the_process_as_kill_minus_9_does_and_only_one(tmp_path):
    failpoints.arm(tmp_path, "worker.push", "kill")
    first = reach_in_a_process(tmp_path, "worker.push")
    assert first.wait(HANG_S) == -signal.SIGKILL
    assert failpoints.fired(tmp_path, "worker.push") == [first.pid]
    second = reach_in_a_process(tmp_path, "worker.push")
    assert second.wait(HANG_S) == 0


def test_hang_never_passes(tmp_path):
    failpoints.arm(tmp_path, "worker.push", "hang")
    process = reach_in_a_process(tmp_path, "worker.push", stdout=subprocess.PIPE)
    deadline = time.monotonic() + HANG_S
    while not failpoints.fired(tmp_path, "worker.push") and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.kill()
    assert process.communicate()[0] == b""


def test_raise_enospc_and_sleep(folder, tmp_path):
    failpoints.arm(folder, "learner.update", "raise of a kind: two words")
    with pytest.raises(failpoints.FailpointRaised, match="^of a kind: two words$"):
        failpoints.reach("learner.update")
    failpoints.reach("learner.update")
    failpoints.arm(folder, "learner.checkpoint", "enospc")
    with pytest.raises(OSError, match="No space left.*part-3") as full:
        failpoints.reach("learner.checkpoint", tmp_path / "part-3")
    assert full.value.errno == errno.ENOSPC
    failpoints.arm(folder, "learner.publish", "sleep 0.2")
    started = time.monotonic()
    failpoints.reach("learner.publish")
    assert time.monotonic() - started >= 0.2


def test_skip_counts_arrivals_of_all_threads(folder):
    failpoints.arm(folder, "driver.step", "skip 2 then raise the third")
    assert reach_in_a_process(folder, "driver.step").wait(HANG_S) == 0
    failpoints.reach("driver.step")
    with pytest.raises(failpoints.FailpointRaised, match="the third"):
        failpoints.reach("driver.step")
    failpoints.reach("driver.step")
    assert failpoints.fired(folder, "driver.step") == [os.getpid()]


def test_corrupt_flips_one_bit_of_a_copy_once(folder):
    data = memoryview(bytes(range(200)))
    assert failpoints.spoiled("weights.serve", data) is data
    failpoints.arm(folder, "weights.serve", "skip 1 then corrupt")
    assert failpoints.spoiled("weights.serve", data) is data
    wrong = failpoints.spoiled("weights.serve", data)
    changed = int.from_bytes(wrong) ^ int.from_bytes(data)
    assert len(wrong) == 200 and changed.bit_count() == 1
    assert failpoints.spoiled("weights.serve", data) == bytes(range(200))


def test_corrupt_without_data_is_an_error(folder):
    failpoints.arm(folder, "driver.step", "corrupt")
    with pytest.raises(ValueError, match="driver.step has no data in hand"):
        failpoints.reach("driver.step")


def _race(folder, start, fired):
    failpoints.install(folder)
    start.wait(HANG_S)

    def run():
        for _ in range(100):
            try:
                failpoints.reach("worker.decode")
            except failpoints.FailpointRaised:
                with fired.get_lock():
                    fired.value += 1

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_of_many_threads_and_processes_one_fires(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    start, fired = spawn.Barrier(3), spawn.Value("i", 0)
    racers = [spawn.Process(target=_race, args=(tmp_path, start, fired)) for _ in range(2)]
    failpoints.arm(tmp_path, "worker.decode", "raise now")
    for racer in racers:
        racer.start()
    start.wait(HANG_S)
    for racer in racers:
        racer.join(HANG_S)
    assert fired.value == 1
    assert [path.suffix for path in tmp_path.iterdir()] == [".fired"]


@pytest.mark.parametrize(
    "action", ["", "die", "sleep", "sleep -1", "sleep soon", "raise", "skip 1", "skip 1 then die"]
)
def test_an_action_that_is_none_is_refused_when_armed_and_when_met(folder, action):
    with pytest.raises(ValueError, match="an action is kill, hang"):
        failpoints.arm(folder, "driver.step", action)
    (folder / "driver.step").write_text(action)
    with pytest.raises(ValueError, match="driver.step is armed with"):
        failpoints.reach("driver.step")


def test_a_point_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no failpoint 'learner.updat'; there are driver.step"):
        failpoints.arm(tmp_path, "learner.updat", "kill")


def test_code_reaches_exactly_the_points_that_are_listed():
    pattern = re.compile(r"failpoints\.(?:reach|spoiled)\(\s*\"([\w.]+)\"")
    found = {
        name
        for package in ("driver", "learner", "rollout_worker", "services")
        for path in (ROOT / package).rglob("*.py")
        for name in pattern.findall(path.read_text(encoding="utf-8"))
    }
    assert found == set(failpoints.POINTS)
