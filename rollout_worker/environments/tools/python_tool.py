"""Runs Python that a model has written, in the sandbox of the scorer of code."""

import tempfile
import time
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field

from rollout_worker.environments.tools.function_schemas import BadTool
from rollout_worker.environments.tools.toolbox import ToolFailed
from rollout_worker.rewards.code.sandbox import (
    Limits,
    SandboxFailed,
    SandboxProcess,
    confinement_problem,
)

_MOST_READ = 1 << 16
_ERRORS_SHOWN = 2000


def make_python(
    seconds: Annotated[float, Field(gt=0, le=3600)] = 3.0,
    memory_mb: Annotated[int, Field(ge=1)] = 512,
    sandbox: Literal["required", "best_effort"] = "required",
) -> Callable[[str], str]:
    """The tool, with limits of one call.

    Args:
        seconds: of the clock; below environment.timeout_s.
        memory_mb: of each process.
        sandbox: as `code_tests` has it.

    Raises:
        BadTool: if code cannot be confined here and must be.
    """
    problem = confinement_problem()
    if sandbox == "required" and problem:
        raise BadTool(
            f"tool 'python': code cannot be confined on this host: {problem}. Allow user "
            "namespaces, or write {name: python, sandbox: best_effort} where the model's code may "
            "reach all that the run can"
        )
    limits = Limits(memory_mb=memory_mb, seconds=int(seconds) + 1)

    def python(code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: The whole program; nothing of earlier calls is kept.
        """
        with tempfile.TemporaryFile() as stdout:
            job = {"role": "script", "code": code}
            process = SandboxProcess(job, limits=limits, confined=not problem, stdout=stdout)
            try:
                ended = process.wait(time.monotonic() + seconds)
                process.check_confined()
                errors = process.errors.strip()
            except SandboxFailed as error:
                raise ToolFailed(f"tool 'python': {error}") from error
            finally:
                process.end()
            stdout.seek(0)
            printed = stdout.read(_MOST_READ).decode("utf-8", "replace")
        if ended is None:
            return f"{printed}[ended after {seconds:g} s]"
        if ended:
            return f"{printed}[exit code {ended}]\n{errors[-_ERRORS_SHOWN:]}"
        return printed

    return python
