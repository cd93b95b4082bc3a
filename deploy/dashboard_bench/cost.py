"""What the page costs the run: step times with viewers against those without a dashboard.

One run. Blocks of steps alternate: in one the dashboard's process is stopped (SIGSTOP), so that
there is none as far as the machine is concerned; in the other it runs and so many viewers listen.
The order within a pair turns round from pair to pair, so that a drift of the steps themselves, as
completions grow longer, falls on both sides alike. Of each block the first step is left out. The
viewers are lean clients in a process of their own, at the same cores: a browser belongs to the
machine of whoever looks.
"""

import statistics

import psutil

from deploy.dashboard_bench.running import DemoRun, demo_run
from deploy.dashboard_bench.viewers import listeners, wait_until_listening

WARM_UP = 8
"""Steps that are not counted: programs compile."""
MOST = 1.02


def measure(*, steps: int, viewers: int, block: int) -> bool:
    """Prints the ratio of step times; whether it is within the bound."""
    with demo_run(f"run.steps={WARM_UP + steps + 10 * block}") as run:
        run.wait_for_step(WARM_UP)
        page = run.dashboard
        blocks: list[tuple[bool, int, int]] = []
        for pair in range(steps // (2 * block)):
            for watched in (True, False) if pair % 2 else (False, True):
                blocks.append((watched, *_run_block(run, page, watched, viewers, block)))
        step_s = {line["step"]: line["time/train/step_s"] for line in run.metrics()}
    medians = [
        (watched, statistics.median(step_s[step] for step in range(first, last + 1)))
        for watched, first, last in blocks
    ]
    pairs = [dict(medians[at : at + 2]) for at in range(0, len(medians) - 1, 2)]
    ratios = sorted(pair[True] / pair[False] for pair in pairs)
    without = statistics.median(pair[False] for pair in pairs)
    ratio = statistics.median(ratios)
    quarter = len(ratios) // 4
    print(
        f"step without a dashboard {without:.3f} s (median), {len(ratios)} pairs of {block} steps"
    )
    print(f"ratios from {ratios[0]:.3f} to {ratios[-1]:.3f}")
    print(
        f"cost: ratio {ratio:.4f}, middle half {ratios[quarter]:.4f} to "
        f"{ratios[-1 - quarter]:.4f}, viewers {viewers}, pairs {len(ratios)}"
    )
    return ratio <= MOST


def _run_block(
    run: DemoRun, page: psutil.Process, watched: bool, viewers: int, block: int
) -> tuple[int, int]:
    """Lets so many steps pass; returns the first and the last that count."""
    if watched:
        with listeners(run, viewers) as process:
            wait_until_listening(process, viewers)
            return _steps(run, block)
    page.suspend()
    try:
        return _steps(run, block)
    finally:
        page.resume()


def _steps(run: DemoRun, block: int) -> tuple[int, int]:
    now = run.step
    run.wait_for_step(now + 1 + block)
    return now + 2, now + 1 + block
