"""The code scorer on right, wrong and hostile completions, each in a real sandbox."""

import http.server
import os
import pathlib
import threading
from contextlib import closing

import pytest

from rollout_worker.config.reward_config import RewardFunctionConfig
from rollout_worker.rewards.code.code_tests import code_tests, read_code, same_output
from rollout_worker.rewards.code.sandbox import confinement_problem, describe_protections
from rollout_worker.rewards.gold_answers import find_unjudged
from rollout_worker.rewards.reward_pool import RewardPool, ScoreRequest
from tests.deadlines import HANG_S
from tests.services.process.running_processes import running_children

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(confinement_problem()), reason="this host confines no process"),
]

CHECKOUT = str(pathlib.Path(__file__).parents[4] / "rollout_worker")
HOME_KEYS = pathlib.Path.home() / ".ssh"
ADDS = "def f(a, b=0):\n    return a + b\n"
ADD_TESTS = ["assert f(1, 2) == 3", "assert f(2) == 2"]
LONG = {"test_s": 60.0, "total_s": 120.0}
"""For completions that end: a busy machine must not decide."""
SHORT = {"test_s": 1.5, "total_s": 3.0}
"""For those that do not."""


def fenced(code):
    return f"So:\n```python\n{code}\n```\nDone."


def score(code, tests=None, params=None, **item):
    if tests is not None:
        item["tests"] = tests
    before = running_children()  # other tests may have left a server of multiprocessing
    result = code_tests(fenced(code), answer="", prompt="", item=item, **(params or LONG))
    assert running_children() <= before
    return result["fraction"]


def program(code, *pairs, params=None):
    return score(code, [{"input": one, "output": two} for one, two in pairs], params)


def test_tests_of_functions_are_counted():
    assert score(ADDS, ADD_TESTS) == 1.0
    assert score("def f(a, b=0):\n    return a", ADD_TESTS) == 0.5
    for mode, value in (("all", 0.0), ("fraction", 0.5)):
        wrong = fenced("def f(a, b=0):\n    return a")
        params = {"mode": mode, **LONG}
        result = code_tests(wrong, answer="", prompt="", item={"tests": ADD_TESTS}, **params)
        assert result["value"] == value


@pytest.mark.parametrize("code", ["", "def f(:", "def g(a):\n    return a", "1 / 0", "f = 3"])
def test_code_that_does_not_work_scores_nothing(code):
    assert score(code, ADD_TESTS) == 0.0


def test_tests_of_programs_are_counted():
    code = "a, b = map(int, input().split())\nprint(a + b)"
    assert program(code, ("1 2\n", "3\n"), ("2 2", "4"), ("1 1", "3")) == pytest.approx(2 / 3)
    assert program(f"{code}\nraise ValueError", ("1 2\n", "3\n")) == 0.0
    assert program("if __name__ == '__main__':\n    print(7)\n    exit()", ("", "7")) == 1.0


def test_humaneval_takes_a_whole_function_and_the_rest_of_one():
    prompt = (
        "from typing import List\n\ndef halve(x: float) -> float:\n    return x / 2\n\n"
        'def first(xs: List[float]) -> float:\n    """Half of the first."""\n'
    )
    check = "def check(candidate):\n    assert candidate([4, 1]) == 2\n    assert halve(2) == 1\n"
    row = {"prompt": prompt, "entry_point": "first", "test": check}
    assert score("def first(xs: List[float]):\n    return halve(xs[0])", **row) == 1.0
    result = code_tests("    return halve(xs[0])\n", answer="", prompt="", item=row, **LONG)
    assert result["value"] == 1.0
    assert score("def first(xs):\n    return 3\ndef halve(x):\n    return 2", **row) == 0.0


