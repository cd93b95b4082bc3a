"""Scoring in child processes: bounded, isolated, and never a silent zero.

All processes here are real. `play` is a scorer of a user's own module that does what the completion
says.
"""

import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from rollout_worker.config.reward_config import RewardFunctionConfig
from rollout_worker.rewards.reward_pool import RewardPool, ScoreRequest, validate_functions
from rollout_worker.rewards.reward_values import NO_REWARD
from tests.deadlines import HANG_S, wait_until

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[3]
TIMEOUT_S = 2.0
"""For a scorer that hangs; the good ones beside it take milliseconds."""

USER_MODULE = """
import ctypes, os, signal, subprocess, sys, time

def play(completion, *, answer, prompt, item):
    if completion == "spin":
        while True:
            pass
    if completion == "sleep":
        time.sleep(1000)
    if completion == "exit":
        os._exit(3)
    if completion == "crash":
        ctypes.string_at(0)
    if completion == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if completion == "raise":
        raise RuntimeError("no such thing")
    if completion == "sys.exit":
        sys.exit("bye")
    if completion == "nothing":
        return None
    if completion == "nan":
        return float("nan")
    if completion == "noise":
        print('{"rewards": {"mine:play": 99}}', flush=True)
        os.write(1, b"noise on the real descriptor\\n")
        subprocess.run(["echo", "noise of a process"])
        return float(sys.stdin.read() == "")
    if completion == "nap":
        time.sleep(0.5)
        return os.getpid()
    if completion == "pid":
        return os.getpid()
    if completion == "jax":
        return "jax" in sys.modules
    if completion == "spawn and spin":
        print(subprocess.Popen(["sleep", "1000"]).pid, file=open(item["file"], "w"), flush=True)
        time.sleep(1000)
    if completion == "change":
        item.clear()
        return 1.0
    return {"value": float(len(completion)), "answer": len(answer), "prompt": len(prompt)}

def see_item(completion, *, answer, prompt, item):
    return len(item)
"""


@pytest.fixture(scope="module")
def user_modules(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "mine.py").write_text(USER_MODULE)
    sys.path.append(str(folder))
    yield folder
    sys.path.remove(str(folder))


def function(name, **keys):
    return RewardFunctionConfig(name=name, **keys)


@pytest.fixture(scope="module")
def pool(user_modules):
    functions = [function("mine:play", weight=2.0), function("gsm8k_answer", weight=0.5)]
    with closing(RewardPool(functions, processes=2, timeout_s=HANG_S)) as pool:
        yield pool


@pytest.fixture(scope="module")
def hasty_pool(user_modules):
    """Kills a scorer that takes longer than TIMEOUT_S."""
    functions = [function("mine:play", weight=2.0), function("gsm8k_answer", weight=0.5)]
    with closing(RewardPool(functions, processes=2, timeout_s=TIMEOUT_S)) as pool:
        yield pool


def scores_of(pool, requests):
    return pool.submit(requests).wait()


def request(completion, **item):
    return ScoreRequest(completion, answer="3", prompt="how many?", item=item)


