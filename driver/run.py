"""One run from its start to its end: the step loop and what stands around it.

The loop is synchronous: lease prompts, let the workers turn them into groups, let the learner make
the next policy version, close the books.
"""

import contextlib
import errno
import math
import pathlib
import secrets
import time

import ray

from driver.batch import collect_groups
from driver.cluster import check_bind_host, connect, reserve
from driver.config import RunConfig
from driver.errors import RunError
from driver.evaluation import eval_metrics
from driver.ledger import LeaseBook, StepLedger, TrajectoryState
from driver.metrics import MetricsLog, stored_run_id
from driver.plan import Prepared
from driver.signals import Interrupted, StopSignal
from driver.specs import learner_spec, rollout_spec
from driver.status import ExitCode, StatusFile
from driver.supervisor import Supervisor, WorkersLost
from driver.view import Accuracy, RunSummary, StepView, step_row, summary_lines
from services.tls import RunAuthority

RECENT_STEPS = 10
BEFORE_ALL = -1
"""A step before the evaluation at the start, which is step 0."""


def run(config: RunConfig, folder: pathlib.Path, prepared: Prepared) -> None:
    """Trains as configured; returns when all steps are done.

    Args:
        config: checked, with paths that actors understand.
        folder: absolute and claimed; everything the run leaves behind goes there.
        prepared: what `driver/plan.py` found in the data.

    Raises:
        Interrupted: after SIGINT or SIGTERM, with a checkpoint written.
        RunError: anything else that a person can act on; each names what was waited for.
    """
    check_bind_host(config.placement.bind_host)
    stop = StopSignal()
    stop.install()
    run_id = stored_run_id(folder, f"{config.run.name}-{secrets.token_hex(4)}")
    status = StatusFile(folder, run=config.run.name, run_id=run_id)
    stop.before_abort = lambda code: status.end(
        ExitCode(code), "ended at once by a second signal, without a checkpoint"
    )
    with status.tracked(), _readable(folder), contextlib.ExitStack() as stack:
        view = stack.enter_context(StepView(config.run.name))
        view.say(f"run {run_id}: outputs in {folder}")
        connect(config.run.name, stop)
        stack.callback(ray.shutdown)
        group = reserve(config.placement, config.rollout.workers.at_start, stop)
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
        session.start(prepared)
        try:
            session.train()
            session.finish()
        except (Interrupted, WorkersLost) as error:
            stop.acknowledge()
            view.say(f"{error}: writing a checkpoint; a further signal ends the run at once")
            session.close_and_save()
            session.summarise()
            raise
        session.summarise()


