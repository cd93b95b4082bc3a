"""The built-in scorer that runs the code of a completion against the tests of its row.

The tests do not run in the process that runs the completion. A program is judged by its output, and
functions are called from another process that compares what they return (`tests_process.py`), so
that a completion can neither end, replace nor print its verdict. What it can still do is to treat
the inputs of the tests as special cases, where it knows them, as from examples in its prompt.
"""

import contextlib
import decimal
import json
import os
import re
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Literal

from rollout_worker.rewards.code.row_tests import CallTests, ScriptTests, read_tests
from rollout_worker.rewards.code.sandbox import (
    Limits,
    SandboxFailed,
    SandboxProcess,
    confinement_problem,
)

TOTAL_S = 4.0
CODE_STARTS_S = 0.5
"""For what a completion takes beside its tests."""
_FENCE = re.compile(r"`{3,}|~{3,}")
_LANGUAGES = {"", "python", "python3", "py"}
_SHOWN = 200
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,4})?")
_FROM_OUTSIDE_S = 1.0
"""After the time limit of a test, which its own process keeps, until it is ended from here."""


def code_tests(
    completion: str,
    *,
    answer: str,
    prompt: str,
    item: dict,
    mode: Literal["all", "fraction"] = "all",
    field: str | None = None,
    sandbox: Literal["required", "best_effort"] = "required",
    test_s: float = 2.0,
    total_s: float = TOTAL_S,
    memory_mb: int = 1024,
) -> dict[str, Any]:
    """Scores how many of its row's tests the code of a completion passes.

    The code is the last block in fences, of Python or of no language, after any `</think>`; without
    a block it is the whole completion. A test that raises, runs out of time or ends its process is
    not passed, and neither are those for which no time is left.

    Args:
        completion: the text sampled.
        answer: has the tests where no field of the row has them.
        prompt: not used.
        item: the row, with tests in one of the shapes of `row_tests.py`.
        mode: `all` pays 1 where every test is passed, else 0; `fraction` pays the share.
        field: of the row that has the tests; None finds it.
        sandbox: `required` refuses to start where code cannot be cut off from the host;
            `best_effort` then runs it with limits only, which hostile code gets around.
        test_s: seconds of one test.
        total_s: seconds of all tests of a completion, below `reward.timeout_s`.
        memory_mb: of each process.

    Returns:
        `value`, both modes as `all` and `fraction`, and as `note` how many tests were passed and
        why the first one was not.

    Raises:
        ValueError: if the row has no tests that can run.
        SandboxFailed: if no sandbox can be made.
    """
    tests = read_tests(item, answer, field)
    code = read_code(completion)
    confined = sandbox == "required" or not confinement_problem()
    limits = Limits(memory_mb=memory_mb, seconds=int(total_s) + 1)
    bench = _Bench(limits, confined, test_s, time.monotonic() + total_s)
    if isinstance(tests, ScriptTests):
        passed = sum(bench.passes_script(code, *pair) for pair in tests.pairs)
        count = len(tests.pairs)
    else:
        passed, count = bench.count_passed(code, tests), len(tests.tests)
    modes = {"all": float(passed == count), "fraction": passed / count}
    note = f"{passed} of {count} tests passed"
    note += f"; the first that was not: {bench.first_problem}" if passed < count else ""
    return {"value": modes[mode], **modes, "note": note}


def read_code(completion: str) -> str:
    """The code of a completion."""
    text = completion.rpartition("</think>")[2]
    blocks: list[tuple[str, list[str]]] = []
    fence = ""
    for line in text.splitlines(keepends=True):
        found = _FENCE.match(line.lstrip())
        rest = line.strip().lstrip("`~") if found else ""
        if fence and found and found[0].startswith(fence) and not rest:
            fence = ""
        elif fence:
            blocks[-1][1].append(line)
        elif found and "`" not in rest:
            fence = found[0]
            blocks.append((rest.lower().split()[0] if rest else "", []))
    codes = [lines for language, lines in blocks if language in _LANGUAGES]
    return textwrap.dedent("".join(codes[-1])) if codes else "" if blocks else text