def process_is_gone(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"  # dead, and waiting for whoever adopted it


def test_rewards_are_named_and_weighted(pool):
    (score,) = scores_of(pool, [request("#### 3")])
    assert score.error == ""
    assert score.rewards == {
        "mine:play": 6.0,
        "mine:play/answer": 1.0,
        "mine:play/prompt": 9.0,
        "gsm8k_answer": 1.0,
        "gsm8k_answer/strict": 1.0,
        "gsm8k_answer/lenient": 1.0,
    }
    assert score.total == 2.0 * 6.0 + 0.5 * 1.0


def test_scores_come_in_the_order_of_the_items(pool):
    texts = ["x" * n for n in range(50)]
    assert [s.rewards["mine:play"] for s in scores_of(pool, [request(t) for t in texts])] == list(
        range(50)
    )
    assert scores_of(pool, []) == []


def test_scores_that_are_on_their_way_do_not_keep_anyone_waiting(hasty_pool):
    pool = hasty_pool
    slow, quick = pool.submit([request("x"), request("sleep")]), pool.submit([request("xx")])
    assert not slow.done
    assert [score.rewards["mine:play"] for score in quick.wait()] == [2.0]
    assert not slow.done, "of two processes one was free for it"
    first, second = slow.wait()
    assert slow.done and first.error == "" and "no result within 2 s" in second.error


@pytest.mark.parametrize(
    "completion, message",
    [
        ("spin", "mine:play: no result within 2 s, child killed"),
        ("sleep", "mine:play: no result within 2 s, child killed"),
        ("stop", "mine:play: no result within 2 s, child killed"),
        ("exit", "mine:play: child exited with code 3"),
        ("crash", "mine:play: child was killed by SIGSEGV"),
        ("kill", "mine:play: child was killed by SIGKILL"),
        ("raise", "mine:play: RuntimeError: no such thing"),
        ("sys.exit", "mine:play: SystemExit: bye"),
        (
            "nothing",
            f"mine:play: {NO_REWARD}the result must be a number, got NoneType",
        ),
        ("nan", f"mine:play: {NO_REWARD}the result must be finite, got nan"),
    ],
)
def test_a_failure_is_an_error_of_its_completion_alone(pool, hasty_pool, completion, message):
    pool = hasty_pool if "no result" in message else pool
    good = [request("#### 3")] * 6
    scores = scores_of(pool, [*good[:3], request(completion), *good[3:]])
    failed = scores.pop(3)
    assert failed.error.startswith(message)
    assert math.isnan(failed.total) and "mine:play" not in failed.rewards
    assert all(score.error == "" and score.total == 12.5 for score in scores)


def test_a_scorer_that_raises_leaves_the_others_their_say(pool):
    (score,) = scores_of(pool, [request("raise")])
    assert score.rewards["gsm8k_answer"] == 0.0 and math.isnan(score.total)


def test_output_of_a_scorer_cannot_forge_an_answer(pool):
    (score,) = scores_of(pool, [request("noise")])
    assert score.error == "" and score.rewards["mine:play"] == 1.0


def test_the_child_is_free_of_jax(pool):
    assert scores_of(pool, [request("jax")])[0].rewards["mine:play"] == 0.0


def test_a_scorer_cannot_change_what_the_next_one_sees(user_modules):
    functions = [function("mine:play"), function("mine:see_item")]
    with closing(RewardPool(functions, processes=1, timeout_s=HANG_S)) as pool:
        assert scores_of(pool, [request("change", a=1, b=2)])[0].rewards["mine:see_item"] == 2.0


@pytest.mark.parametrize(
    "text", ["", "\x00", "\ud800", "\u2028\n\r", "\U0001f600" * 10, "y" * 500_000]
)
def test_any_text_travels(pool, text):
    (score,) = scores_of(pool, [request(text, big="z" * 200_000)])
    assert score.error == "" and score.rewards["mine:play"] == len(text)


def test_a_stopped_child_that_reads_nothing_is_killed_too(user_modules):
    with closing(RewardPool([function("mine:play")], processes=1, timeout_s=TIMEOUT_S)) as pool:
        (score,) = scores_of(pool, [request("pid")])
        os.kill(int(score.rewards["mine:play"]), signal.SIGSTOP)
        # More than a pipe holds, so that already the request cannot be written.
        (score,) = scores_of(pool, [request("y" * 1_000_000)])
        assert "no result within 2 s" in score.error
        assert scores_of(pool, [request("ok")])[0].error == ""


def test_a_child_killed_between_completions_is_replaced_unnoticed(user_modules):
    with closing(RewardPool([function("mine:play")], processes=1, timeout_s=HANG_S)) as pool:
        pid = int(scores_of(pool, [request("pid")])[0].rewards["mine:play"])
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: process_is_gone(pid), f"end of child {pid}")
        (score,) = scores_of(pool, [request("pid")])
        assert score.error == "" and int(score.rewards["mine:play"]) != pid


def test_a_child_killed_from_outside_while_it_scores_costs_no_reward(user_modules):
    with closing(RewardPool([function("mine:play")], processes=1, timeout_s=HANG_S)) as pool:
        pid = int(scores_of(pool, [request("pid")])[0].rewards["mine:play"])
        pending = pool.submit([request("nap")])
        time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        (score,) = pending.wait()
    assert score.error == "" and score.total not in (0, pid)


def test_what_a_killed_scorer_started_is_killed_too(hasty_pool, tmp_path):
    file = tmp_path / "pid"
    (score,) = scores_of(hasty_pool, [request("spawn and spin", file=str(file))])
    assert "no result within" in score.error
    wait_until(lambda: process_is_gone(int(file.read_text())), "end of the scorer's own process")


