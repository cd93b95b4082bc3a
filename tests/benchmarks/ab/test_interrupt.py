"""A comparison that is interrupted, in real processes: nothing of it stays behind."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.ab import interrupt
from tests.benchmarks.ab.test_ab import write_rollouts
from tests.deadlines import HANG_S
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    return write_rollouts(folder, write_tiny_model(folder / "tiny", num_layers=1))


@pytest.fixture
def heeded_interrupt():
    """A shell's background job, such as a test run may be, hands on that SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded_interrupt")
@pytest.mark.parametrize(
    "number, whole_group, code",
    [(signal.SIGTERM, False, 143), (signal.SIGINT, False, 130), (signal.SIGINT, True, 130)],
)
def test_a_signal_leaves_neither_process_nor_folder(rollouts, tmp_path, number, whole_group, code):
    command = [sys.executable, "-m", "learner.ab", "--rollouts", str(rollouts)]
    started = subprocess.Popen(
        [*command, "--impl", "logits:xla,lean"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        child = wait_for_child(started.pid)
        (os.killpg if whole_group else os.kill)(started.pid, number)
        _, printed = started.communicate(timeout=HANG_S)
        assert started.returncode == code
        assert printed == "training logits:xla\ninterrupted\n"
        assert not pathlib.Path(f"/proc/{child}").exists()
        assert list(tmp_path.iterdir()) == []
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)


def wait_for_child(parent, timeout_s=HANG_S):
    """The process id of a worker that runs its own program."""
    children = pathlib.Path(f"/proc/{parent}/task/{parent}/children")
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        for child in children.read_text().split():
            if b"benchmarks.ab.worker" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        time.sleep(0.05)
    raise AssertionError("no worker was started")


def test_a_child_that_will_not_end_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(interrupt, "GRACE_S", 0.1)
    ready = tmp_path / "ready"
    stubborn = (
        "import os, pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"pathlib.Path({str(ready)!r}).write_text(str(os.getpid())); "
        f"os.kill({os.getpid()}, signal.SIGTERM); time.sleep(60)"
    )
    with (
        interrupt.Interrupts() as interrupts,
        pytest.raises(interrupt.ComparisonInterrupted) as found,
        interrupts.raised(),
    ):
        interrupts.run([sys.executable, "-c", stubborn])
    assert found.value.exit_code == 143
    assert not pathlib.Path(f"/proc/{ready.read_text()}").exists()
