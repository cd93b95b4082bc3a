"""Stacks of real processes: asked, stopped, crashed, and those that must not be asked."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from services.process.run_processes import read_processes, state_of
from services.process.stacks import KEPT, own_evidence, request_stacks
from tests.deadlines import HANG_S

REGISTERS = """
import ctypes, pathlib, sys, threading, time
from services.process.stacks import register
register(pathlib.Path(sys.argv[1]), sys.argv[2])
entered = threading.Event()
def waits_in_a_thread():
    entered.set()
    time.sleep(600)
threading.Thread(target=waits_in_a_thread, daemon=True).start()
entered.wait()
def main():
    print("ready", flush=True)
    {main}
main()
"""
WAITS = "time.sleep(600)"
BUSY = """
    def recurse(depth):
        return depth and recurse(depth - 1)
    def calls():
        while True:
            recurse(400)
    threads = [threading.Thread(target=calls, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    calls()
"""
HOLDS_THE_INTERPRETER_LOCK = "while True: ctypes.PyDLL(None).sleep(600)  # a signal ends one sleep"
READS_NULL = "ctypes.string_at(0)"


@pytest.fixture
def start(tmp_path):
    """Starts a process that registers as `name`, and waits until it has."""
    started = []

    def run(name: str, main: str, folder: pathlib.Path = tmp_path) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", REGISTERS.format(main=main), str(folder), name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout and process.stdout.readline() == b"ready\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_a_process_that_holds_the_interpreter_lock_tells_where_each_thread_is(tmp_path, start):
    process = start("learner", HOLDS_THE_INTERPRETER_LOCK)
    for times in (1, 2):
        [answer] = request_stacks(tmp_path, 10.0)
        assert answer.problem == ""
        assert (answer.process.name, answer.process.pid) == ("learner", process.pid)
        text = answer.process.path.read_text()
        assert text.count("in main\n") == text.count("in waits_in_a_thread\n") == times
    assert process.poll() is None, "it goes on"


def test_a_process_whose_threads_run_is_not_ended_by_the_question(tmp_path, start):
    """SIGUSR1 alone ended 10 of 10 such processes in 37 questions: it reads frames being freed."""
    process = start("learner", BUSY)
    for times in range(1, 11):
        [answer] = request_stacks(tmp_path, 2 * HANG_S)
        assert (answer.problem, process.poll()) == ("", None)
        assert answer.process.path.read_text().count("in waits_in_a_thread\n") == times
    assert not list(answer.process.path.parent.glob("*.ask"))


def test_a_stopped_process_is_named_with_its_state_and_delays_no_other(tmp_path, start):
    stopped, other = start("rollout-0", WAITS), start("rollout-1", WAITS)
    stopped.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
    problems = {a.process.pid: a.problem for a in request_stacks(tmp_path, 2.0)}
    assert problems[stopped.pid] == "no answer within 2 s, state T"
    assert problems[other.pid] == ""
    stopped.send_signal(signal.SIGCONT)
    [answer] = request_stacks(tmp_path, 2 * HANG_S, [stopped.pid])
    assert answer.problem == ""
    text = answer.process.path.read_text()
    assert text.count("in main\n") == 1, "what could not be answered in time was taken back"


def test_a_crash_leaves_its_stacks(tmp_path, start):
    assert start("rollout-1", READS_NULL).wait(HANG_S) == -signal.SIGSEGV
    [found] = read_processes(tmp_path)
    text = found.path.read_text()
    assert "Fatal Python error: Segmentation fault" in text and "in main\n" in text
    assert state_of(found) == ""
    assert request_stacks(tmp_path, 0.1)[0].problem == "is gone"


def test_a_later_process_of_the_same_pid_is_never_signalled(tmp_path, start):
    """SIGUSR1 would end it."""
    registered, later = start("learner", WAITS), subprocess.Popen(["sleep", "600"])
    try:
        [found] = read_processes(tmp_path)
        pids = f'"pid": {registered.pid}', f'"pid": {later.pid}'
        record = found.path.read_text().replace(*pids)
        found.path.write_text(record)
        assert request_stacks(tmp_path, 0.1)[0].problem == "is gone"
        # Even where the start agrees, it has no handler.
        started = pathlib.Path(f"/proc/{later.pid}/stat").read_text().split()[21]
        found.path.write_text(record.replace(f": {found.started},", f": {started},"))
        assert request_stacks(tmp_path, 0.1)[0].problem == "has no handler for SIGUSR1"
        assert later.poll() is None
    finally:
        later.kill()
        later.wait()


def test_a_process_on_another_host_is_left_alone(tmp_path, start):
    start("learner", WAITS)
    [found] = read_processes(tmp_path)
    found.path.write_text(found.path.read_text().replace(found.host, "elsewhere"))
    [answer] = request_stacks(tmp_path, 0.1)
    assert answer.problem == "is on elsewhere" and state_of(answer.process) == "?"


def test_where_the_folder_is_not_on_this_host_stacks_go_to_stderr(tmp_path, start):
    process = start("rollout-2", WAITS, tmp_path / "elsewhere")
    assert process.stderr and b"stacks of rollout-2 go to stderr" in process.stderr.readline()
    process.send_signal(signal.SIGUSR1)
    assert b"most recent call first" in process.stderr.readline()
    assert not (tmp_path / "elsewhere").exists()


def test_a_torn_file_is_no_process(tmp_path):
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "learner-1.txt").write_text('{"name": "lear')
    (tmp_path / "stacks" / "driver-2.txt").write_bytes(b"\xff\xfe")
    assert read_processes(tmp_path) == []


def test_a_long_run_does_not_keep_a_file_for_every_worker_that_it_had(tmp_path, start):
    start("learner", WAITS)
    [found] = read_processes(tmp_path)
    gone = found.path.read_text().replace(f'"started": {found.started}', '"started": 1')
    for index in range(KEPT + 10):
        (found.path.parent / f"rollout-{index}-1.txt").write_text(gone)
        os.utime(found.path.parent / f"rollout-{index}-1.txt", (index, index))
    (found.path.parent / "rollout-0-1.txt").write_text(gone + "Fatal Python error: Aborted\n")
    os.utime(found.path.parent / "rollout-0-1.txt", (0, 0))
    start("rollout-99", WAITS)
    left = {path.name for path in found.path.parent.iterdir()}
    assert {"rollout-0-1.txt", "rollout-10-1.txt", found.path.name} < left
    assert "rollout-9-1.txt" not in left and len(left) == KEPT + 3


def test_a_process_sends_its_own_stacks():
    sent = own_evidence()
    assert "test_a_process_sends_its_own_stacks" in sent["stacks.txt"]
    assert all(len(text) <= 2**16 for text in sent.values())