def test_a_reward_is_the_same_from_any_thread(pool):
    expected = scores_of(pool, [request("#### 3")])
    with ThreadPoolExecutor(4) as threads:
        batches = list(
            threads.map(lambda batch: scores_of(pool, batch), [[request("#### 3")] * 8] * 12)
        )
    assert all(score == expected[0] for batch in batches for score in batch)


def test_the_child_outlives_the_thread_that_asked(user_modules):
    with closing(RewardPool([function("mine:play")], processes=1, timeout_s=HANG_S)) as pool:
        pids = []
        for _ in range(2):
            ask = lambda: pids.append(scores_of(pool, [request("pid")])[0].rewards["mine:play"])
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join(HANG_S)
        assert len(pids) == 2 and pids[0] == pids[1]


@pytest.mark.shared
@pytest.mark.parametrize("case_id", ["A01", "A02", "A03", "A05", "A06", "A08"])
def test_answer_case_from_four_threads(pool, cases, case_id):
    items = cases("answers")[case_id]["items"]

    def score(item):
        gold = item.get("gold", item.get("gold_solution"))
        (got,) = scores_of(pool, [ScoreRequest(item["response"], gold, "", {})])
        assert got.error == ""
        return got.rewards

    with ThreadPoolExecutor(4) as threads:
        for item, rewards in zip(items, threads.map(score, items), strict=True):
            for column, variant in [("strict", "strict"), ("flexible", "lenient")]:
                expected = 0 if item[column] == "documented" else item[column]
                assert rewards[f"gsm8k_answer/{variant}"] == expected


def test_math_verify_is_bounded_from_outside():
    with closing(RewardPool([function("math_verify")], processes=1, timeout_s=5)) as pool:
        slow = ScoreRequest("\\boxed{9^{9^{9^{9^{9}}}}}", "3", "", {})
        bad, good = scores_of(pool, [slow, ScoreRequest("\\boxed{3}", "3", "", {})])
        assert bad.error or bad.total == 0.0
        assert good.error == "" and good.total == 1.0


def test_children_end_with_the_pool(user_modules):
    with closing(RewardPool([function("mine:play")], processes=2, timeout_s=HANG_S)) as pool:
        pids = {int(s.rewards["mine:play"]) for s in scores_of(pool, [request("pid")] * 20)}
    assert all(map(process_is_gone, pids))
    pool.close()
    with pytest.raises(RuntimeError, match="the reward pool is closed"):
        scores_of(pool, [request("x")])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")
