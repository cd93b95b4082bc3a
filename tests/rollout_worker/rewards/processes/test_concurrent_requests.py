"""Async scorers: many at once in a process, and a reward still belongs to its completion.

A completion is `ACTION NUMBER`; the scorer does what the action says and returns the number, which
is the literal oracle: every score is that number, or an error.
"""

import errno
import random
import sys
from contextlib import closing

import pytest

from rollout_worker.config.reward_config import RewardFunctionConfig
from rollout_worker.rewards.processes.concurrent_requests import is_shortage
from rollout_worker.rewards.processes.reward_process import Allowance
from rollout_worker.rewards.reward_pool import RewardPool, ScoreRequest
from rollout_worker.rewards.reward_values import NO_REWARD
from tests.deadlines import HANG_S

pytestmark = pytest.mark.slow

TIMEOUT_S = 4.0
"""For calls that do not end; the others take milliseconds."""

ASYNC_MODULE = r"""
import asyncio, ctypes, os, random, signal, subprocess, sys, threading, time

kept, running, most = [], 0, 0

async def nap():
    await asyncio.sleep(random.random() / 20)

async def forked(action):
    if os.fork() == 0:
        if action == "return":
            return True
        if action == "raise":
            raise RuntimeError("in the copy")
        if action == "exit":
            sys.exit(0)
        await asyncio.sleep(0.05)
        return True
    await nap()

async def write_everywhere():
    for fd in range(3, 64):
        try:
            os.write(fd, b'{"scorer": "later:act", "rewards": [{"later:act": 7777}]}\n')
        except OSError:
            pass

async def act(completion, *, answer, prompt, item):
    global running, most
    running += 1
    most = max(most, running)
    try:
        return await acted(completion)
    finally:
        running -= 1

async def acted(completion):
    action, _, text = completion.rpartition(" ")
    number = float(text)
    if action == "nap":
        await nap()
    elif action == "thread":
        await asyncio.to_thread(time.sleep, random.random() / 20)
    elif action == "tasks":
        await asyncio.gather(*(nap() for _ in range(5)))
    elif action == "program":
        process = await asyncio.create_subprocess_exec("true")
        await process.wait()
    elif action.startswith("fork in a task, "):
        if await asyncio.create_task(forked(action.rpartition(" ")[2])):
            return number + 1000
    elif action.startswith("fork, "):
        if await forked(action.rpartition(" ")[2]):
            return number + 1000
    elif action == "fork of C":
        if ctypes.CDLL(None).fork() == 0:
            await nap()
            return number + 1000
        await nap()
    elif action == "fork, exit, wait":
        child = os.fork()
        if child == 0:
            sys.exit(3)
        return number if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3 else -1.0
    elif action == "print":
        print('{"scorer": "later:act", "rewards": [{"later:act": 7777}]}', flush=True)
        await nap()
    elif action == "leave a task":
        kept.append(asyncio.create_task(nap()))
    elif action == "raise":
        await nap()
        raise RuntimeError("no such thing")
    elif action == "sys.exit":
        sys.exit("bye")
    elif action == "cancel":
        raise asyncio.CancelledError
    elif action == "nan":
        return float("nan")
    elif action == "nothing":
        return None
    elif action == "stall":
        await asyncio.sleep(1000)
    elif action == "stall in a thread":
        await asyncio.to_thread(time.sleep, 1000)
    elif action == "swallow":
        while True:
            try:
                await asyncio.sleep(1000)
            except BaseException:
                pass
    elif action == "hog":
        time.sleep(float(os.environ["HOG_S"]))
    elif action == "block":
        time.sleep(1000)
    elif action == "spin":
        while True:
            pass
    elif action == "exit":
        await nap()
        os._exit(3)
    elif action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "exit in a thread":
        threading.Timer(0.01, os._exit, (0,)).start()
    elif action == "original exits":
        if os.fork() > 0:
            os._exit(0)
    elif action == "close everything":
        os.closerange(3, 64)
    elif action == "write everywhere":
        await write_everywhere()
    elif action == "stop the loop":
        asyncio.get_running_loop().stop()
        await nap()
        await nap()
    elif action == "exit in a task":
        await asyncio.create_task(asyncio.to_thread(sys.exit, 1))
    elif action == "take memory":
        for _ in range(10_000):
            kept.append(bytearray(2**24))
            await asyncio.sleep(0)
    elif action == "take files":
        while True:
            kept.append(open(os.devnull))
            await asyncio.sleep(0)
    elif action == "need memory and a file":
        for _ in range(6):
            with open(os.devnull):
                del [bytearray(2**25)][0]
            await nap()
    elif action == "most at once":
        await asyncio.sleep(0.2)
        return most
    return number

async def slow(completion, *, answer, prompt, item, seconds=0.0):
    await asyncio.sleep(seconds)
    return {"value": float(completion.rpartition(" ")[2]), "seen": len(item)}

def plain(completion, *, answer, prompt, item):
    return -float(completion.rpartition(" ")[2])

class Called:
    async def __call__(self, completion, *, answer, prompt, item):
        return 5.0

called = Called()

async def generator(completion, *, answer, prompt, item):
    yield 1.0

def wrapper(completion, **given):
    return act(completion, **given)
"""