@contextlib.contextmanager
def _readable(folder: pathlib.Path):
    """Keeps messages readable: details go to a file, and a full disk is called one."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RunError(
            f"no space left on the disk of {folder}: free some, then go on with --resume"
        ) from error
    except RunError as error:
        if error.details:
            path = folder / "error.txt"
            path.write_text(error.details)
            error.args = (f"{error} (traceback: {path})",)
        raise


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
        self._lap_started = time.monotonic()
        self._step = 0
        self._version = 0
        self._rewards: list[float] = []
        self._step_s: list[float] = []
        self._accuracy: dict[int, Accuracy] = {}
        """By the step that was evaluated."""
        self._open: dict[str, float] | None = None
        """Metrics of a step that is trained but not yet closed."""

    def start(self, prepared: Prepared) -> None:
        """Starts the learner, which workers dial; resumes and publishes; starts the workers."""
        config, authority = self._config, RunAuthority.create(self._run_id)
        self._prepared = prepared
        self._book = LeaseBook(seed=config.run.seed, prompt_count=prepared.prompts)
        self._held_out = min(config.eval.prompts or prepared.held_out, prepared.held_out)
        learner = self._supervisor.start_learner(
            learner_spec(
                config, self._folder, self._run_id, authority, ray.util.get_node_ip_address()
            )
        )
        if not learner["sees_output_folder"]:
            raise RunError(
                f"run.output_dir={self._folder} is not there on {learner['host']}, where the "
                "learner runs and writes checkpoints: use a folder that all hosts share"
            )
        if config.run.resume:
            self._resume()
        self._version = self._supervisor.learner(
            "publish", timeout_s=config.placement.startup_timeout_s
        )
        workers = self._supervisor.start_workers(
            lambda name: rollout_spec(config, name, self._run_id, authority, learner["address"])
        )
        for actor in (learner, *workers):
            if actor.get("prompts_digest", prepared.digest) != prepared.digest:
                raise RunError(
                    f"{actor['name']} on {actor['host']} reads other training prompts than the "
                    f"driver from data.train.source={config.data.train.source}: every host needs "
                    "the same data and tokenizer"
                )
            self._view.say(
                f"{actor['name']} is ready: {actor['devices']}, process {actor['pid']} on "
                f"{actor['host']}"
            )
        self._supervisor.laps()
        self._lap_started = time.monotonic()

    def train(self) -> None:
        """Takes every step that is left, after an evaluation that is due or was cut short."""
        if self._eval_is_due() and self._step not in self._accuracy:
            self._close_step(self._evaluate())
        while self._step < self._config.run.steps:
            self._open = self._train_step(self._step + 1)
            self._step += 1
            if self._eval_is_due():
                self._open |= self._evaluate()
            self._close_step(self._open)
            every = self._config.checkpoint.every_steps
            if every and self._step % every == 0 and self._step < self._config.run.steps:
                self.save()

    def finish(self) -> None:
        """Leaves the last checkpoint and the exported policy."""
        self.save()
        if self._config.checkpoint.export_hf:
            self._supervisor.learner("export", str(self._folder / "export"), timeout_s=self._wait_s)

    def close_and_save(self) -> None:
        """Leaves a checkpoint when the run ends early: a step that was trained counts."""
        if self._open is not None:
            self._close_step(self._open)
        self.save()

    def save(self) -> None:
        """Writes a checkpoint of the last closed step, books included."""
        state = {
            "book": self._book.state(),
            "ledger": self._ledger.state(),
            "rewards": [r if math.isfinite(r) else None for r in self._rewards],
            "accuracy": [[step, a.correct, a.total] for step, a in self._accuracy.items()],
        }
        self._supervisor.learner("save", self._step, state, timeout_s=self._wait_s)
        self._status.progress(self._step, last_checkpoint=self._step)

    def summarise(self) -> None:
        """Prints what the run came to; the last line is for machines."""
        outputs = {"status, metrics, ledger, samples, eval, checkpoints": str(self._folder)}
        if self._step < self._config.run.steps:
            outputs["to go on, add to the same command"] = (
                f"--set run.output_dir={self._folder} --resume"
            )
        if (self._folder / "export").exists():
            outputs["policy as a Hugging Face folder"] = str(self._folder / "export")
        before = self._accuracy.get(0)
        after = [accuracy for step, accuracy in sorted(self._accuracy.items()) if step > 0]
        summary = RunSummary(
            name=self._config.run.name,
            rewards=self._rewards,
            accuracy_before=before,
            accuracy_after=after[-1] if after else None,
            seconds=time.time() - self._status.current.started,
            outputs=outputs,
        )
        for line in summary_lines(summary):
            self._view.say(line)

    @property
    def _wait_s(self) -> float:
        return self._config.placement.step_timeout_s

    def _resume(self) -> None:
        """Puts every book back to the newest complete checkpoint, if there is one."""
        restored = self._supervisor.learner(
            "restore", timeout_s=self._config.placement.startup_timeout_s
        )
        if restored is None:
            self._metrics.resume_at(BEFORE_ALL)
            self._ledger.restore(self._ledger.state(), step=BEFORE_ALL)
            self._view.say(f"--resume: no checkpoint in {self._folder} yet, starting anew")
            return
        for reason in restored.skipped:
            self._view.say(f"checkpoint skipped: {reason}")
        state = restored.driver_state
        self._step = restored.step
        self._book = LeaseBook.restore(
            state["book"], seed=self._config.run.seed, prompt_count=self._prepared.prompts
        )
        moved = self._metrics.resume_at(self._step)
        moved += self._ledger.restore(state["ledger"], step=self._step)
        self._rewards = [math.nan if r is None else r for r in state["rewards"]]
        self._accuracy = {s: Accuracy(correct=c, total=n) for s, c, n in state["accuracy"]}
        self._status.progress(self._step, last_checkpoint=self._step)
        self._view.say(
            f"resumed at step {self._step}, policy version {restored.policy_version}; {moved} "
            "later log lines moved to *.superseded.jsonl"
        )

    def _train_step(self, step: int) -> dict[str, float]:
        """Prompts to groups to the next policy version; returns the step's metrics.

        A signal ends it before the learner was asked for the update, or not at all.
        """
        started = time.monotonic()
        algorithm = self._config.algorithm
        batch = collect_groups(
            self._book,
            lambda leases: self._supervisor.rollout(leases, self._version),
            wanted=self._config.rollout.prompts_per_step,
            rounds=1 + algorithm.resample_rounds,
            resample=algorithm.zero_variance == "resample",
        )
        rollout_s = time.monotonic() - started
        metrics: dict[str, float] = {"train/update_skipped": 1.0}
        if batch.kept:
            report = self._supervisor.learner(
                "update",
                batch.kept,
                batch.dropped,
                self._wait_s,
                timeout_s=2 * self._wait_s,
                interruptible=False,
            )
            for group_id, outcome in report.outcomes.items():
                self._book.end(group_id, TrajectoryState(outcome))
            self._version = report.policy_version
            metrics = report.metrics
        metrics |= batch.metrics()
        update_s = time.monotonic() - started - rollout_s
        self._metrics.log_samples(step, batch.samples[: self._config.log.samples_per_step])
        self._rewards.append(metrics["reward/total/mean"])
        if problem := batch.reward_problem():
            self._view.say(f"step {step}: {problem}")
        if metrics["train/update_skipped"]:
            self._view.say(
                f"step {step}: the update was skipped; nothing was left to train on, or a number "
                "was not finite (then its groups are in rejected/)"
            )
        return metrics | {
            "time/train/rollout_generate_s": rollout_s,
            "time/train/update_s": update_s,
            "workers/restarts": float(self._supervisor.restarts),
        }

    def _eval_is_due(self) -> bool:
        settings = self._config.eval
        if self._step == 0:
            return settings.at_start
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
        self._accuracy[self._step] = Accuracy(correct=right, total=len(items))
        return metrics | {"time/eval_s": time.monotonic() - started}

    def _close_step(self, metrics: dict[str, float]) -> None:
        """Adds up the seconds since the last step was closed, and writes everything down."""
        laps = self._supervisor.laps()
        now = time.monotonic()
        wall_s, self._lap_started = now - self._lap_started, now
        for name in self._supervisor.take_replaced():
            # Its process did not exist for a part of the step.
            laps[name]["idle"] += max(0.0, wall_s - sum(laps[name].values()))
        record = self._ledger.close(self._step, laps, wall_s=wall_s, book=self._book)
        self._open = None
        metrics = metrics | {"time/train/step_s": wall_s}
        if "rollout/tokens" in metrics:
            self._step_s.append(wall_s)
            recent = self._step_s[-RECENT_STEPS:]
            metrics["time/train/step_avg_last10_s"] = sum(recent) / len(recent)
            slowest = max(p["prefill"] + p["decode"] for p in record.processes.values())
            metrics["throughput/train/decode_tokens_per_s"] = metrics["rollout/tokens"] / slowest
        for process, phases in record.processes.items():
            metrics |= {f"time/{process}/{phase}_s": s for phase, s in phases.items() if s > 0}
        written = self._metrics.log(self._step, metrics)
        if written.get("nonfinite"):
            self._view.say(f"step {self._step}: not finite: {', '.join(written['nonfinite'])}")
        self._status.progress(self._step)
        self._view.show(step_row(metrics, record, self._config.run.steps))
