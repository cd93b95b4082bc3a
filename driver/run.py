"""One run from its start to its end: the step loop and what stands around it.

A step is: enough groups, an update, closed books. Workers make the groups of later steps meanwhile,
as far as `rollout.max_staleness` lets them (`intake.py`). A learner that dies is replaced, and the
steps since its last checkpoint are taken again with the groups that were recorded.
"""

import contextlib
import errno
import math
import pathlib
import secrets
import time
from collections import deque
from typing import Any

import ray

from driver.actors import ActorFailed
from driver.cluster import check_bind_host, connect, reserve
from driver.config import RunConfig
from driver.errors import RunError
from driver.evaluation import eval_metrics
from driver.fleet import FleetEvents, Worker, WorkersLost
from driver.intake import Intake, StepBatch
from driver.lease_book import LeaseBook, LeaseState, TrajectoryState
from driver.ledger import StepLedger
from driver.metrics import MetricsLog, stored_run_id
from driver.plan import Prepared
from driver.signals import Interrupted, StopSignal
from driver.specs import learner_spec, rollout_spec
from driver.status import ExitCode, StatusFile
from driver.supervisor import LearnerLost, Supervisor, with_port
from driver.view import Accuracy, RunSummary, StepView, step_row, summary_lines
from learner.reports import Restored
from rollout_worker.orders import News, Orders
from services import failpoints
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
            session.work()
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
        self._reset()

    def _reset(self) -> None:
        """A run that has not taken a step."""
        self._step = 0
        self._version = 0
        self._rewards: list[float] = []
        self._step_s: list[float] = []
        self._accuracy: dict[int, Accuracy] = {}
        """By the step that was evaluated."""
        self._open: dict[str, float] | None = None
        """Metrics of a step that is trained but not yet closed."""
        self._replay: deque[Any] = deque()
        """Updates that were recorded after the checkpoint, to be made again."""
        self._leasing = False

    def start(self, prepared: Prepared) -> None:
        """Starts the learner, which workers dial; resumes and publishes; starts the workers."""
        config, self._authority = self._config, RunAuthority.create(self._run_id)
        self._prepared = prepared
        self._take_books(LeaseBook(seed=config.run.seed, prompt_count=prepared.prompts))
        self._held_out = min(config.eval.prompts or prepared.held_out, prepared.held_out)
        self._learner = self._supervisor.start_learner(self._learner_spec())
        if not self._learner["sees_output_folder"]:
            raise RunError(
                f"run.output_dir={self._folder} is not there on {self._learner['host']}, where "
                "the learner runs and writes checkpoints: use a folder that all hosts share"
            )
        if config.run.resume:
            self._resume()
        self._say_ready(self._learner)
        self._publish()
        self._supervisor.before_turn = self._before_turn
        self._supervisor.start_workers(
            lambda name: rollout_spec(
                config, name, self._run_id, self._authority, self._learner["address"]
            ),
            FleetEvents(
                ended=lambda result: self._intake.add(result),
                lost=self._take_back,
                news=self._hear,
                joined=self._join,
                left=lambda worker: self._view.say(f"{worker.name} has left"),
                warn=self._view.say,
            ),
            config.rollout.workers.at_start,
        )
        self._supervisor.laps()
        self._lap_started = time.monotonic()

    def work(self) -> None:
        """Takes every step that is left, whatever learners it takes, and leaves the results."""
        while True:
            try:
                self.train()
                self.finish()
                return
            except LearnerLost as error:
                self._recover(error)

    def train(self) -> None:
        """Takes every step that is left, after an evaluation that is due or was cut short."""
        self._leasing = True
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
                self._save_in_passing()

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

    def _save_in_passing(self) -> None:
        """Writes a checkpoint; one that fails is said, and the run goes on without it."""
        try:
            self.save()
        except ActorFailed as error:
            if "CheckpointFailed" not in str(error):
                raise
            self._view.say(f"step {self._step}: {error}; the run goes on, the next is due later")

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

    @property
    def _steps_left(self) -> int:
        """Steps that are not trained; one whose update is under way is among them."""
        return self._config.run.steps - self._step

    def _learner_spec(self):
        return learner_spec(
            self._config,
            self._folder,
            self._run_id,
            self._authority,
            ray.util.get_node_ip_address(),
        )

    def _take_books(self, book: LeaseBook) -> None:
        algorithm = self._config.algorithm
        resample = algorithm.zero_variance == "resample"
        self._book = book
        self._intake = Intake(
            book,
            wanted=self._config.rollout.prompts_per_step,
            max_staleness=self._config.rollout.max_staleness,
            resample_rounds=algorithm.resample_rounds if resample else 0,
        )

    def _recover(self, error: LearnerLost) -> None:
        """Replaces a learner that died, and goes back to its last checkpoint."""
        self._leasing = False
        self._supervisor.fleet.cancel_all()
        spec = with_port(self._learner_spec(), self._learner["address"])
        self._learner = self._supervisor.restart_learner(spec, error)
        self._reset()
        self._take_books(LeaseBook(seed=self._config.run.seed, prompt_count=self._prepared.prompts))
        self._resume()
        self._say_ready(self._learner)
        self._publish()
        address = self._learner["address"]
        self._supervisor.fleet.order_all(Orders(learner_address=address, sources=(address,)))

    def _publish(self) -> None:
        self._version = self._supervisor.learner(
            "publish", timeout_s=self._config.placement.startup_timeout_s
        )

    def _resume(self) -> None:
        """Puts every book back to the newest complete checkpoint, if there is one, and takes over
        what the learner has written down since."""
        restored: Restored | None = self._supervisor.learner(
            "restore", timeout_s=self._config.placement.startup_timeout_s
        )
        state = restored.driver_state if restored else None
        for reason in restored.skipped if restored else ():
            self._view.say(f"checkpoint skipped: {reason}")
        if restored is None or state is None:
            self._metrics.resume_at(BEFORE_ALL)
            self._ledger.restore({"totals": {}}, step=BEFORE_ALL)
            self._view.say(f"no checkpoint in {self._folder} yet: starting anew")
        else:
            self._step = restored.step
            book = LeaseBook.restore(
                state["book"], seed=self._config.run.seed, prompt_count=self._prepared.prompts
            )
            self._take_books(book)
            moved = self._metrics.resume_at(self._step)
            moved += self._ledger.restore(state["ledger"], step=self._step)
            self._rewards = [math.nan if r is None else r for r in state["rewards"]]
            self._accuracy = {s: Accuracy(correct=c, total=n) for s, c, n in state["accuracy"]}
            self._status.progress(self._step, last_checkpoint=self._step)
            self._view.say(
                f"resumed at step {self._step}, policy version {restored.policy_version}; {moved} "
                "later log lines moved to *.superseded.jsonl"
            )
        if restored is not None:
            self._replay = deque(restored.replay)
            self._intake.adopt(restored.waiting)
            self._view.say(
                f"of the time since then, {len(restored.replay)} updates are on record and "
                f"{len(restored.waiting)} groups wait"
            )

    def _before_turn(self) -> None:
        """Gives out as much work as there may be."""
        if self._leasing and not self._replay:
            fleet = self._supervisor.fleet
            fleet.grant(self._intake.lease(fleet.room(), self._version, self._steps_left))

    def _take_back(self, group_ids, expired: bool) -> None:
        self._book.give_back(group_ids, LeaseState.EXPIRED if expired else LeaseState.RETURNED)

    def _join(self, worker: Worker) -> None:
        digest = worker.about["prompts_digest"]
        if digest != self._prepared.digest:
            raise RunError(
                f"{worker.name} on {worker.about['host']} reads other training prompts than the "
                f"driver from data.train.source={self._config.data.train.source}: every host "
                "needs the same data and tokenizer"
            )
        self._say_ready(worker.about, again=worker.restarts > 0)

    def _say_ready(self, about: dict[str, Any], *, again: bool = False) -> None:
        what = "is back" if again else "is ready"
        self._view.say(
            f"{about['name']} {what}: {about['devices']}, process {about['pid']} on {about['host']}"
        )

    def _hear(self, worker: Worker, news: News) -> None:
        """What a worker tells beside the ends of its leases."""

    def _gather(self) -> StepBatch:
        """Waits until a step can be taken."""
        if self._replay:
            record = self._replay.popleft()
            ids = [*record.group_ids, *record.dropped_ids]
            return self._intake.repeat(record.group_ids, record.dropped_ids, self._reports(ids))
        while not self._intake.ready(self._version, self._steps_left):
            self._supervisor.turn()
            if self._intake.unconfirmed:
                self._intake.adopt(self._reports(sorted(self._intake.unconfirmed)))
        return self._intake.take(self._version)

    def _reports(self, group_ids: list[str]):
        return self._supervisor.learner("reports", group_ids, timeout_s=self._wait_s)

    def _train_step(self, step: int) -> dict[str, float]:
        """Prompts to groups to the next policy version; returns the step's metrics.

        A signal ends it before the learner was asked for the update, or not at all.
        """
        failpoints.reach("driver.step")
        started = time.monotonic()
        batch = self._gather()
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
            self._intake.discard(report.disowned)
            for group_id, outcome in report.outcomes.items():
                self._book.end(group_id, TrajectoryState(outcome))
            if report.replayed == "different":
                self._view.say(
                    f"step {step}: made again from the record, policy version "
                    f"{report.policy_version} came out different; {len(report.disowned)} groups "
                    "that rest on what it was are dropped"
                )
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
            "workers/restarts": float(self._supervisor.fleet.restarts),
            "learner/restarts": float(self._supervisor.learner_restarts),
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
        laps, gaps = self._supervisor.laps()
        now = time.monotonic()
        wall_s, self._lap_started = now - self._lap_started, now
        for name in gaps & laps.keys():
            # Its process did not exist for a part of the step.
            laps[name]["idle"] = laps[name].get("idle", 0.0) + max(
                0.0, wall_s - sum(laps[name].values())
            )
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