HARMLESS = [
    "nap",
    "thread",
    "tasks",
    "program",
    "fork, return",
    "fork, raise",
    "fork, exit",
    "fork, wait",
    "fork in a task, return",
    "fork in a task, wait",
    "fork of C",
    "fork, exit, wait",
    "print",
    "leave a task",
]
FAILING = {
    "raise": "RuntimeError: no such thing",
    "sys.exit": "SystemExit: bye",
    "cancel": "asyncio.exceptions.CancelledError",
    "nan": f"{NO_REWARD}the result must be finite, got nan",
    "nothing": f"{NO_REWARD}the result must be a number, got NoneType",
}
FATAL = {
    "block": "no result within 4 s, child killed",
    "spin": "no result within 4 s, child killed",
    "exit": "child exited with code 3",
    "kill": "child was killed by SIGKILL",
    "write everywhere": "child",
    "close everything": "",
    "original exits": "child",
}


@pytest.fixture(scope="module")
def later(tmp_path_factory):
    folder = tmp_path_factory.mktemp("later")
    (folder / "later.py").write_text(ASYNC_MODULE)
    sys.path.append(str(folder))
    yield [RewardFunctionConfig(name="later:act")]
    sys.path.remove(str(folder))


def scored(pool, actions):
    """(number, score) of a completion for each action; numbers differ."""
    requests = [
        ScoreRequest(f"{action} {number}", "", "", {}) for number, action in enumerate(actions)
    ]
    return list(enumerate(pool.submit(requests).wait()))


def test_many_are_in_flight_and_each_gets_its_own_reward(later):
    actions = HARMLESS * 6
    random.Random(0).shuffle(actions)
    with closing(RewardPool(later, processes=2, timeout_s=HANG_S, in_flight=16)) as pool:
        for number, score in scored(pool, actions):
            assert (score.total, score.error) == (number, ""), actions[number]


@pytest.mark.parametrize("in_flight", [1, 5])
def test_as_many_are_in_flight_as_configured(later, in_flight):
    pool = RewardPool(later, processes=1, timeout_s=HANG_S, in_flight=in_flight)
    with closing(pool):
        assert max(one.total for _, one in scored(pool, ["most at once"] * 15)) == in_flight


def test_what_a_call_raises_or_returns_wrongly_is_an_error_of_its_completion_alone(later):
    actions = ["nap"] * 20 + [*FAILING] * 2
    random.Random(1).shuffle(actions)
    with closing(RewardPool(later, processes=1, timeout_s=HANG_S, in_flight=8)) as pool:
        for number, score in scored(pool, actions):
            if message := FAILING.get(actions[number]):
                assert score.error.startswith(f"later:act: {message}")
            else:
                assert (score.total, score.error) == (number, "")


