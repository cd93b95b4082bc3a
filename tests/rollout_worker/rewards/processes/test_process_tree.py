"""What a scorer has started ends with it, also where its parent is just ending."""

import os
import subprocess
import sys

import pytest

from rollout_worker.rewards.processes import process_tree
from tests.deadlines import HANG_S

MARK = "TANDEM_TEST_MARK"
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux has the tree")


def sleeper(mark):
    code = "print(flush=True); import time; time.sleep(3600)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, MARK: mark}
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_an_orphan_that_comes_while_its_parent_ends_is_waited_for(monkeypatch):
    """A parent that ends has no memory any more, and its children still: it is played here."""
    stray, other = sleeper("mine"), sleeper("another's")
    found = process_tree.orphans_with
    ending = [True, True]
    monkeypatch.setattr(process_tree, "orphans_with", lambda *mark: [] if ending else found(*mark))
    monkeypatch.setattr(process_tree, "has_ending_child", lambda: bool(ending) and ending.pop())
    try:
        process_tree.end_orphans_with(MARK, "mine", HANG_S)
        assert stray.poll() is not None and other.poll() is None
    finally:
        for process in (stray, other):
            process.kill()
            process.wait(HANG_S)


def test_children_that_live_or_have_ended_are_not_ending():
    alive = sleeper("mine")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    try:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
        assert not process_tree.has_ending_child()
        assert [one.pid for one in process_tree.orphans_with(MARK, "mine")] == [alive.pid]
    finally:
        alive.kill()
        alive.wait(HANG_S)
        ended.wait(HANG_S)
