"""What the page costs the run: step times with viewers against those without a dashboard.

One run. Blocks of steps alternate: in one the dashboard's process is stopped (SIGSTOP), so that
it costs nothing; in the other it runs and VIEWERS viewers listen.
The order within a pair turns round from pair to pair, so that a drift of the steps themselves, as
completions grow longer, falls on both sides alike. Of each block the first step is left out. The
viewers are lean clients in a process of their own, at the same cores: a browser belongs to the
viewer's machine.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

import psutil

from benchmarks.dashboard.demo_run import DemoRun, demo_run
from benchmarks.dashboard.viewers import listeners, wait_until_listening

WARM_UP = 8
"""Steps that are not counted: programs compile."""
MOST = 1.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBlock:
    """Steps from `first` to `last`, with the page or without."""

    watched: bool
    first: int
    last: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCost:
    """Step times with the page over those without it, over pairs of blocks."""

    without_s: float
    """Median step without the page."""
    ratios: tuple[float, ...]
    """Of each pair, the least first."""

    @property
    def ratio(self) -> float:
        """The median."""
        return statistics.median(self.ratios)

    @property
    def middle_half(self) -> tuple[float, float]:
        """Ends of what is left when a quarter of the pairs is left out on either side."""
        quarter = len(self.ratios) // 4
        return self.ratios[quarter], self.ratios[-1 - quarter]


def block_order(pairs: int) -> list[bool]:
    """Whether the page is there in each block; which side comes first turns from pair to pair."""
    return [watched for pair in range(pairs) for watched in (pair % 2 == 1, pair % 2 == 0)]


def cost_of(blocks: Sequence[StepBlock], step_s: Mapping[int, float]) -> StepCost:
    """Compares the median step of each block with that of its neighbour.

    Args:
        blocks: in the order in which they were; two and two are a pair.
        step_s: seconds by step.

    Raises:
        ValueError: if two neighbours were both with or both without the page, or if there is none.
    """
    medians = [
        statistics.median(step_s[step] for step in range(one.first, one.last + 1)) for one in blocks
    ]
    ratios, without_s = [], []
    for at in range(0, len(blocks) - 1, 2):
        sides = {blocks[at].watched: medians[at], blocks[at + 1].watched: medians[at + 1]}
        if len(sides) < 2:
            raise ValueError(f"blocks {at} and {at + 1} are no pair: one must be without the page")
        ratios.append(sides[True] / sides[False])
        without_s.append(sides[False])
    if not ratios:
        raise ValueError("there is no pair of blocks: take more steps, or shorter blocks")
    return StepCost(without_s=statistics.median(without_s), ratios=tuple(sorted(ratios)))


def measure(*, steps: int, viewers: int, block: int) -> bool:
    """Prints the ratio of step times; whether it is within the bound."""
    with demo_run() as run:
        run.wait_for_step(WARM_UP)
        page = run.dashboard
        blocks = [
            _run_block(run, page, watched, viewers, block)
            for watched in block_order(steps // (2 * block))
        ]
        step_s = {line["step"]: line["time/train/step_s"] for line in run.metrics()}
    cost = cost_of(blocks, step_s)
    low, high = cost.middle_half
    print(
        f"step without a dashboard {cost.without_s:.3f} s (median), {len(cost.ratios)} pairs of "
        f"{block} steps"
    )
    print(f"ratios from {cost.ratios[0]:.3f} to {cost.ratios[-1]:.3f}")
    print(
        f"cost: ratio {cost.ratio:.4f}, middle half {low:.4f} to {high:.4f}, viewers {viewers}, "
        f"pairs {len(cost.ratios)}"
    )
    return cost.ratio <= MOST


def _run_block(
    run: DemoRun, page: psutil.Process, watched: bool, viewers: int, block: int
) -> StepBlock:
    """Waits for `block` steps, with viewers or with the dashboard stopped."""
    if watched:
        with listeners(run, viewers) as process:
            wait_until_listening(process, viewers)
            first, last = _steps(run, block)
    else:
        page.suspend()
        try:
            first, last = _steps(run, block)
        finally:
            page.resume()
    return StepBlock(watched=watched, first=first, last=last)


def _steps(run: DemoRun, block: int) -> tuple[int, int]:
    """The first and the last that count: the one that goes on now began before, and the next one
    is left out.
    """
    now = run.step
    run.wait_for_step(now + 1 + block)
    return now + 2, now + 1 + block