def test_values_cross_as_they_are():
    code = (
        "import collections, decimal\n"
        "def f(kind):\n"
        "    return {'tuple': (1, [2.5]), 'set': {1, 2}, 'none': None, 'big': 7 ** 3000,\n"
        "            'nan': float('nan'), 'bytes': b'\\xff', 'text': 'é\\ud800',\n"
        "            'count': collections.Counter('aab'), 'inner': {(1, 2): [{}]},\n"
        "            'decimal': decimal.Decimal('1.10'), 'range': range(3), 'complex': 1 + 2j,\n"
        "            'deque': collections.deque([1]), 'bool': True}[kind]\n"
        "def g(a):\n    a.sort()\n"
        "def h(a, key):\n    return sorted(a, key=key)\n"
        "def count():\n    yield from range(3)\n"
        "def fail():\n    raise KeyError('k')\n"
    )
    tests = [
        "assert f('tuple') == (1, [2.5])",
        "assert f('set') == {1, 2}",
        "assert f('none') is None",
        "assert f('big') == 7 ** 3000",
        "x = f('nan')\nassert x != x",
        "assert f('bytes') == b'\\xff'",
        "assert f('text') == 'é\\ud800'",
        "assert f('count') == {'a': 2, 'b': 1}",
        "assert f('inner') == {(1, 2): [{}]}",
        "import decimal\nassert f('decimal') == decimal.Decimal('1.1')",
        "assert f('range') == range(3)",
        "assert f('complex') == 1 + 2j",
        "import collections\nassert f('deque') == collections.deque([1])",
        "assert f('bool') is True and isinstance(f('bool'), bool)",
        "a = [3, 1, 2]\ng(a)\nassert a == [1, 2, 3]",
        "assert h([1, 2, 3], lambda x: -x) == [3, 2, 1]",
        "assert list(count()) == [0, 1, 2]",
        "try:\n    fail()\nexcept KeyError:\n    pass\nelse:\n    assert False",
        "assert math.isclose(f('complex').real, 1.0)",
    ]
    assert score(code, tests) == 1.0


def test_objects_of_own_classes_are_used_where_they_are():
    code = (
        "class Counter:\n    def __init__(self, start):\n        self.count = start\n"
        "    def add(self, n):\n        self.count += n\n        return self\n"
        "    def __len__(self):\n        return self.count\n"
    )
    tests = [
        "c = Counter(2)\nc.add(3)\nassert c.count == 5 and len(c) == 5",
        "assert Counter(1).add(1).add(1).count == 3",
    ]
    assert score(code, tests) == 1.0


def test_objects_of_the_classes_of_a_row_cross_by_value():
    prompt = (
        "class Node:\n    def __init__(self, value, next=None):\n"
        "        self.value, self.next = value, next\n"
        "    def __eq__(self, other):\n"
        "        return (self.value, self.next) == (other.value, other.next)\n"
    )
    code = (
        "class Solution:\n    def double(self, node):\n        return Node(node.value * 2, node)\n"
    )
    check = "def check(candidate):\n    assert candidate(Node(2)) == Node(4, Node(2))\n"
    row = {"prompt": prompt, "entry_point": "Solution().double", "test": check}
    assert score(code, **row) == 1.0
    forged = "class Node:\n    def __eq__(self, other):\n        return True\n"
    forged += "class Solution:\n    def double(self, node):\n        return Node()\n"
    assert score(forged, **row) == 0.0


