"""Which steps are comparable.

A step is settled when every worker in it has worked before, no process compiled, and every process
reported its time: the time of other steps says little about the next one.
"""

from diagnosis.records.facts import StepFacts

ODD_SHARE = 0.01
"""Of the wall time: less compilation or absence than this does not unsettle a step."""


class Settling:
    """Tells settled steps from others; receives every step of a run in order."""

    def __init__(self):
        self._workers: frozenset[str] = frozenset()
        self._proven: set[str] = set()
        """Workers that have worked since they joined."""
        self._restarts = 0.0

    def is_settled(self, facts: StepFacts, *, starting: bool = False) -> bool:
        """Whether this step's time is representative of the next one.

        Args:
            starting: whether a process is starting now, according to the driver.
        """
        workers = frozenset(facts.workers)
        changed = workers != self._workers
        self._proven &= workers
        new = workers - self._proven
        self._proven |= {name for name in new if facts.phase_s(name, "prefill", "decode") > 0}
        restarts = sum(
            facts.metrics.get(name, 0.0) for name in ("workers/restarts", "learner/restarts")
        )
        restarted, self._restarts = restarts != self._restarts, restarts
        self._workers = workers
        compiled = any(
            facts.phase_s(process, "compile") > ODD_SHARE * facts.wall_s
            for process in facts.processes
        )
        absent = any(s > ODD_SHARE * facts.wall_s for s in facts.absent_s.values())
        odd = changed or new or restarted or compiled or absent or starting
        return facts.trained and not odd
