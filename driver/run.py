"""One run from its start to its end: the step loop and what stands around it.

The loop is synchronous: lease prompts, let the workers turn them into groups, let the learner make
the next policy version, close the books.
"""

import contextlib
import pathlib
import secrets
import time
from typing import Any

import ray

from driver.cluster import connect, reserve
from driver.config import RunConfig
from driver.errors import RunError
from driver.evaluation import eval_metrics
from driver.ledger import LeaseBook, StepLedger, TrajectoryState
from driver.metrics import MetricsLog, stored_run_id
from driver.signals import Interrupted, StopSignal
from driver.specs import learner_spec, rollout_spec
from driver.status import StatusFile
from driver.supervisor import Supervisor
from driver.view import Accuracy, RunSummary, StepView, step_row, summary_lines
from services.tls import RunAuthority

LOOPBACK = "127.0.0.1"
RECENT_STEPS = 10


def run(config: RunConfig, folder: pathlib.Path, *, prompts: int, held_out: int) -> None:
    """Trains as configured; returns when all steps are done.

    Args:
        config: checked, with paths that actors understand.
        folder: absolute; everything the run leaves behind goes there.
        prompts: how many prompts of data.train fit.
        held_out: how many prompts of data.eval fit; 0 without one.

    Raises:
        Interrupted: after SIGINT or SIGTERM, with a checkpoint written.
        ResourcesNotMet, LearnerLost, WorkersLost, TimeoutError: each names what was waited for.
    """
    stop = StopSignal()
    stop.install()
    folder.mkdir(parents=True, exist_ok=True)
    run_id = stored_run_id(folder, f"{config.run.name}-{secrets.token_hex(4)}")
    status = StatusFile(folder, run=config.run.name, run_id=run_id)
    with status.tracked(), contextlib.ExitStack() as stack:
        view = stack.enter_context(StepView(config.run.name))
        view.say(f"run {run_id}: outputs in {folder}")
        connect(config.run.name)
        stack.callback(ray.shutdown)
        stop.install()  # ray.init has set handlers of its own
        group = reserve(config.placement, config.rollout.workers, stop)
        supervisor = Supervisor(config, group, stop, warn=view.say)
        stack.callback(supervisor.shutdown)
        metrics = MetricsLog(
            folder,
            config.log.wandb,
            run_id=run_id,
            config=config.model_dump(mode="json"),
            warn=view.say,
        )
        stack.callback(metrics.close)
        ledger = StepLedger(
            folder, unexplained_fraction=config.log.unexplained_fraction, warn=view.say
        )
        stack.callback(ledger.close_log)
        session = Session(config, folder, run_id, supervisor, metrics, ledger, status, view)
        session.start(prompts=prompts, held_out=held_out)
        try:
            session.train()
        except Interrupted:
            stop.acknowledge()
            view.say("interrupted: writing a checkpoint; a second signal ends the run at once")
            session.save()
            session.summarise()
            raise
        session.finish()
        session.summarise()