def test_a_function_by_pairs_may_be_a_method_of_a_solution():
    pairs = {"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [3, [4]]}
    code = "class Solution:\n    def add(self, a, b):\n        return a + b"
    assert score(code, input_output=pairs) == 1.0


def test_a_test_that_ends_or_hangs_its_process_fails_alone():
    code = "import os, time\ndef f(x):\n    if x == 1:\n        os._exit(0)\n"
    code += "    while x == 2:\n        pass\n    return x\n"
    tests = [f"assert f({x}) == {x}" for x in (0, 1, 2, 3)]
    assert score(code, tests, {"test_s": 2.0, "total_s": 120.0}) == 0.5


FORGERIES = {
    "equals everything": (
        "class Any:\n    def __eq__(self, other):\n        return True\n    __ne__ = None\n"
        "def f(*a):\n    return Any()"
    ),
    "a text that equals everything": (
        "class Any(int):\n    def __eq__(self, other):\n        return True\n"
        "    __hash__ = int.__hash__\ndef f(*a):\n    return Any(77)"
    ),
    "exits at once": "import os\nos._exit(0)",
    "exits by exception": "raise SystemExit(0)",
    "exits in the call": "import sys\ndef f(*a):\n    sys.exit(0)",
    "writes verdicts": (
        "import os\ndef f(*a):\n    for fd in range(64):\n        try:\n"
        '            os.write(fd, b\'{"passed": true, "why": ""}\\n{"value": 3}\\n\' * 9)\n'
        "        except OSError:\n            pass\n    return 0\nf()"
    ),
    "patches the other side": (
        "import builtins, sys\ncalls = sys.modules['rollout_worker.rewards.code.crossing_values']\n"
        "calls.CrossingValues.decode = lambda *a: 3\n"
        "builtins.AssertionError = builtins.Exception\ndef f(*a):\n    return 0"
    ),
    "replaces names of the tests": (
        "def check(*a):\n    pass\ndef candidate(*a):\n    return 3\n"
        "def isinstance(*a):\n    return True\ndef abs(x):\n    return 0\ndef f(*a):\n    return 0"
    ),
    "raises what a test may expect": "def f(*a):\n    raise AssertionError",
    "answers before it is asked": (
        "import sys\nframe = sys._getframe(1)\nchannel = frame.f_locals['channel']\n"
        "for _ in range(9):\n    channel.send({'value': 3, 'changed': {}})\n"
        "def f(*a):\n    return 0"
    ),
}


@pytest.mark.parametrize("trick", FORGERIES)
def test_a_verdict_cannot_be_forged(trick):
    tests = [
        "assert f(1, 2) == 3 and abs(f(1, 2) - 3) < 1",
        "assert isinstance(f(1), int) and f(1) == 1",
    ]
    assert score(FORGERIES[trick], tests, SHORT) == 0.0


def test_a_library_that_the_completion_replaces_is_not_the_tests():
    code = (
        "class math:\n    @staticmethod\n    def isclose(*a):\n        return True\n"
        "def f(a):\n    return 0.0\n"
    )
    assert score(code, ["assert math.isclose(f(1), 1.0)"]) == 0.0
    assert score("def bisect(a):\n    return a", ["assert bisect(2) == 2"]) == 1.0


HOGS = {
    "fork bomb": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    ),
    "threads": (
        "import threading, time\nwhile True:\n"
        "    threading.Thread(target=time.sleep, args=(99,)).start()"
    ),
    "sleep": "import time\ntime.sleep(3600)",
    "loop": "while True:\n    pass",
    "stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nwhile True:\n    pass",
    "new session": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        time.sleep(3600)\n    os._exit(0)\ntime.sleep(3600)"
    ),
    "print": "while True:\n    print('3' * 10000)",
    "memory": "kept = []\nwhile True:\n    kept.append(bytearray(10 ** 7))",
    "disk": "while True:\n    open('a', 'ab').write(bytes(10 ** 6))",
    "kills all": "import os\nfor pid in (0, -1, os.getppid(), 1):\n    os.kill(pid, 9)",
}


