"""Reports of a run: closes each step, writes its records, shows it, and sums up the run."""

import dataclasses
import math
import pathlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from driver.accounting.intake import StepBatch
from driver.accounting.ledger import StepLedger, StepRecord
from driver.accounting.quarantine import FILE as QUARANTINE
from driver.accounting.queue_gauges import QueueGauges, queue_metrics
from driver.accounting.run_spending import FILE as SPENDING
from driver.accounting.run_state import RunState
from driver.accounting.step_timing import RunTiming
from driver.config.sections.log import LogConfig
from driver.config.sections.run import RunSection
from driver.reports.dropped import DroppedLog
from driver.reports.metrics import MetricsLog
from driver.reports.run_summary import RunSummary, summary_lines
from driver.reports.status import StatusFile
from driver.reports.timeline import Timeline
from learner.learner_records import LearnerInfo, UpdateReport
from rollout_worker.environments.environment_use import EnvironmentUse
from rollout_worker.rewards.spending import NOTHING, Spending
from rollout_worker.sample_record import FIRST, Sample
from rollout_worker.worker_records import EngineUse, EvalItem, News, WorkerInfo
from services.process.process_memory import ProcessMemory
from services.weights.replica import PullStats

RECENT_STEPS = 10
SHOWN_PROMPTS = 5


class DecodeRate:
    """Tokens per second of decoding, by the seconds of the busiest worker.

    In an asynchronous run the groups of a step were decoded in the seconds of earlier steps, so
    that only sums over several steps match.
    """

    def __init__(self, max_staleness: int):
        self._steps: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS if max_staleness else 1)
        self._earlier_s = 0.0

    def add_earlier(self, decode_s: float) -> None:
        """Adds seconds of a row of the ledger that is no step, as of the start of a run, in which
        groups of the next step were decoded.
        """
        self._earlier_s += decode_s

    def add_step(self, tokens: float, decode_s: float) -> float | None:
        """The rate with the next step, whose busiest worker decoded for `decode_s`; None for 0, as
        while recorded groups train again.
        """
        decode_s, self._earlier_s = decode_s + self._earlier_s, 0.0
        if decode_s <= 0:
            return None
        self._steps.append((tokens, decode_s))
        return sum(one[0] for one in self._steps) / sum(one[1] for one in self._steps)


