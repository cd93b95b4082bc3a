"""The scorer of the disturbed run: the demo's, with a pause, so that there is time to hit it."""

import time

from rollout_worker.rewards.scorers import gsm8k_answer


def score(completion: str, *, answer: str, prompt: str, item: dict, seconds: float) -> float:
    """1 where the final number is right, else 0; returns after `seconds`."""
    time.sleep(seconds)
    return gsm8k_answer(completion, answer=answer, prompt=prompt, item=item)["value"]
