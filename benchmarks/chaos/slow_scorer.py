"""The scorer of the disturbed run: the demo's, with a pause, so that there is time to hit it."""

import contextlib
import os
import signal
import time

from rollout_worker.rewards.scorers import gsm8k_answer

PRINTED = "x" * 1_000_000 + "\n"
PRINTS = 20
LINGERS_S = 5.0


def score(
    completion: str, *, answer: str, prompt: str, item: dict, seconds: float, hostile: str = ""
) -> float:
    """1 where the final number is right, else 0; returns after `seconds`.

    Args:
        hostile: a file; the first call that finds it removes it, and does all the harm it can.
    """
    if hostile:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(hostile)
            _harm()
    time.sleep(seconds)
    return gsm8k_answer(completion, answer=answer, prompt=prompt, item=item)["value"]


def _harm() -> None:
    """Leaves a process behind, prints much, and kills the process that started this one."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(LINGERS_S)
        os._exit(0)
    for _ in range(PRINTS):
        print(PRINTED, end="", flush=True)
    os.kill(os.getppid(), signal.SIGKILL)
