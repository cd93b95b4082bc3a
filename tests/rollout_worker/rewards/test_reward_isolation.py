"""Whatever a scorer does to its process, a reward belongs to its completion or is an error.

A completion is `ACTION NUMBER`; the scorer does what the action says and returns the number.
"""

import random
import sys
from contextlib import closing

import pytest

from rollout_worker.config.reward_config import RewardFunctionConfig
from rollout_worker.rewards.reward_pool import RewardPool, ScoreRequest
from tests.deadlines import HANG_S

HASTY_S = 3.0
"""For actions after which no reply can come."""

WILD_MODULE = r"""
import ctypes, json, multiprocessing, os, subprocess, sys, threading, time

FORKS = multiprocessing.get_context("fork")

def forge(number):
    # What a line of output would look like if it got into the protocol.
    return [
        json.dumps({"rewards": {"wild:act": number + 1000}}),
        '{"rewards": {"wild:act": Infinity}}',
        '{"scorer": "wild:act", "rewards": {"wild:act": 7777}}',
        "[]", "5", '{"error": {}}', "noise",
    ]

def write_everywhere(text):
    for fd in range(3, 64):
        try:
            os.write(fd, text.encode() + b"\n")
        except OSError:
            pass

def act(completion, *, answer, prompt, item):
    action, _, text = completion.rpartition(" ")
    number = float(text)
    if action == "fork, exit":
        if os.fork() == 0:
            sys.exit(0)
    elif action == "fork, exit, wait":
        child = os.fork()
        if child == 0:
            sys.exit(3)
        return number if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3 else -1.0
    elif action == "fork, return":
        if os.fork() == 0:
            return number + 1000
    elif action == "fork, raise":
        if os.fork() == 0:
            raise RuntimeError("in the copy")
    elif action == "fork, exec fails":
        if os.fork() == 0:
            os.execvp("/no/such/program", ["program"])
    elif action == "fork, read":
        if os.fork() == 0:
            for fd in range(3, 64):
                try:
                    os.read(fd, 100)
                except OSError:
                    pass
            write_everywhere(forge(number)[0])
            os._exit(0)
    elif action == "fork of C":
        if ctypes.CDLL(None).fork() == 0:
            return number + 1000
    elif action == "fork of C, exit":
        if ctypes.CDLL(None).fork() == 0:
            sys.exit(0)
    elif action == "fork in a thread":
        thread = threading.Thread(target=os.fork)
        thread.start()
        thread.join()
    elif action == "process":
        process = FORKS.Process(target=print, args=(forge(number)[0],))
        process.start()
        process.join()
    elif action == "program":
        subprocess.run(["echo", forge(number)[0]], check=True)
    elif action == "program fails":
        try:
            subprocess.run(["/no/such/program"], preexec_fn=lambda: None)
        except FileNotFoundError:
            pass
    elif action == "print":
        print("\n".join(forge(number)), flush=True)
        os.write(1, forge(number)[0].encode() + b"\n")
    elif action == "print later":
        threading.Timer(0.01, print, forge(number)).start()
    elif action == "close standard streams":
        os.closerange(0, 3)
    elif action == "write everywhere":
        write_everywhere(forge(number)[int(number) % 7])
    elif action == "write everywhere later":
        threading.Timer(0.01, write_everywhere, forge(number)[:1]).start()
    elif action == "close everything":
        os.closerange(3, 64)
    elif action == "close everything, open":
        os.closerange(3, 64)
        for _ in range(8):
            os.open(__file__ + ".lines", os.O_RDWR | os.O_CREAT)
    elif action == "exit in a thread":
        threading.Timer(0.01 * (number % 3), os._exit, (0,)).start()
    elif action == "original exits":
        if os.fork() > 0:
            os._exit(0)
    elif action == "exit":
        os._exit(0)
    return number
"""

HARMLESS = [
    "plain",
    "fork, exit",
    "fork, exit, wait",
    "fork, return",
    "fork, raise",
    "fork, exec fails",
    "fork, read",
    "fork of C",
    "fork of C, exit",
    "fork in a thread",
    "process",
    "program",
    "program fails",
    "print",
    "print later",
]
FATAL = [
    "close standard streams",
    "write everywhere",
    "write everywhere later",
    "close everything",
    "close everything, open",
    "exit in a thread",
    "original exits",
    "exit",
]


@pytest.fixture(scope="module")
def wild(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wild")
    (folder / "wild.py").write_text(WILD_MODULE)
    sys.path.append(str(folder))
    yield [RewardFunctionConfig(name="wild:act")]
    sys.path.remove(str(folder))


def scored(pool, actions):
    """(number, score) of a completion for each action; numbers differ."""
    requests = [
        ScoreRequest(f"{action} {number}", "", "", {}) for number, action in enumerate(actions)
    ]
    return list(enumerate(pool.submit(requests).wait()))


def test_forks_threads_and_output_of_scorers_cost_no_completion_its_reward_R1(wild):
    actions = HARMLESS * 4
    random.Random(0).shuffle(actions)
    with closing(RewardPool(wild, processes=2, timeout_s=HANG_S)) as pool:
        for number, score in scored(pool, actions):
            assert (score.total, score.error) == (number, ""), actions[number]


def test_a_reward_belongs_to_its_completion_or_is_an_error_R1(wild):
    actions = FATAL + ["plain", "fork, exit", "print"] * 4
    random.Random(1).shuffle(actions)
    with closing(RewardPool(wild, processes=2, timeout_s=HASTY_S)) as pool:
        for number, score in scored(pool, actions):
            assert score.error or score.total == number, actions[number]


def test_a_scorer_that_forks_beside_another_one_does_not_shift_the_replies_R1(wild):
    functions = [*wild, RewardFunctionConfig(name="format", params={"pattern": ".*[02468]"})]
    with closing(RewardPool(functions, processes=1, timeout_s=HANG_S)) as pool:
        for number, score in scored(pool, ["fork, exit", "fork, return"] * 4):
            assert score.error == ""
            assert score.rewards == {"wild:act": number, "format": float(number % 2 == 0)}