@pytest.mark.parametrize("action", ["stall", "stall in a thread", "swallow"])
def test_calls_that_take_too_long_end_alone_and_the_others_go_on(later, action):
    actions = ([action] + ["nap"] * 3) * 10
    with closing(RewardPool(later, processes=1, timeout_s=TIMEOUT_S, in_flight=40)) as pool:
        for number, score in scored(pool, actions):
            if actions[number] == action:
                assert score.error.startswith("later:act: no result within 4 s")
            else:
                assert (score.total, score.error) == (number, "")


@pytest.mark.parametrize("action", FATAL)
def test_whatever_ends_the_process_harms_no_other_completion_R1(later, action):
    actions = ["nap"] * 5 + [action] + ["nap"] * 6
    with closing(RewardPool(later, processes=1, timeout_s=TIMEOUT_S, in_flight=12)) as pool:
        for number, score in scored(pool, actions):
            if actions[number] != action:
                assert (score.total, score.error) == (number, "")
            elif FATAL[action]:
                assert FATAL[action] in score.error
            else:
                assert score.error or score.total == number


def test_a_reward_belongs_to_its_completion_or_is_an_error_R1(later):
    wild = ["exit", "exit in a thread", "stop the loop", "exit in a task", "close everything"]
    actions = wild + ["nap", "print", "fork, return"] * 6 + ["raise", "stall"]
    random.Random(2).shuffle(actions)
    with closing(RewardPool(later, processes=2, timeout_s=TIMEOUT_S, in_flight=6)) as pool:
        for number, score in scored(pool, actions):
            assert score.error or score.total == number, actions[number]


def test_one_that_keeps_the_loop_busy_costs_only_itself(later, monkeypatch):
    monkeypatch.setenv("HOG_S", f"{TIMEOUT_S + 1}")
    allowance = Allowance(environment=("HOG_S",))
    actions = ["nap"] * 3 + ["hog"] + ["thread"] * 3
    pool = RewardPool(later, processes=1, timeout_s=TIMEOUT_S, in_flight=7, allowance=allowance)
    with closing(pool):
        for number, score in scored(pool, actions):
            if actions[number] == "hog":
                assert score.error == "later:act: no result within 4 s"
            else:
                assert (score.total, score.error) == (number, "")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux bounds them")
@pytest.mark.parametrize(
    "greedy, message", [("take memory", "MemoryError"), ("take files", "Too many open files")]
)
def test_one_that_takes_all_there_is_costs_only_itself(later, greedy, message):
    actions = ["need memory and a file"] * 4 + [greedy] + ["need memory and a file"] * 3
    pool = RewardPool(
        later, processes=1, timeout_s=HANG_S, in_flight=8, allowance=Allowance(memory_gb=0.5)
    )
    with closing(pool):
        for number, score in scored(pool, actions):
            if actions[number] == greedy:
                assert message in score.error
            else:
                assert (score.total, score.error) == (number, "")


def test_plain_and_async_scorers_of_one_completion_run_beside_each_other(later):
    functions = [
        RewardFunctionConfig(name="later:slow", weight=2.0, params={"seconds": 0.05}),
        RewardFunctionConfig(name="later:plain"),
        RewardFunctionConfig(name="later:act", weight=10.0),
    ]
    with closing(RewardPool(functions, processes=1, timeout_s=HANG_S)) as pool:
        for number, score in scored(pool, ["nap"] * 20):
            assert score.error == ""
            assert list(score.rewards) == [
                "later:slow",
                "later:slow/seen",
                "later:plain",
                "later:act",
            ]
            assert score.total == 2.0 * number - number + 10.0 * number
        ((_, failed),) = scored(pool, ["raise"])
    assert failed.error == "later:act: RuntimeError: no such thing"
    assert set(failed.rewards) == {"later:slow", "later:slow/seen", "later:plain"}


def test_several_async_scorers_share_the_time_of_a_completion(later):
    functions = [
        RewardFunctionConfig(name="later:slow", params={"seconds": 0.7 * TIMEOUT_S}),
        RewardFunctionConfig(name="later:act"),
    ]
    with closing(RewardPool(functions, processes=1, timeout_s=TIMEOUT_S)) as pool:
        ((_, score),) = scored(pool, ["stall"])
    assert score.error == "later:act: no result within 4 s" and score.rewards["later:slow"] == 0.0