class _Bench:
    """Runs the tests of one completion, within a time for all of them."""

    def __init__(self, limits: Limits, confined: bool, test_s: float, deadline_s: float):
        self._limits = limits
        self._confined = confined
        self._test_s = test_s
        self._deadline_s = deadline_s
        self.first_problem = "no time was left for it"
        """Why the first test that was not passed was not."""
        self._failed = False
        self._ran = False
        """Whether any code of the completion has run."""

    @property
    def _over(self) -> bool:
        return time.monotonic() >= self._deadline_s

    def _note_problem(self, text: str) -> None:
        if not self._failed:
            self._failed, self.first_problem = True, text[:_SHOWN]

    def _check_confined(self, *processes: SandboxProcess) -> None:
        """Raises SandboxFailed where the host cannot start the first processes, or is too slow for
        that; when later ones are not there in time, the completion has used it up.
        """
        self._ran = all([one.check_confined() for one in processes]) or self._ran
        if not self._ran:
            raise SandboxFailed(
                f"no process was ready within test_s={self._test_s:g} s: raise it, or give this "
                "host less to do"
            )

    def passes_script(self, code: str, given: str, expected: str) -> bool:
        """Whether a program ends well and prints what is expected."""
        if self._over:
            return False
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
            stdin.write(given.encode("utf-8", "surrogatepass"))
            stdin.seek(0)
            job = {"role": "script", "code": code}
            with self._started(job, stdin=stdin, stdout=stdout) as process:
                ended = process.wait(min(self._deadline_s, time.monotonic() + self._test_s))
                self._check_confined(process)
                errors = process.errors.strip()
            stdout.seek(0)
            printed = stdout.read().decode("utf-8", "replace")
        if ended != 0:
            late = "it ran out of time"
            self._note_problem(late if ended is None else f"exit code {ended}: {errors[-_SHOWN:]}")
            return False
        if not same_output(printed, expected):
            half = _SHOWN // 2
            self._note_problem(f"printed {printed[:half]!r}, expected {expected[:half]!r}")
            return False
        return True

    def count_passed(self, code: str, tests: CallTests) -> int:
        """How many tests pass. After one that ended the processes, the others get new ones."""
        passed = done = 0
        while done < len(tests.tests) and not self._over:
            results = self._call(code, tests, tests.tests[done:])
            if not results or "failed" in results[0]:
                self._note_problem(results[0]["failed"] if results else "it ended its process")
                return passed
            if "broken" in results[0]:
                raise ValueError(f"the tests of the row cannot run: {results[0]['broken']}")
            for one in results[1:]:
                passed += one["passed"]
                if not one["passed"]:
                    self._note_problem(one["why"])
            if len(results) == 1:
                self._note_problem("it ended its process or ran out of time")
            done += max(1, len(results) - 1)  # at least the one that ended its process
        return passed

    def _call(self, code: str, tests: CallTests, left: Sequence[str]) -> list[dict[str, Any]]:
        """The lines of the tests' process: one on whether they run, and one for each that ended."""
        shared = {"prompt": tests.prompt, "entry": tests.entry}
        to_solution, to_tests = os.pipe(), os.pipe()
        with tempfile.TemporaryFile() as results:
            with contextlib.ExitStack() as stack:
                with contextlib.ExitStack() as ends:
                    for fd in (*to_solution, *to_tests):
                        ends.callback(os.close, fd)
                    ins, outs = to_solution[0], to_tests[1]
                    job = {"role": "solution", "code": code, "in_fd": ins, "out_fd": outs, **shared}
                    solution = stack.enter_context(self._started(job, keep=[ins, outs]))
                    ins, outs = to_tests[0], to_solution[1]
                    job = {
                        "role": "tests",
                        "tests": left,
                        "setup": tests.setup,
                        "in_fd": ins,
                        "out_fd": outs,
                        "results_fd": results.fileno(),
                        "test_s": self._test_s,
                        **shared,
                    }
                    keep = [ins, outs, results.fileno()]
                    judge = stack.enter_context(self._started(job, keep=keep))
                most_s = (len(left) + 1) * (self._test_s + _FROM_OUTSIDE_S)
                judge.wait(min(self._deadline_s, time.monotonic() + most_s))
                self._check_confined(judge, solution)
            results.seek(0)
            lines = results.read().splitlines()
        return [json.loads(line) for line in lines]

    @contextlib.contextmanager
    def _started(
        self, job: dict[str, Any], keep: Sequence[int] = (), **streams: IO[bytes]
    ) -> Iterator[SandboxProcess]:
        process = SandboxProcess(
            job, limits=self._limits, confined=self._confined, keep=keep, **streams
        )
        try:
            yield process
        finally:
            process.end()


def same_output(printed: str, expected: str) -> bool:
    """Whether a program printed what is expected: the same lines but for white space around them
    and at the end, where numbers are equal if their values are.
    """
    lines = [text.strip().splitlines() for text in (printed, expected)]
    if len(lines[0]) != len(lines[1]):
        return False
    return all(
        len(one) == len(two) and all(map(_same_word, one, two))
        for one, two in zip(*([line.split() for line in text] for text in lines), strict=True)
    )


def _same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    if not (_NUMBER.fullmatch(printed) and _NUMBER.fullmatch(expected)):
        return False
    return decimal.Decimal(printed) == decimal.Decimal(expected)


def check_code_row(answer: str, item: dict, params: Mapping[str, Any]) -> None:
    """Raises ValueError for a row without tests that can be read."""
    read_tests(item, answer, params.get("field"))


def check_code_params(params: Mapping[str, Any]) -> None:
    """Raises ValueError for parameters with which nothing can run, and for a host on which the
    code of completions cannot be confined, where that is required.
    """
    for name, least in (("test_s", 0.1), ("total_s", 0.1), ("memory_mb", 64)):
        value = params.get(name, least)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
            raise ValueError(f"{name}={value!r} must be a number of at least {least:g}")
    if params.get("sandbox", "required") == "required" and (problem := confinement_problem()):
        raise ValueError(
            f"code cannot be confined on this host: {problem}. Allow user namespaces (in a "
            "container: --security-opt seccomp=unconfined, or --cap-add SYS_ADMIN), or set "
            "params.sandbox=best_effort where completions may reach all that the run can"
        )