@pytest.mark.parametrize("completion", ["idle", "spin"])
def test_children_die_with_a_parent_that_is_killed(user_modules, completion):
    script = f"""
        import os, signal, sys, threading, time
        sys.path += [{str(ROOT)!r}, {str(user_modules)!r}]
        from rollout_worker.config.reward_config import RewardFunctionConfig
        from rollout_worker.rewards.reward_pool import RewardPool, ScoreRequest
        pool = RewardPool([RewardFunctionConfig(name="mine:play")], processes=1, timeout_s=900)
        print(int(pool.submit([ScoreRequest("pid", "", "", {{}})]).wait()[0].total), flush=True)
        if {completion!r} == "spin":
            job = [ScoreRequest("spin", "", "", {{}})]
            threading.Thread(target=pool.submit, args=(job,), daemon=True).start()
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    parent = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    pid = int(parent.stdout)
    wait_until(lambda: process_is_gone(pid), f"end of child {pid}")


@pytest.mark.parametrize(
    "start", [validate_functions, lambda f: RewardPool(f, processes=2, timeout_s=HANG_S)]
)
@pytest.mark.parametrize(
    "functions, message",
    [
        (
            [function("gsm8k_anwser")],
            "'gsm8k_anwser' .nearest: 'gsm8k_answer'",
        ),
        ([function("format"), function("none.rewards:score")], "cannot import 'none.rewards'"),
        ([function("mine:plai")], "has no 'plai' .nearest: 'play'"),
        ([function("mine:play", params={"scale": 2})], "no parameter 'scale'; it takes none"),
        ([function("gsm8k_answer", params={"mode": "loose"})], "got 'loose'"),
        ([function("broken:score")], "ZeroDivisionError"),
    ],
)
def test_a_scorer_that_cannot_be_loaded_is_refused_at_the_start(
    user_modules, start, functions, message
):
    (user_modules / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match=f"^(unknown )?reward function .*{message}"):
        start(functions)


def test_validation_runs_the_users_code_in_a_child_only(user_modules):
    (user_modules / "effects.py").write_text(
        "import os\nprint('hello')\nos.environ['EFFECT'] = '1'\nfrom mine import play\n"
    )
    validate_functions([function("effects:play"), function("format")])
    assert "effects" not in sys.modules and "EFFECT" not in os.environ


@pytest.mark.parametrize(
    "code, timeout_s, message",
    [
        (
            "import time; time.sleep(1000)",
            5,
            "not ready within 5 s, killed while loading reward function",
        ),
        (
            "import os; os._exit(7)",
            HANG_S,
            "child exited with code 7 while loading reward function",
        ),
    ],
)
def test_a_module_that_hangs_or_kills_at_import_is_named(user_modules, code, timeout_s, message):
    name = f"bad_import_{abs(hash(code))}"
    (user_modules / f"{name}.py").write_text(code)
    with pytest.raises(RuntimeError, match=f"{message} '{name}:score'"):
        validate_functions([function(f"{name}:score")], timeout_s=timeout_s)


def test_a_module_in_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text("def score(completion, **given):\n    return 4.0\n")
    monkeypatch.chdir(tmp_path)
    with closing(RewardPool([function("beside:score")], processes=1, timeout_s=HANG_S)) as pool:
        assert scores_of(pool, [request("x")])[0].total == 4.0


@pytest.mark.parametrize(
    "code, message",
    [
        ("x = 1\n1 / 0", r"ZeroDivisionError: division by zero \(.*bad_0.py:2\)"),
        ("x = (\n", r"SyntaxError: '\(' was never closed \(.*bad_1.py:1\)"),
        ("import sys\nsys.exit(3)", r"it calls sys.exit\(3\) \(.*bad_2.py:2\)"),
        ("name = input()", r"EOFError.*no standard input\) \(.*bad_3.py:1\)"),
        ("import nowhere_to_be_found", r"No module named 'nowhere_.* \(.*bad_4.py:1\)"),
        ("from math import no_such", r"ImportError: cannot import name.* \(.*bad_5.py:1\)"),
        ("raise ValueError('\\ud800')", r"ValueError: \\ud800 \(.*bad_6.py:1\)"),
        (
            "\nimport json; json.loads('')",
            r".*JSONDecodeError: .*decoder.py:\d+, reached from .*bad_7.py:2\)",
        ),
    ],
)
def test_what_a_module_does_at_import_is_one_line_with_its_place(
    user_modules, capfd, request, code, message
):
    name = f"bad_{request.node.callspec.indices['code']}"
    (user_modules / f"{name}.py").write_text(code + "\n")
    with pytest.raises(ValueError) as refused:
        validate_functions([function(f"{name}:score")])
    text = str(refused.value)
    assert re.match(f"reward function '{name}:score': importing '{name}' fails: {message}", text)
    assert "\n" not in text and "Traceback" not in capfd.readouterr().err


def test_a_slow_import_is_named_while_it_goes_on(user_modules, caplog, monkeypatch):
    monkeypatch.setattr("rollout_worker.rewards.processes.reward_process.SLOW_START_S", 3.0)
    (user_modules / "dreamer.py").write_text(
        "import time; time.sleep(5)\ndef score(completion, **given): return 1.0\n"
    )
    validate_functions([function("dreamer:score")])
    assert "still loading reward function 'dreamer:score'" in caplog.text


def test_a_builtin_of_python_is_refused_by_name():
    with pytest.raises(ValueError, match="'builtins:max' must be a plain function"):
        validate_functions([function("builtins:max")])


def test_an_error_text_that_is_no_utf8_stays_an_error_of_one_completion(user_modules):
    (user_modules / "surrogate.py").write_text(
        "def score(completion, **given):\n    raise RuntimeError('half \\ud800')\n"
    )
    with closing(RewardPool([function("surrogate:score")], processes=1, timeout_s=HANG_S)) as pool:
        (score,) = scores_of(pool, [request("x")])
    assert score.error.encode() == b"surrogate:score: RuntimeError: half \\ud800"
