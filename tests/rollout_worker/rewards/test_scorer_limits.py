"""What scorers may take of the host: memory, output, processes that outlive them, metric names."""

import os
import pathlib
import signal
import subprocess
import sys
from contextlib import closing, suppress

import psutil
import pytest

from rollout_worker.config.reward_config import RewardConfig, RewardFunctionConfig
from rollout_worker.rewards.processes.reward_process import Allowance
from rollout_worker.rewards.processes.scorer_output import ScorerOutput
from rollout_worker.rewards.reward_pool import RewardPool, ScoreRequest
from rollout_worker.rewards.reward_values import MOST_VARIANTS
from tests.deadlines import HANG_S, wait_until

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux bounds them")

GREEDY_MODULE = r"""
import ctypes, json, mmap, os, signal, subprocess, sys, time

kept = []

def sleeper():
    # Says its pid, closes what it has inherited, and would stay for an hour.
    code = "import os, time; print(os.getpid(), flush=True); os.close(1); os.close(2)"
    code += "; time.sleep(3600)"
    return [sys.executable, "-c", code]

def act(completion, *, answer, prompt, item):
    action, _, text = completion.partition(" ")
    if action == "allocate":
        block = int(text) * 2**20
        while True:
            kept.append(bytearray(block))
    elif action == "allocate-once":
        kept.append(bytearray(int(text) * 2**20))
        kept.clear()
    elif action == "malloc":
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        while True:
            if not libc.malloc(ctypes.c_size_t(2**24)):
                raise MemoryError("malloc")
    elif action == "fork-allocate":
        child = os.fork()
        if child == 0:
            act(f"allocate {text}", answer="", prompt="", item={})
        return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)
    elif action == "print":
        line = "x" * 1023 + "\n"
        for _ in range(int(text) * 1024):
            sys.stdout.write(line)
    elif action == "print-secret":
        print(f"the key is {os.environ['JUDGE_KEY']}, and sk-zq81heldback4471aa02")
    elif action == "leave":
        for kind in ("setsid", "double"):
            child = subprocess.Popen(sleeper(), stdout=subprocess.PIPE, start_new_session=True)
            pids = [child.stdout.readline().decode().strip()]
            with open(text, "a") as file:
                file.write(pids[0] + "\n")
        child = os.fork()
        if child == 0:
            os.setsid()
            if os.fork() == 0:
                with open(text, "a") as file:
                    file.write(f"{os.getpid()}\n")
                    file.flush()
                for fd in range(3):
                    os.close(fd)
                time.sleep(3600)
            os._exit(0)
        os.waitpid(child, 0)
        while open(text).read().count("\n") < 3:
            time.sleep(0.01)
    elif action == "leave-and-die":
        act(f"leave {text}", answer="", prompt="", item={})
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "leave-and-kill-parent":
        act(f"leave {text}", answer="", prompt="", item={})
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(3600)
    elif action == "many-names":
        return {"value": 1.0} | {f"v{number}": 1.0 for number in range(int(text))}
    elif action == "new-name":
        return {"value": 1.0, f"of-{text}": 1.0}
    elif action == "environ":
        name, _, value = text.partition("=")
        return float(name in os.environ and value in ("", os.environ[name]))
    return 1.0
"""


@pytest.fixture(scope="module")
def greedy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("greedy")
    (folder / "greedy.py").write_text(GREEDY_MODULE)
    sys.path.append(str(folder))
    yield [RewardFunctionConfig(name="greedy:act")]
    sys.path.remove(str(folder))


def score(pool, *completions):
    return pool.submit([ScoreRequest(text, "", "", {}) for text in completions]).wait()


@linux
@pytest.mark.parametrize("action", ["allocate 16", "malloc", "allocate 1"])
def test_a_scorer_that_allocates_without_end_fails_alone_R15(greedy, action):
    allowance = Allowance(memory_gb=0.5)
    with closing(RewardPool(greedy, processes=1, timeout_s=HANG_S, allowance=allowance)) as pool:
        first, bad, last = score(pool, "plain", action, "plain")
        assert "MemoryError" in bad.error
        assert (first.total, last.total, last.error) == (1.0, 1.0, "")