class StepReports:
    """Owns ledger, timeline, metrics log, status and view of one run."""

    def __init__(
        self,
        run: RunSection,
        log: LogConfig,
        folder: pathlib.Path,
        *,
        max_staleness: int,
        metrics: MetricsLog,
        ledger: StepLedger,
        timeline: Timeline,
        dropped: DroppedLog,
        status: StatusFile,
        say: Callable[[str], None],
        show_step: Callable[[Mapping[str, float], StepRecord], None],
    ):
        """Args:
        say: shows one line.
        show_step: shows the metrics and the ledger record of a closed step.
        """
        self._run = run
        self._log = log
        self._folder = folder
        self._metrics = metrics
        self._ledger = ledger
        self._timeline = timeline
        self._dropped = dropped
        self._status = status
        self._show_step = show_step
        self._step_s: list[float] = []
        self._decoded = DecodeRate(max_staleness)
        self._step_started = time.monotonic()
        self._transfers: list[PullStats] = []
        self._canary_gaps: list[float] = []
        self._background_s: dict[str, float] = {}
        self._engines: dict[str, EngineUse] = {}
        self._environment = EnvironmentUse()
        self.queues = QueueGauges()
        """Receives the queue lengths from the step loop."""
        self.say = say

    def start_step(self, at_s: float) -> None:
        """The seconds of the first step count from this moment of the monotonic clock."""
        self._step_started = at_s

    def show_joined(self, info: LearnerInfo | WorkerInfo, *, again: bool) -> None:
        """Shows that a process serves, and where and on what it runs."""
        self.say(
            f"{info.name} {'is back' if again else 'is ready'}: {info.devices}, process "
            f"{info.pid} on {info.host}"
        )

    def record_news(self, worker: str, news: News) -> None:
        """Keeps what a worker reports besides the ends of its leases, for the open step."""
        self._transfers += news.transfers
        self._environment += news.environment
        if not math.isnan(news.canary_gap):
            self._canary_gaps.append(news.canary_gap)
        for thread, seconds in news.background_s.items():
            name = f"time/{worker}/background_{thread}_s"
            self._background_s[name] = self._background_s.get(name, 0.0) + seconds
        self._engines[worker] = self._engines.get(worker, EngineUse()) + news.engine

    def show_divergence(self, step: int, report: UpdateReport) -> None:
        """Shows that a recorded update did not reproduce its policy version."""
        self.say(
            f"step {step}: made again from the record, policy version {report.policy_version} "
            f"differs; {len(report.disowned)} groups that were sampled under it are dropped"
        )

    def show_problems(self, step: int, batch: StepBatch, skip_cause: str) -> None:
        """Shows problems of a step that a user should see at once.

        Args:
            skip_cause: why its update was skipped; empty where it was made.
        """
        if problem := batch.reward_problem():
            self.say(f"step {step}: {problem}")
        if skip_cause:
            self.say(f"step {step}: the update was skipped: {skip_cause}")

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Writes a few completions of a step down."""
        chosen = choose_samples(samples, self._log.samples_per_step)
        self._metrics.log_samples(step, chosen)

    def write_evaluation(
        self,
        step: int,
        items: Sequence[EvalItem],
        correct: Sequence[bool | None],
        *,
        evaluated_step: int,
    ) -> None:
        """Writes every held-out completion down, and whether it counts as right.

        Args:
            step: whose line of metrics has the result.
            evaluated_step: after which the policy was evaluated; training may have gone on since.
        """
        records = (
            {**dataclasses.asdict(item), "evaluated_step": evaluated_step, "correct": right}
            for item, right in zip(items, correct, strict=True)
        )
        self._metrics.log_eval(step, records)

    def record_checkpoint(self, step: int, saved_step: int) -> None:
        """Notes a checkpoint that is complete.

        Args:
            step: the last that is closed.
            saved_step: of the checkpoint.
        """
        self._status.progress(step, last_checkpoint=saved_step)

    def ledger_state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return self._ledger.state()

    def rewind(self, step: int, ledger_state: Mapping[str, Any]) -> int:
        """Moves the lines after a checkpoint's step aside; returns how many."""
        self._step_s = []
        moved = self._metrics.resume_at(step) + self._timeline.rewind(step)
        moved += self._dropped.rewind(step)
        return moved + self._ledger.restore(ledger_state, step=step)

    def close_step(
        self,
        state: RunState,
        metrics: dict[str, float],
        timings: RunTiming,
        memory: Mapping[str, ProcessMemory],
        *,
        spent: Spending = NOTHING,
    ) -> StepRecord:
        """Adds up the seconds since the last step was closed, and writes everything down.

        Args:
            timings: of every process; the step ends where they do.
            memory: of every process that has reported it.
            spent: by scorers since the step before.
        """
        started_s, self._step_started = self._step_started, timings.at_s
        wall_s = timings.at_s - started_s
        record = self._ledger.close_step(
            state.step,
            timings.seconds(),
            wall_s=wall_s,
            leases=state.leases,
            gaps=timings.gaps,
            spent=dataclasses.asdict(spent) if spent else {},
        )
        self._dropped.write_groups(state.step, record.groups)
        gauges = self.queues.take_gauges()
        self._timeline.record_step(state.step, timings, gauges, start_s=started_s)
        metrics = metrics | {"time/train/step_s": wall_s} | self._take_background()
        metrics |= queue_metrics(gauges, timings.at_s) | engine_metrics(self._engines)
        self._engines = {}
        environment, self._environment = self._environment, EnvironmentUse()
        metrics |= environment.metrics(wall_s)
        for process, held in memory.items():
            metrics |= held.metrics(process)
        metrics |= {f"leases/{name}": float(n) for name, n in state.leases.lease_totals.items()}
        decoded = (p["prefill"] + p["decode"] for p in record.processes.values())
        slowest = max(decoded, default=0.0)
        if "rollout/tokens" not in metrics:
            self._decoded.add_earlier(slowest)
        else:
            self._step_s.append(wall_s)
            recent = self._step_s[-RECENT_STEPS:]
            metrics["time/train/step_avg_last10_s"] = sum(recent) / len(recent)
            if rate := self._decoded.add_step(metrics["rollout/tokens"], slowest):
                metrics["throughput/train/decode_tokens_per_s"] = rate
        for process, phases in record.processes.items():
            metrics |= {f"time/{process}/{phase}_s": s for phase, s in phases.items() if s > 0}
        written = self._metrics.log(state.step, metrics)
        if names := ", ".join(written.get("nonfinite", ())):
            self.say(f"step {state.step}: not finite: {names}")
        self._status.progress(state.step)
        self._show_step(metrics, record)
        return record

    def summarise(
        self,
        state: RunState,
        resumed_at: int | None,
        *,
        set_aside: Sequence[int] = (),
        spent: Spending = NOTHING,
    ) -> None:
        """Prints the results of the run; scripts read the last line.

        Args:
            resumed_at: the step that this start of the run went on from, if it was a resume.
            set_aside: positions of prompts that ended their workers and are not leased any more.
            spent: by scorers in the whole run.
        """
        outputs = {"status, metrics, ledger, samples, eval, checkpoints": str(self._folder)}
        if state.step < self._run.steps:
            outputs["to continue, add to the same command"] = (
                f"--set run.output_dir={self._folder} --resume"
            )
        if set_aside:
            shown = ", ".join(map(str, sorted(set_aside)[:SHOWN_PROMPTS]))
            more = ", ..." if len(set_aside) > SHOWN_PROMPTS else ""
            outputs[f"prompts set aside, since they ended workers ({shown}{more})"] = str(
                self._folder / QUARANTINE
            )
        if spent:
            outputs[f"spent by scorers ({spent})"] = str(self._folder / SPENDING)
        if (self._folder / "export").exists():
            outputs["policy as a Hugging Face folder"] = str(self._folder / "export")
        if (self._folder / "adapter").exists():
            outputs["adapter as a PEFT folder"] = str(self._folder / "adapter")
        if self._log.dashboard.enabled:
            outputs["to show it again"] = f"python -m dashboard --run {self._folder}"
        summary = RunSummary(
            name=self._run.name,
            rewards=state.rewards,
            accuracy=state.evaluations.accuracy,
            seconds=time.time() - self._status.current.started,
            outputs=outputs,
            resumed_at=resumed_at,
        )
        for line in summary_lines(summary):
            self.say(line)

    def _take_background(self) -> dict[str, float]:
        """Metrics of the workers' background work since the last step was closed."""
        metrics, self._background_s = self._background_s, {}
        if self._transfers:
            metrics |= transfer_metrics(self._transfers)
        if self._canary_gaps:
            metrics["canary/gap_max"] = max(self._canary_gaps)
        self._transfers, self._canary_gaps = [], []
        return metrics


