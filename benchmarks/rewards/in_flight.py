"""Throughput of an async scorer that waits for a server, by how many calls are in flight:
`python -m benchmarks.rewards.in_flight`.

The command starts a local HTTP server that takes 100 ms for each answer. Rounds with one call at a
time and with many alternate; the ratio is that of the medians.
"""

import argparse
import statistics
import sys
import time
from contextlib import ExitStack, closing

from benchmarks.rewards.judge_server import JudgeServer
from rollout_worker.config.reward_config import RewardFunctionConfig
from rollout_worker.rewards.reward_pool import RewardPool, ScoreRequest

_TIMEOUT_S = 60.0


def throughput(pool: RewardPool, completions: int) -> float:
    """Completions that a pool scores in a second.

    Raises:
        RuntimeError: if a completion gets an error or the reward of another one.
    """
    requests = [ScoreRequest(f"ok {place}", "", "", {}) for place in range(completions)]
    start = time.perf_counter()
    scores = pool.submit(requests).wait()
    seconds = time.perf_counter() - start
    for place, score in enumerate(scores):
        if score.total != place:
            raise RuntimeError(f"completion {place} got {score}")
    return completions / seconds


def main() -> None:
    """Prints the medians and their ratio; exits with 1 where the ratio is too small."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--delay-ms", type=float, default=100.0, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--least-ratio", type=float, default=20.0)
    given = parser.parse_args()
    with ExitStack() as stack:
        server = stack.enter_context(JudgeServer(given.delay_ms / 1e3))
        scorer = RewardFunctionConfig(
            name="benchmarks.rewards.http_scorers:ask", params={"port": server.port}
        )
        pools = {
            count: stack.enter_context(
                closing(RewardPool([scorer], processes=1, timeout_s=_TIMEOUT_S, in_flight=count))
            )
            for count in (1, given.in_flight)
        }
        rates: dict[int, list[float]] = {count: [] for count in pools}
        for count, pool in pools.items():
            throughput(pool, count)  # the first calls import and connect
        for _ in range(given.rounds):
            for count, pool in pools.items():
                rates[count].append(throughput(pool, 16 * count))
    medians = {count: statistics.median(found) for count, found in rates.items()}
    for count, found in rates.items():
        shown = ", ".join(f"{rate:.1f}" for rate in found)
        print(f"{count:3} in flight: median {medians[count]:.1f} completions/s ({shown})")
    ratio = medians[given.in_flight] / medians[1]
    print(f"ratio {ratio:.1f} (at least {given.least_ratio:g}); at once {server.most_at_once}")
    if ratio < given.least_ratio:
        sys.exit(1)


if __name__ == "__main__":
    main()
