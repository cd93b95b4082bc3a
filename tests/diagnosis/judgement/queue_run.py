"""A run made by a queue model of its own, to hold the What-if view's predictions against.

Nothing of the predicting model is used: groups of random lengths are given to workers one by one as
they become free, the learner trains when a batch is there, and every duration has noise.
"""

import dataclasses
import heapq
from collections.abc import Iterator

import numpy as np

from diagnosis.records.facts import StepFacts
from tests.diagnosis.judgement.step_facts import step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plant:
    """What the made-up machines are like."""

    groups: int = 16
    max_staleness: int = 0
    token_s: float = 0.002
    """Seconds of a worker for a token of a group, alone on its device."""
    update_s: float = 1.0
    weights_s: float = 0.1
    contention: float = 0.0
    """How much slower every worker gets with each further one: 1 on a host that is full."""
    noise: float = 0.08
    seed: int = 0

    def steps(self, workers_at: dict[int, int], count: int) -> Iterator[StepFacts]:
        """Steps of a run in which the number of workers changes.

        Args:
            workers_at: first step -> number of workers from then on.
        """
        rng = np.random.default_rng(self.seed)
        workers = 0
        for number in range(1, count + 1):
            before, workers = workers, workers_at.get(number, workers)
            yield self._step(rng, number, workers, starts=workers != before)

    def _step(self, rng, number: int, workers: int, *, starts: bool) -> StepFacts:
        lengths = rng.gamma(4.0, 25.0, self.groups)  # tokens of a group; mean 100
        slowness = 1 + self.contention * (workers - 1)
        free = [(0.0, i) for i in range(workers)]
        for length in lengths:
            at, i = heapq.heappop(free)
            took = length * self.token_s * slowness * self._noise(rng)
            heapq.heappush(free, (at + took, i))
        work = {i: at for at, i in free}
        weights_s = self.weights_s * self._noise(rng)
        update_s = self.update_s * self._noise(rng)
        rollout_s = max(work.values()) + weights_s
        compile_s = 2.0 if starts else 0.0
        hand_over_s = 0.03 * self._noise(rng)
        if self.max_staleness == 0:
            wall_s = rollout_s + update_s + hand_over_s + compile_s
            generate_s = rollout_s + compile_s
        else:
            wall_s = max(rollout_s, update_s) + hand_over_s + compile_s
            generate_s = max(0.0, rollout_s - update_s)
        last = workers - 1
        rows = [
            {"decode": s, "weights_swap": weights_s, "compile": compile_s if i == last else 0.0}
            for i, s in sorted(work.items())
        ]
        return step(
            number,
            wall_s=wall_s,
            learner={"forward_backward": update_s},
            workers=rows,
            metrics={
                "time/train/update_s": update_s,
                "time/train/rollout_generate_s": generate_s,
                "rollout/tokens": float(lengths.sum()),
                "rollout/completion_len_mean": float(lengths.mean()),
                "rollout/completion_len_max": float(lengths.max()),
            },
        )

    def _noise(self, rng) -> float:
        return float(rng.lognormal(0.0, self.noise))
