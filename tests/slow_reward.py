"""A user's scorer by import path: takes its time, and pays for spread among byte values."""

import time


def score(completion: str, *, answer: str, prompt: str, item: dict, seconds: float) -> float:
    time.sleep(seconds)
    return len(set(completion)) / 16.0
