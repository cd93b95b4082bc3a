"""How right What-if is, over a run of the demo in which workers go 1 -> 2 -> 3."""

import subprocess
import sys

from benchmarks.dashboard.browser import ROOT
from benchmarks.dashboard.demo_run import demo_run
from diagnosis.judgement.what_if import WhatIf
from diagnosis.records.run_log import RunLog

MOST = 0.15
SCALE_S = 120


def measure(*, each: int) -> bool:
    """Prints errors of both kinds; whether the median a step ahead is within its bound."""
    with demo_run("rollout.workers=1") as run:
        run.wait_for_step(each)
        for workers in (2, 3):
            subprocess.run(
                [
                    *(sys.executable, "-m", "driver.scale", "--run", str(run.folder)),
                    *("--rollout-workers", str(workers), "--wait", str(SCALE_S)),
                ],
                cwd=ROOT,
                check=True,
                stdout=subprocess.DEVNULL,
            )
            run.wait_for_step(run.step + each)
        log = RunLog(run.folder)
        log.refresh()
        what_if = WhatIf(log.settings)
        for facts in log.recent(len(log.steps)):
            what_if.add_step(facts)
    found = what_if.json()
    assert found is not None
    for change in found["changes"]:
        print(
            f"{change['from']} -> {change['to']} workers at step {change['step']}: predicted "
            f"{change['predicted']:.3f} s, it took {change['actual']:.3f} s "
            f"({change['error']:+.1%})"
        )
    error = found["error"]
    print(
        f"predictions: median error {error['median']:.3f}, steps {error['count']}, changes "
        f"{', '.join(format(change['error'], '+.3f') for change in found['changes'])}"
    )
    return error["median"] < MOST