@linux
def test_a_scorer_gets_no_more_memory_than_its_bound_R15(greedy):
    """Tried with what the host has: without a bound it would get it."""
    allowance = Allowance(memory_gb=0.5)
    with closing(RewardPool(greedy, processes=1, timeout_s=HANG_S, allowance=allowance)) as pool:
        within, beyond = score(pool, "allocate-once 128", "allocate-once 640")
        assert (within.total, within.error) == (1.0, "") and "MemoryError" in beyond.error


@linux
def test_what_a_scorer_forks_has_the_same_bound(greedy):
    allowance = Allowance(memory_gb=0.5)
    with closing(RewardPool(greedy, processes=1, timeout_s=HANG_S, allowance=allowance)) as pool:
        assert score(pool, "fork-allocate 16")[0].total == 1.0


@linux
def test_numpy_and_sympy_fit_into_the_least_memory(tmp_path, monkeypatch):
    (tmp_path / "heavy.py").write_text(
        "import numpy, sympy\n"
        "def act(completion, **_):\n"
        "    square = numpy.ones((512, 512)) @ numpy.ones((512, 512))\n"
        "    return float(square[0, 0]) if sympy.Integer(2) ** 2 == 4 else 0.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    least = Allowance(memory_gb=0.5)
    functions = [RewardFunctionConfig(name="heavy:act")]
    with closing(RewardPool(functions, processes=1, timeout_s=HANG_S, allowance=least)) as pool:
        assert score(pool, "x")[0].total == 512.0


def test_output_is_capped_and_costs_no_scorer_its_time_R15(greedy, capfd):
    with closing(RewardPool(greedy, processes=1, timeout_s=HANG_S)) as pool:
        pool.output = ScorerOutput(limit_bytes=100_000)
        pool._threads._threads[0].kill_child()
        assert [one.total for one in score(pool, "print 20", "plain")] == [1.0, 1.0]
    shown = capfd.readouterr().err
    assert 90_000 <= len(shown) < 200_000
    assert shown.count("scorers print more than is shown: at most 100000 bytes at once") == 1


def test_what_scorers_print_is_shown_again_after_a_while(capfd):
    now = [0.0]
    output = ScorerOutput(limit_bytes=4096, now=lambda: now[0])

    def printed(text: str) -> str:
        read, write = os.pipe()
        os.write(write, text.encode())
        os.close(write)
        output.follow(os.fdopen(read, "rb", 0)).join(HANG_S)
        return capfd.readouterr().err

    line = 99 * "x" + "\n"
    assert printed(40 * line) == 40 * line
    assert "more than is shown" in printed(10 * line) and printed(10 * line) == ""
    now[0] += 0.1
    assert printed(2 * line) == line
    now[0] += 60.0
    assert printed(30 * line) == 30 * line
    assert "more than is shown" in printed(40 * line), "it is said anew"


def test_output_is_shown_without_secrets_R12(greedy, capfd, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "geheim-und-lang")
    allowance = Allowance(environment=("JUDGE_KEY",))
    with closing(RewardPool(greedy, processes=1, timeout_s=HANG_S, allowance=allowance)) as pool:
        assert score(pool, "print-secret")[0].error == ""
    assert "the key is <JUDGE_KEY>, and <secret>" in capfd.readouterr().err


def test_scorers_see_no_secret_of_the_environment_R12(greedy, monkeypatch):
    for name in ("STRIPE_KEY", "OPENAI_KEY", "SOME_SETTING"):
        monkeypatch.setenv(name, "value-of-it")
    monkeypatch.setenv("DATABASE_URL", "postgres://me:geheim123@db/x")
    names = ("STRIPE_KEY", "OPENAI_KEY", "DATABASE_URL", "SOME_SETTING", "PATH")
    with closing(RewardPool(greedy, processes=1, timeout_s=HANG_S)) as pool:
        seen = score(pool, *(f"environ {name}" for name in names))
    assert [one.total for one in seen] == [0.0, 0.0, 0.0, 0.0, 1.0]
    listed = Allowance.of(RewardConfig(environment=("OPENAI_KEY",)))
    with closing(RewardPool(greedy, processes=1, timeout_s=HANG_S, allowance=listed)) as pool:
        seen = score(pool, *(f"environ {name}" for name in names))
    assert [one.total for one in seen] == [0.0, 1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("of_worker", ["cuda", "tpu", None])
def test_scorers_leave_the_devices_to_their_worker(greedy, monkeypatch, of_worker):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if of_worker:
        monkeypatch.setenv("JAX_PLATFORMS", of_worker)
    with closing(RewardPool(greedy, processes=1, timeout_s=HANG_S)) as pool:
        assert score(pool, "environ JAX_PLATFORMS=cpu")[0].total == 1.0


@linux
@pytest.mark.parametrize("action", ["leave", "leave-and-die", "leave-and-kill-parent"])
def test_processes_that_scorers_leave_end_with_the_pool_R15(greedy, tmp_path, action):
    pids = tmp_path / "pids"
    with closing(RewardPool(greedy, processes=1, timeout_s=HANG_S)) as pool:
        score(pool, f"{action} {pids}")
        left = {int(pid) for pid in pids.read_text().split()}
        assert len(left) >= 3  # it is tried a second time where the process died
    wait_until(lambda: not any(map(is_alive, left)), "the processes to end")


def ended_children() -> set[psutil.Process]:
    """The children of this process that have ended and that nobody has collected."""
    found = set()
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            found |= {process} if process.status() == psutil.STATUS_ZOMBIE else set()
    return found


@linux
def test_a_scorer_that_kills_its_guardian_leaves_nothing_to_collect(greedy, tmp_path):
    before = ended_children()
    with closing(RewardPool(greedy, processes=1, timeout_s=HANG_S)) as pool:
        score(pool, *(f"leave-and-kill-parent {tmp_path / str(n)}" for n in range(3)))
    assert ended_children() <= before


@linux
def test_they_end_with_a_worker_that_is_killed_too_R15(greedy, tmp_path):
    pids = tmp_path / "pids"
    module = pathlib.Path(sys.modules[RewardPool.__module__].__file__).parents[2]
    code = (
        "from rollout_worker.config.reward_config import RewardFunctionConfig\n"
        "from rollout_worker.rewards.reward_pool import RewardPool, ScoreRequest\n"
        "pool = RewardPool([RewardFunctionConfig(name='greedy:act')], processes=1, timeout_s=900)\n"
        f"pool.submit([ScoreRequest('leave {pids}', '', '', {{}})]).wait()\n"
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    paths = os.pathsep.join([str(module), *(p for p in sys.path if "greedy" in p)])
    env = {**os.environ, "PYTHONPATH": paths}
    worker = subprocess.run([sys.executable, "-c", code], env=env, timeout=HANG_S)
    assert worker.returncode == -signal.SIGKILL
    left = {int(pid) for pid in pids.read_text().split()}
    assert len(left) == 3
    wait_until(lambda: not any(map(is_alive, left)), "the processes to end")


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_names_of_values_are_bounded_R15(greedy):
    with closing(RewardPool(greedy, processes=1, timeout_s=HANG_S)) as pool:
        (too_many,) = score(pool, "many-names 500")
        assert "at most 64 values have a name, got 501" in too_many.error
        names = set()
        for scored in score(pool, *(f"new-name {number}" for number in range(200))):
            assert (scored.total, scored.error) == (1.0, "")
            names |= set(scored.rewards)
        assert len(names - {"greedy:act"}) == MOST_VARIANTS
        (long,) = score(pool, f"new-name {'x' * 200}")
        assert "at most 100 characters" in long.error
