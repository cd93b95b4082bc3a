"""A reward that means nothing: for trials of a run whose lengths matter, and not what it learns."""

import hashlib


def random_reward(completion: str, *, answer: str, prompt: str, item: dict) -> float:
    """A number in [0, 1) that follows from the text, and from nothing that the text says.

    Args:
        completion: hashed with the prompt.
        answer, item: not used.
    """
    digest = hashlib.sha256(f"{prompt}\0{completion}".encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32
