"""The data order: which prompt comes at which index of the run, and the id of the group there.

A pure function of (seed, epoch), so that a cursor, one integer, is all that a checkpoint keeps.
"""

import functools
import operator

import numpy as np

_CACHED_EPOCHS = 4
LONGEST_INDEX = 18
"""Digits of an index at most."""


@functools.lru_cache(maxsize=_CACHED_EPOCHS)
def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """Returns the order in which an epoch visits its prompts.

    The order sorts raw Philox output. NumPy keeps bit generators and seed sequences stable across
    versions and platforms, which it does not promise of `Generator.permutation`.

    Returns:
        int64 [count], read-only; a permutation of `range(count)`.
    """
    stream = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    order = np.argsort(stream.random_raw(count), kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def prompt_at(seed: int, count: int, index: int) -> tuple[int, int]:
    """Returns the prompt at an index of the run, drawn without replacement in each epoch.

    Args:
        seed: of the run; not negative.
        count: prompts in the set.
        index: counted from 0 over all epochs; the data cursor.

    Returns:
        (epoch, position): the number of whole passes before, and the position in the prompt set.

    Raises:
        ValueError: if seed or index is negative or the set is empty.
    """
    seed, count, index = operator.index(seed), operator.index(count), operator.index(index)
    if seed < 0 or index < 0 or count < 1:
        raise ValueError(
            f"the data order needs seed >= 0, index >= 0 and at least one prompt, "
            f"got {seed=}, {index=}, {count=}"
        )
    epoch, offset = divmod(index, count)
    return epoch, int(epoch_order(seed, epoch, count)[offset])


def group_id_at(index: int) -> str:
    """Returns the id of the group of an index."""
    return f"g{index:08d}"


def index_of(group_id: str) -> int | None:
    """Returns the index that a group id is made from; None for any other text."""
    digits = group_id.removeprefix("g")
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > LONGEST_INDEX:
        return None
    return int(digits) if group_id == group_id_at(int(digits)) else None