class Session:
    """The books of one run and the order in which its actors are used."""

    def __init__(
        self,
        config: RunConfig,
        folder: pathlib.Path,
        run_id: str,
        supervisor: Supervisor,
        metrics: MetricsLog,
        ledger: StepLedger,
        status: StatusFile,
        view: StepView,
    ):
        self._config = config
        self._folder = folder
        self._run_id = run_id
        self._supervisor = supervisor
        self._metrics = metrics
        self._ledger = ledger
        self._status = status
        self._view = view
        self._started = self._lap_started = time.monotonic()
        self._step = 0
        self._version = 0
        self._rewards: list[float] = []
        self._step_s: list[float] = []
        self._accuracy: list[Accuracy] = []

    def start(self, *, prompts: int, held_out: int) -> None:
        """Starts the learner, which workers dial; resumes and publishes; starts the workers."""
        config, authority = self._config, RunAuthority.create(self._run_id)
        self._book = LeaseBook(seed=config.run.seed, prompt_count=prompts)
        self._held_out = min(config.eval.prompts or held_out, held_out)
        remote = config.placement.bind_host != LOOPBACK
        host = ray.util.get_node_ip_address() if remote else LOOPBACK
        learner = self._supervisor.start_learner(
            learner_spec(config, self._folder, self._run_id, authority, host)
        )
        if config.run.resume:
            self._resume(prompts)
        self._version = self._supervisor.learner(
            "publish", timeout_s=config.placement.startup_timeout_s
        )
        workers = self._supervisor.start_workers(
            lambda name: rollout_spec(config, name, self._run_id, authority, learner["address"])
        )
        for actor in (learner, *workers):
            self._view.say(
                f"{actor['name']} is ready: {actor['devices']}, process {actor['pid']} on "
                f"{actor['host']}"
            )
        self._supervisor.laps()
        self._lap_started = time.monotonic()

    def train(self) -> None:
        """Takes every step that is left."""
        if self._config.eval.at_start and self._step == 0:
            self._close_step(self._evaluate())
        while self._step < self._config.run.steps:
            self._step += 1
            metrics = self._train_step()
            if self._eval_is_due():
                metrics |= self._evaluate()
            self._close_step(metrics)
            every = self._config.checkpoint.every_steps
            if every and self._step % every == 0 and self._step < self._config.run.steps:
                self.save()

    def finish(self) -> None:
        """Leaves the last checkpoint and the exported policy."""
        self.save()
        if self._config.checkpoint.export_hf:
            self._supervisor.learner("export", str(self._folder / "export"), timeout_s=self._wait_s)

    def save(self) -> None:
        """Writes a checkpoint of the last closed step, books included."""
        state = {
            "run_id": self._run_id,
            "book": self._book.state(),
            "ledger": self._ledger.state(),
            "rewards": self._rewards,
            "accuracy": [[one.correct, one.total] for one in self._accuracy],
        }
        self._supervisor.learner("save", self._step, state, timeout_s=self._wait_s)
        self._status.progress(self._step, last_checkpoint=self._step)

    def summarise(self) -> None:
        """Prints what the run came to; the last line is for machines."""
        outputs = {"metrics, ledger, samples": str(self._folder)}
        if (self._folder / "export").exists():
            outputs["policy as a Hugging Face folder"] = str(self._folder / "export")
        after = self._accuracy[-1] if len(self._accuracy) > 1 else None
        summary = RunSummary(
            name=self._config.run.name,
            rewards=self._rewards,
            accuracy_before=self._accuracy[0] if self._accuracy else None,
            accuracy_after=after,
            seconds=time.monotonic() - self._started,
            outputs=outputs,
        )
        for line in summary_lines(summary):
            self._view.say(line)

    @property
    def _wait_s(self) -> float:
        return self._config.placement.step_timeout_s

    def _resume(self, prompts: int) -> None:
        """Puts every book back to the newest complete checkpoint, if there is one."""
        restored = self._supervisor.learner(
            "restore", timeout_s=self._config.placement.startup_timeout_s
        )
        if restored is None:
            self._view.say("run.resume is set, but there is no checkpoint: starting anew")
            return
        for reason in restored.skipped:
            self._view.say(f"checkpoint skipped: {reason}")
        state = restored.driver_state
        self._step = restored.step
        self._book = LeaseBook.restore(
            state["book"], seed=self._config.run.seed, prompt_count=prompts
        )
        moved = self._metrics.resume_at(self._step)
        moved += self._ledger.restore(state["ledger"], step=self._step)
        self._rewards = list(state["rewards"])
        self._accuracy = [Accuracy(correct=c, total=n) for c, n in state["accuracy"]]
        self._status.progress(self._step, last_checkpoint=self._step)
        self._view.say(
            f"resumed at step {self._step}, policy version {restored.policy_version}; {moved} "
            "later log lines moved to *.superseded.jsonl"
        )

    def _train_step(self) -> dict[str, float]:
        """Prompts to groups to the next policy version; returns the step's metrics."""
        started = time.monotonic()
        kept, dropped, tokens, samples = self._collect_groups()
        rollout_s = time.monotonic() - started
        report = self._supervisor.learner(
            "update", kept, dropped, self._wait_s, timeout_s=2 * self._wait_s, interruptible=False
        )
        update_s = time.monotonic() - started - rollout_s
        for group_id, outcome in report.outcomes.items():
            self._book.end(group_id, TrajectoryState(outcome))
        self._version = report.policy_version
        self._metrics.log_samples(self._step, samples)
        self._rewards.append(report.metrics.get("reward/total/mean", float("nan")))
        if report.metrics["train/update_skipped"]:
            self._view.say(
                f"step {self._step}: the update was skipped; nothing was left to train on, or a "
                "number was not finite (see rejected/)"
            )
        return report.metrics | {
            "time/train/rollout_generate_s": rollout_s,
            "time/train/update_s": update_s,
            "throughput/train/decode_tokens_per_s": tokens / rollout_s,
            "rollout/resampled_groups": float(len(dropped)),
            "workers/restarts": float(self._supervisor.restarts),
        }

    def _collect_groups(self) -> tuple[list[str], list[str], int, list[dict[str, Any]]]:
        """Has enough prompts completed, replacing groups of equal rewards where configured.

        Returns:
            group ids to train on and group ids to drop, in the order of the data; completion
            tokens; and samples for the log.
        """
        wanted = self._config.rollout.prompts_per_step
        resample = self._config.algorithm.zero_variance == "resample"
        rounds = 1 + (self._config.algorithm.resample_rounds if resample else 0)
        kept: list[str] = []
        dropped: list[str] = []
        samples: list[dict[str, Any]] = []
        tokens = 0
        for _ in range(rounds):
            leases = self._book.lease(wanted - len(kept))
            for report in self._supervisor.rollout(leases, self._version):
                samples += report.samples
                for group in report.groups:
                    tokens += group.completion_tokens
                    if group.outcome == "duplicate":
                        self._book.end(group.group_id, TrajectoryState.DUPLICATE)
                    if resample and group.zero_variance:
                        self._book.end(group.group_id, TrajectoryState.DROPPED_ZERO_VARIANCE)
                        dropped.append(group.group_id)
                    else:
                        kept.append(group.group_id)
            if len(kept) == wanted:
                break
        if not kept:
            raise NoVariance(
                f"step {self._step}: every group of {rounds} rounds had equal rewards, so there is "
                "nothing to learn: check the reward functions and the difficulty of the prompts"
            )
        return sorted(kept), sorted(dropped), tokens, samples[: self._config.log.samples_per_step]

    def _eval_is_due(self) -> bool:
        settings = self._config.eval
        if self._step == self._config.run.steps:
            return settings.at_end
        return bool(settings.every_steps) and self._step % settings.every_steps == 0

    def _evaluate(self) -> dict[str, float]:
        """Scores the held-out prompts under the current policy and notes every item."""
        started = time.monotonic()
        items = self._supervisor.evaluate(range(self._held_out), self._version)
        items.sort(key=lambda item: (item["prompt_id"], item["sample_index"]))
        self._metrics.log_eval(self._step, items)
        scorer = self._config.reward.functions[0].name
        metrics = eval_metrics(items, scorer=scorer, pass_k=self._config.eval.pass_k)
        right = round(metrics["eval/accuracy/strict"] * len(items))
        self._accuracy.append(Accuracy(correct=right, total=len(items)))
        return metrics | {"time/eval_s": time.monotonic() - started}

    def _close_step(self, metrics: dict[str, float]) -> None:
        """Adds up the seconds since the last step was closed, and writes everything down."""
        laps = self._supervisor.laps()
        now = time.monotonic()
        wall_s, self._lap_started = now - self._lap_started, now
        record = self._ledger.close(self._step, laps, wall_s=wall_s, book=self._book)
        self._step_s.append(wall_s)
        recent = self._step_s[-RECENT_STEPS:]
        metrics = metrics | {
            "time/train/step_s": wall_s,
            "time/train/step_avg_last10_s": sum(recent) / len(recent),
        }
        for process, phases in record.processes.items():
            metrics |= {f"time/{process}/{phase}_s": s for phase, s in phases.items() if s > 0}
        written = self._metrics.log(self._step, metrics)
        if written.get("nonfinite"):
            self._view.say(f"step {self._step}: not finite: {', '.join(written['nonfinite'])}")
        self._status.progress(self._step)
        self._view.show(step_row(metrics, record, self._config.run.steps))


class NoVariance(RunError):
    """A step found nothing to learn from."""