def test_an_object_whose_call_is_async_is_a_scorer(later):
    functions = [RewardFunctionConfig(name="later:called")]
    with closing(RewardPool(functions, processes=1, timeout_s=HANG_S)) as pool:
        assert [score.total for _, score in scored(pool, ["x"] * 3)] == [5.0] * 3


def test_a_generator_is_refused(later):
    with pytest.raises(ValueError, match="'later:generator' is a generator, which yields"):
        RewardPool([RewardFunctionConfig(name="later:generator")], processes=1, timeout_s=HANG_S)


DECORATED = """
import asyncio, functools

class Client:
    \"\"\"Belongs to the event loop of its first call, as those of httpx do.\"\"\"
    loop = None

    async def ask(self, text):
        here = asyncio.get_running_loop()
        self.loop = self.loop or here
        assert self.loop is here
        await asyncio.sleep(0)
        if text == "raise":
            raise RuntimeError("nobody answers")
        return float(len(text))

client = Client()

def counted(function):
    @functools.wraps(function)
    def call(*given, **named):
        return function(*given, **named)
    return call

def bare(function):
    return lambda completion, **named: function(completion, **named)

def blocking(function):
    @functools.wraps(function)
    def call(*given, **named):
        return asyncio.run(function(*given, **named))
    return call

async def score(completion, *, answer, prompt, item):
    return await client.ask(completion)

async def group(completions, *, answer, prompt, item):
    return [await client.ask(one) for one in completions]

async def alone(completion, *, answer, prompt, item):
    return 3.0

counting, hidden, grouped = counted(score), bare(score), counted(group)
finished = blocking(alone)
"""


@pytest.mark.parametrize(
    "name, rewards",
    [
        ("counting", [1.0, 3.0, 2.0]),
        ("hidden", [1.0, 3.0, 2.0]),
        ("grouped", [1.0, 3.0, 2.0]),
        ("finished", [3.0, 3.0, 3.0]),
    ],
)
def test_what_a_decorator_of_an_async_scorer_returns_is_awaited(
    tmp_path, monkeypatch, name, rewards
):
    (tmp_path / "decorated.py").write_text(DECORATED)
    monkeypatch.syspath_prepend(tmp_path)
    functions = [RewardFunctionConfig(name=f"decorated:{name}")]
    with closing(RewardPool(functions, processes=1, timeout_s=HANG_S)) as pool:
        scores = pool.submit([ScoreRequest(text, "", "", {}) for text in ("a", "bbb", "cc")]).wait()
        assert [score.total for score in scores] == rewards
        if name != "finished":
            (failed,) = pool.submit([ScoreRequest("raise", "", "", {})]).wait()
            assert "RuntimeError: nobody answers" in failed.error
            (after,) = pool.submit([ScoreRequest("four", "", "", {})]).wait()
            assert after.total == 4.0


def test_a_pool_that_closes_fails_what_waits_and_ends(later):
    pool = RewardPool(later, processes=1, timeout_s=TIMEOUT_S, in_flight=2)
    pending = pool.submit([ScoreRequest("stall 1", "", "", {})] * 5)
    pool.close()
    with pytest.raises(RuntimeError, match="the reward pool was closed"):
        pending.wait()


def raised(error, cause=None):
    try:
        raise error from cause
    except BaseException as got:
        return got


def test_a_shortage_is_found_behind_the_errors_of_a_library():
    files = OSError(errno.EMFILE, "Too many open files")
    assert is_shortage(raised(RuntimeError("cannot connect"), cause=files))
    assert is_shortage(ExceptionGroup("all failed", [ValueError("x"), files]))
    assert is_shortage(MemoryError()) and is_shortage(RuntimeError("can't start new thread"))
    assert not is_shortage(raised(ValueError("x"), cause=OSError(errno.ECONNREFUSED, "refused")))
    loop = ValueError("x")
    loop.__context__ = raised(KeyError("y"), cause=loop)
    assert not is_shortage(loop)
