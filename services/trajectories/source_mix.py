"""Which source is drawn from at an index of the run, where several are mixed by weight.

The sources are the leaves of a binary tree, in which the two lightest nodes are joined until one is
left, as Huffman does. Of n draws, a node gives round(share * n) to its heavier child and the others
to its lighter one. So the source of any index follows from the index alone, in exact arithmetic.

At every index the number drawn of a source differs from share * index by less than 1.7. A child is
off by its share of what its parent is off by, plus at most 1/2 for the rounding. On the way up, a
node is at least as heavy as the two below it together, since what it is joined with was not lighter
than either when those were joined. The whole is at most half the sum of the reciprocal Fibonacci
numbers, 1 + 1 + 1/2 + 1/3 + 1/5 + ... = 3.36.
"""

import dataclasses
import functools
import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeAlias


@dataclasses.dataclass(frozen=True)
class _Joined:
    """Two nodes that share their draws."""

    share: Fraction
    """Of the heavier one."""
    heavier: "_Node"
    lighter: "_Node"

    def to_heavier(self, draws: int) -> int:
        return (2 * self.share.numerator * draws + self.share.denominator) // (
            2 * self.share.denominator
        )


_Node: TypeAlias = "_Joined | int"
"""An int is a source, by its place in the list."""


def shares_of(weights: Sequence[float]) -> tuple[Fraction, ...]:
    """The exact share of each source, of the decimal numbers as they are written.

    Raises:
        ValueError: if there is no weight, or one is not a finite number above 0.
    """
    if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ValueError(f"a mixture needs finite weights above 0, got {list(weights)}")
    exact = [Fraction(repr(float(weight))) for weight in weights]
    return tuple(weight / sum(exact) for weight in exact)


def draw_at(shares: tuple[Fraction, ...], index: int) -> tuple[int, int]:
    """Finds what an index of the run is drawn from.

    Args:
        shares: of the sources; above 0, with the sum 1.
        index: counted from 0.

    Returns:
        (source, ordinal): the place of the source in `shares`, and its draws before.
    """
    node, ordinal = _tree(shares), index
    while isinstance(node, _Joined):
        before, after = node.to_heavier(ordinal), node.to_heavier(ordinal + 1)
        node, ordinal = (
            (node.heavier, before) if after > before else (node.lighter, ordinal - before)
        )
    return node, ordinal


def draws_before(shares: tuple[Fraction, ...], index: int) -> tuple[int, ...]:
    """How many were drawn of each source before an index."""
    found = [0] * len(shares)

    def share_out(node: _Node, draws: int) -> None:
        if isinstance(node, int):
            found[node] = draws
            return
        heavier = node.to_heavier(draws)
        share_out(node.heavier, heavier)
        share_out(node.lighter, draws - heavier)

    share_out(_tree(shares), index)
    return tuple(found)


@functools.lru_cache(maxsize=16)
def _tree(shares: tuple[Fraction, ...]) -> _Node:
    """Joins the two lightest nodes until one is left; of equal ones, the later made is lighter."""
    heap: list[tuple[Fraction, int, _Node]] = [
        (share, -source, source) for source, share in enumerate(shares)
    ]
    heapq.heapify(heap)
    for made in range(len(shares), 2 * len(shares) - 1):
        (light, _, lighter), (heavy, _, heavier) = heapq.heappop(heap), heapq.heappop(heap)
        joined = _Joined(heavy / (heavy + light), heavier, lighter)
        heapq.heappush(heap, (heavy + light, -made, joined))
    return heap[0][2]
