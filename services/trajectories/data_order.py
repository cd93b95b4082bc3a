"""The data order: which prompt comes at which index of the run, and the id of the group there.

A pure function of (seed, index), so that a cursor, one integer, is all that a checkpoint keeps. The
prompts of several sources lie one source after the other; `source_mix.py` says from which of them
an index draws, and each is drawn from without replacement, in epochs of its own.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from services.trajectories.source_mix import draw_at, draws_before, shares_of

_CACHED_EPOCHS = 4
_CACHED_SOURCES = 256
LONGEST_INDEX = 18
"""Digits of an index at most."""


def epoch_order(seed: int, epoch: int, count: int, source: int = 0) -> np.ndarray:
    """Returns the order in which an epoch visits its prompts.

    The order sorts raw Philox output. NumPy keeps bit generators and seed sequences stable across
    versions and platforms, which it does not promise of `Generator.permutation`.

    Args:
        source: place in the list of sources; each has an order of its own.

    Returns:
        int64 [count], read-only; a permutation of `range(count)`.
    """
    return _orders_of(seed, count, source)(epoch)


@functools.lru_cache(maxsize=_CACHED_SOURCES)
def _orders_of(seed: int, count: int, source: int) -> Callable[[int], np.ndarray]:
    """The orders of one source, the last few of which are kept."""

    @functools.lru_cache(maxsize=_CACHED_EPOCHS)
    def order_of(epoch: int) -> np.ndarray:
        key = (epoch, source) if source else (epoch,)
        stream = np.random.Philox(np.random.SeedSequence(seed, spawn_key=key))
        order = np.argsort(stream.random_raw(count), kind="stable").astype(np.int64)
        order.flags.writeable = False
        return order

    return order_of


def prompt_at(seed: int, count: int, index: int, source: int = 0) -> tuple[int, int]:
    """Returns the prompt at an index of one source, drawn without replacement in each epoch.

    Args:
        seed: of the run; not negative.
        count: prompts of the source.
        index: counted from 0 over all epochs; with one source, the data cursor.
        source: place in the list of sources.

    Returns:
        (epoch, position): the number of whole passes before, and the position in the source.

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
    return epoch, int(epoch_order(seed, epoch, count, source)[offset])


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderedSource:
    """One source of the training prompts."""

    name: str
    """Of messages, logs and metrics; the order does not depend on it."""
    count: int
    """Prompts that fit."""
    weight: float
    """Its share of what is drawn, relative to the other weights."""


@dataclasses.dataclass(frozen=True)
class DataOrder:
    """The endless order of the training prompts."""

    seed: int
    """Of the run; not negative."""
    sources: tuple[OrderedSource, ...]
    """At least one, each with prompts and a finite weight above 0."""
    shuffled: bool = True
    """Whether each epoch has an order of its own; otherwise a source is drawn from as it stands."""

    def __post_init__(self):
        if self.seed < 0 or any(source.count < 1 for source in self.sources):
            raise ValueError(
                "the data order needs seed >= 0 and at least one prompt of each source, got "
                f"seed={self.seed}, counts {[source.count for source in self.sources]}"
            )
        shares_of([source.weight for source in self.sources])

    @classmethod
    def of_one(cls, seed: int, count: int) -> "DataOrder":
        """The order of a single source."""
        return cls(seed, (OrderedSource(name="train", count=count, weight=1.0),))

    @functools.cached_property
    def shares(self) -> tuple[Fraction, ...]:
        """Of each source; their sum is 1."""
        return shares_of([source.weight for source in self.sources])

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """Position of the first prompt of each source, and the number of all prompts."""
        return tuple(itertools.accumulate((one.count for one in self.sources), initial=0))

    @property
    def count(self) -> int:
        """Prompts of all sources."""
        return self.starts[-1]

    @property
    def is_mixed(self) -> bool:
        """Whether there are several sources."""
        return len(self.sources) > 1

    def source_at(self, index: int) -> OrderedSource:
        """The source of the prompt at an index of the run."""
        return self.sources[draw_at(self.shares, index)[0]]

    def epoch_at(self, index: int) -> int:
        """How often the source at an index of the run was passed through before."""
        source, ordinal = draw_at(self.shares, index)
        return ordinal // self.sources[source].count

    def prompt_at(self, index: int) -> tuple[int, int]:
        """Returns the prompt at an index of the run; the data cursor.

        Returns:
            (epoch, position): of its source, and in the list of the prompts of all sources.

        Raises:
            ValueError: if the index is negative.
        """
        if index < 0:
            raise ValueError(f"an index of the data order must be at least 0, got {index}")
        source, ordinal = draw_at(self.shares, index)
        count = self.sources[source].count
        if self.shuffled:
            epoch, place = prompt_at(self.seed, count, ordinal, source)
        else:
            epoch, place = divmod(ordinal, count)
        return epoch, self.starts[source] + place

    def draws_before(self, index: int) -> tuple[int, ...]:
        """How many prompts were drawn of each source before an index, with repetitions."""
        return draws_before(self.shares, index)

    def source_of_position(self, position: int) -> OrderedSource:
        """The source of a place in the list of all prompts."""
        starts = self.starts[1:-1]
        return self.sources[sum(position >= start for start in starts)]

    def mixture(self) -> list[list[int | str]]:
        """What decides the order beside the seed, as JSON values: prompts and share by source."""
        counts = [source.count for source in self.sources]
        return [[count, str(share)] for count, share in zip(counts, self.shares, strict=True)]


def group_id_at(index: int) -> str:
    """Returns the id of the group of an index."""
    return f"g{index:08d}"


def index_of(group_id: str) -> int | None:
    """Returns the index that a group id is made from; None for any other text."""
    digits = group_id.removeprefix("g")
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > LONGEST_INDEX:
        return None
    return int(digits) if group_id == group_id_at(int(digits)) else None