def transfer_metrics(transfers: Sequence[PullStats]) -> dict[str, float]:
    """Transfers of policy versions to the workers, as `weights/*`.

    Args:
        transfers: at least one.
    """
    wire = sum(one.wire_bytes for one in transfers)
    seconds = sum(one.seconds for one in transfers)
    return {
        "weights/pulls": float(len(transfers)),
        "weights/wire_bytes": float(wire),
        "weights/version_bytes": float(sum(one.version_bytes for one in transfers)),
        "weights/delta_fraction": sum(one.delta for one in transfers) / len(transfers),
        "weights/pull_s_max": max(one.seconds for one in transfers),
        "weights/gb_per_s": wire / 1e9 / seconds if seconds else 0.0,
        "weights/relay_depth_max": float(max(one.depth for one in transfers)),
        "weights/failures": float(sum(len(one.failures) for one in transfers)),
    }


def choose_samples(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Samples chosen for a reason before first completions of groups, each kind half of them.

    Where there are too few of one kind, the other fills up.
    """
    plain = [sample for sample in samples if sample["why"] == FIRST]
    telling = [sample for sample in samples if sample["why"] != FIRST]
    room = max(count - len(plain), count - count // 2)
    return [*telling[:room], *plain][:count]


def engine_metrics(engines: Mapping[str, EngineUse]) -> dict[str, float]:
    """Of the engines of a step, by worker; those of what is parked only for several turns."""
    metrics: dict[str, float] = {}
    if slot_steps := sum(use.slot_steps for use in engines.values()):
        drawn = sum(use.tokens for use in engines.values())
        metrics["throughput/train/slot_occupancy"] = drawn / slot_steps
    parking = {worker: use for worker, use in engines.items() if use.parked is not None}
    for worker, use in parking.items():
        metrics[f"mem/{worker}/parked_episodes"] = float(use.parked or 0)
        metrics[f"mem/{worker}/parked_bytes"] = float(use.parked_bytes)
    if parking:
        uses = list(parking.values())
        metrics["environment/prefilled_tokens"] = float(sum(u.prefilled_tokens for u in uses))
        metrics["environment/reused_tokens"] = float(sum(u.reused_tokens for u in uses))
    return metrics