@pytest.mark.parametrize("hog", HOGS)
def test_code_that_takes_all_it_can_scores_nothing_and_leaves_nothing(hog, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert program(HOGS[hog], ("", "3"), params=SHORT) == 0.0
    assert score(HOGS[hog], ["assert f(1)"], SHORT) == 0.0
    assert os.listdir(tmp_path) == []


class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.visits.append(self.path)
        self.send_response(200)
        self.end_headers()


def test_nothing_of_the_host_is_in_reach(tmp_path, monkeypatch):
    monkeypatch.setenv("STRIPE_KEY", "held-back")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    secret = tmp_path / "worker.key"
    secret.write_text("key")
    secret.chmod(0o666)
    server = http.server.HTTPServer(("127.0.0.1", 0), Hello)
    server.visits = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = f"""
import glob, os, shutil, socket, sys
def env():
    return [name for name in os.environ if "KEY" in name or "PYTHONPATH" in name]
def files():
    shutil.rmtree({str(tmp_path)!r}, ignore_errors=True)
    shutil.rmtree(os.path.dirname(os.__file__) + "/json", ignore_errors=True)
    hidden = [{str(tmp_path)!r}, "/proc", {str(HOME_KEYS)!r}, "/home", "/etc", {CHECKOUT!r}]
    return [path for path in hidden if os.path.exists(path)]
def write():
    done = []
    for folder in ("/", "/usr", "/usr/bin", "/dev", sys.base_prefix, os.path.dirname(os.__file__)):
        try:
            open(folder + "/forged", "w")
            done.append(folder)
        except OSError:
            pass
    return done
def connect():
    try:
        socket.create_connection(("127.0.0.1", {server.server_port}), 1)
    except OSError:
        return "no network"
def user():
    return os.getuid() != 0 and len(os.listdir("/tmp")) == 0 and os.getcwd() == "/tmp"
def others():
    return [pid for pid in range(2, 5000) if _there(pid)]
def _there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
"""
    tests = [
        "assert env() == []",
        "assert files() == []",
        "assert write() == []",
        "assert connect() == 'no network'",
        "assert user()",
        "assert others() == []",
    ]
    monkeypatch.setenv("TANDEM_SCORERS", "mark")
    assert score(code, tests) == 1.0
    server.shutdown()
    server.server_close()
    assert server.visits == [] and secret.read_text() == "key"


def test_a_completion_in_the_pool_is_scored_or_an_error(tmp_path):
    functions = [RewardFunctionConfig(name="code_tests", params=LONG)]
    item = {"tests": ADD_TESTS}
    with closing(RewardPool(functions, processes=1, timeout_s=HANG_S)) as pool:
        asked = [(fenced(ADDS), item), (fenced("f = 1"), item), (fenced(ADDS), {"tests": []})]
        scores = pool.submit([ScoreRequest(text, "", "", row) for text, row in asked]).wait()
    assert [one.total for one in scores[:2]] == [1.0, 0.0]
    assert "there are no tests" in scores[2].error
    assert scores[0].notes == {"code_tests": "2 of 2 tests passed"}
    assert "the first that was not: TypeError" in scores[1].notes["code_tests"]
    assert scores[0].rewards == {
        "code_tests": 1.0,
        "code_tests/all": 1.0,
        "code_tests/fraction": 1.0,
    }


def test_tests_that_no_completion_could_pass_are_an_error_and_no_0():
    with pytest.raises(ValueError, match="the tests of the row cannot run: ModuleNotFoundError"):
        score(ADDS, **{"test_list": ADD_TESTS, "test_setup_code": "import no_such_module"})


def test_bad_rows_are_found_before_the_run():
    rows = [{"tests": ADD_TESTS}, {"tests": ["assert ("]}, {}]
    golds = [ScoreRequest("", "", "q", row) for row in rows]
    found = find_unjudged("code_tests", golds, timeout_s=HANG_S)
    assert list(found) == [1, 2] and "is no Python" in found[1] and "no tests" in found[2]


@pytest.mark.parametrize(
    "params, message",
    [
        ({"test_s": 0}, "test_s=0 must be a number of at least 0.1"),
        ({"memory_mb": True}, "memory_mb=True must be a number of at least 64"),
        ({"mode": "most"}, "mode must be one of ['all', 'fraction'], got 'most'"),
        ({"sandbox": "none"}, "sandbox must be one of ['required', 'best_effort'], got 'none'"),
    ],
)
def test_parameters_that_cannot_be_used_are_refused(params, message):
    from rollout_worker.rewards.scorers import check_scorer_params

    with pytest.raises(ValueError) as refused:
        check_scorer_params("code_tests", code_tests, params)
    assert message in str(refused.value)


def test_a_host_that_confines_nothing_is_refused_unless_the_user_wants_it(monkeypatch):
    from rollout_worker.rewards.code import code_tests as module

    monkeypatch.setattr(module, "confinement_problem", lambda: "Operation not permitted (unshare)")
    with pytest.raises(ValueError, match=r"cannot be confined .* \(unshare\).*sandbox=best_effort"):
        module.check_code_params({})
    module.check_code_params({"sandbox": "best_effort"})
    assert score(ADDS, ADD_TESTS, {"sandbox": "best_effort", **LONG}) == 1.0
    for hog in ("sleep", "print", "memory", "new session"):
        assert program(HOGS[hog], ("", "3"), params={"sandbox": "best_effort", **SHORT}) == 0.0


def test_what_protects_the_host_is_said():
    assert describe_protections(True).startswith("another user without rights, no network")
    assert "can reach the network" in describe_protections(False)


@pytest.mark.parametrize(
    "completion, code",
    [
        ("```python\na\n```\ntext\n```py\nb\n```", "b\n"),
        ("<think>```python\na\n```</think>\n```\nb\n```", "b\n"),
        ("```python\na\n```\nIt prints\n```text\nb\n```", "a\n"),
        ("```bash\nls\n```", ""),
        ("~~~\na\n```\nb\n~~~", "a\n```\nb\n"),
        ("````python\na\n```\nb\n````", "a\n```\nb\n"),
        ("  ```python\n  if a:\n      b\n  ```", "if a:\n    b\n"),
        ("```python\na", "a"),
        ("a = 1", "a = 1"),
        ("```python title=x\na\n```", "a\n"),
        ("```a``` is code\nb", "```a``` is code\nb"),
        ("`" * 10**6, ""),
    ],
)
def test_the_last_block_of_python_is_the_code(completion, code):
    assert read_code(completion) == code


@pytest.mark.parametrize(
    "printed, expected, same",
    [
        ("1 2\n", "1  2", True),
        ("1\n2\n", "1 2", False),
        ("a\n\nb", "a\nb", False),
        ("1.50", "1.5", True),
        ("1.5000001", "1.5", False),
        ("1e400", "inf", False),
        ("YES", "yes", False),
        ("", "0", False),
        ("1\n\n\n", "1", True),
    ],
)
def test_outputs_are_compared_by_words_and_numbers(printed, expected, same):
    assert same_output(printed, expected) is same
