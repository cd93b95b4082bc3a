"""The step loop of a run.

A step is: enough groups, an update, closed accounting. Workers make the groups of later steps
meanwhile, as far as `rollout.max_staleness` lets them (`intake.py`). A learner that dies is
replaced, and the steps since its last checkpoint are taken again with the recorded groups.
"""

import contextlib
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from driver.accounting.intake import StepBatch
from driver.accounting.leases import LeaseState, TrajectoryState
from driver.accounting.quarantine import Quarantine
from driver.accounting.run_spending import RunSpending, spending_metrics
from driver.accounting.run_state import RunState
from driver.checkpoints import Checkpoints
from driver.config.prepare import Prepared
from driver.config.sections.checkpoint import CheckpointConfig
from driver.config.sections.placement import PlacementConfig
from driver.config.sections.run import RunSection
from driver.errors import NothingTrained, RunError
from driver.evaluation.evaluator import Evaluator
from driver.fleet.actor_calls import LearnerLost, NoAnswer
from driver.fleet.fleet import WorkerFleet
from driver.fleet.fleet_size import Scaler
from driver.fleet.fleet_worker import FleetEvents, Worker
from driver.reports.step_report import StepReports
from driver.supervisor import Supervisor, keep_asking
from learner.durable.spool import CLAIM_S
from learner.learner_records import Restored
from rollout_worker.config.data_config import DataConfig
from rollout_worker.worker_records import LeaseResult, News, Orders, WorkerInfo
from services.process import failpoints
from services.process.phases import LEARNER
from services.trajectories.group_report import GroupReport
from services.wire.messages import Lease

UNSCORED_STEPS = 5
"""Steps after which a run ends that has scored no completion yet."""
BEFORE_ALL = -1
"""A step before the evaluation at the start, which is step 0."""


class Session:
    """One run in its order: start, steps, checkpoints, end."""

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        run: RunSection,
        data: DataConfig,
        checkpoint: CheckpointConfig,
        placement: PlacementConfig,
        prepared: Prepared,
        new_state: Callable[[Restored | None], RunState],
        quarantine: Quarantine,
        spending: RunSpending,
        supervisor: Supervisor,
        evaluator: Evaluator,
        reports: StepReports,
    ):
        """Args:
        folder: of the run.
        prepared: what `driver/config/plan.py` found in the data.
        new_state: makes the state of a run that begins, or goes on from a checkpoint.
        quarantine: prompts that are not leased; the states that are made know of it.
        spending: what the run's scorers have spent.
        """
        self._folder = folder
        self._run = run
        self._data = data
        self._checkpoint = checkpoint
        self._startup_s, self._wait_s = placement.startup_timeout_s, placement.step_timeout_s
        self._prepared = prepared
        self._new_state = new_state
        self._supervisor = supervisor
        self._evaluator = evaluator
        self._reports = reports
        self._say = reports.say
        self._quarantine = quarantine
        self._spending = spending
        self._state = new_state(None)
        self._resumed_at = 0 if run.resume else None
        """The step that this start of the run went on from."""
        self._leasing = False
        self._has_workers = False
        """Whether the initial workers were ready once."""
        self._agreed = False
        """Whether the learner is where the run state is, so that a checkpoint may be written."""
        self._checkpoints = Checkpoints(
            checkpoint,
            supervisor=supervisor,
            reports=reports,
            warn=self._warn,
            wait_s=placement.step_timeout_s,
        )
        self.worker_errors: list[str] = []
        """Why processes were replaced, and what else was warned of, since a step was last closed;
        the newest last."""
        self.overcome_errors: list[str] = []
        """What was before: the run has gone on after it."""

    def start(self, make_scaler: Callable[[WorkerFleet], Scaler]) -> None:
        """Starts the learner.

        Args:
            make_scaler: keeps a fleet at the size that is wanted.
        """
        self._supervisor.start_learner()
        fleet = self._supervisor.make_fleet(
            FleetEvents(
                ended=self._record_end,
                killed=self._record_death,
                must_be_alone=self._quarantine.is_suspect,
                void=self._return_leases,
                news=self._record_news,
                joined=self._admit,
                left=self._release,
                warn=self._warn,
            )
        )
        self._scaler = make_scaler(fleet)
        if self._spending.refusal:
            self._say_spent()

    def work(self) -> None:
        """Takes every step that is left, whatever learners it takes, and leaves the results."""
        lost: LearnerLost | None = None
        while True:
            try:
                if lost is not None:
                    self._replace_learner(lost)
                if not self._agreed:
                    self._begin(again=lost is not None)
                self._train()
                self._finish()
                return
            except LearnerLost as error:
                lost, self._agreed = error, False

    def close_and_save(self) -> None:
        """Leaves a checkpoint when the run ends early: a step that was trained counts.

        Where there can be none, the one before and what was recorded since say as much.
        """
        self._leasing = False
        self._supervisor.fleet.stop_starting()
        try:
            if not self._agreed:
                raise LearnerLost("the learner was not ready")
            if self._state.open is not None:
                self._close_step(self._state.open)
            self._checkpoints.save_last(self._state)
        except (LearnerLost, NoAnswer) as error:
            self._say(f"no checkpoint was written, {error}: --resume goes on from the record")

    def close(self) -> None:
        """Ends the processes; a checkpoint in the background counts if it is complete by then."""
        self._checkpoints.record(self._supervisor.shutdown(), self._state)

    def summarise(self) -> None:
        """Prints what the run came to; the last line is for machines."""
        set_aside = [*self._quarantine.set_aside]
        self._reports.summarise(
            self._state, self._resumed_at, set_aside=set_aside, spent=self._spending.total
        )

    def check_trained(self) -> None:
        """Checks that the run came to something.

        Raises:
            NothingTrained: if every update was skipped, with the cause.
        """
        if self._state.failure:
            raise NothingTrained(self._state.failure)

    def tables(self) -> dict[str, Any]:
        """What only the driver knows of its processes and leases, for a post-mortem."""
        return self._supervisor.tables() | {"leases": self._state.leases.lease_totals}

    def _train(self) -> None:
        """Takes every step that is left, after an evaluation that is due or was cut short."""
        state, steps = self._state, self._run.steps
        first = state.step
        self._leasing = True
        if metrics := self._evaluator.catch_up(state):
            self._close_step(metrics)
        while state.step < steps:
            state.open = self._train_step(state.step + 1)
            state.step += 1
            state.open |= self._evaluator.end_step(state, self._without_leases)
            self._close_step(state.open)
            if state.step - first >= UNSCORED_STEPS and state.never_scored:
                self._say(f"no completion was scored in {state.step} steps: the run ends here")
                return
            if state.step < steps:
                self._checkpoints.save_in_passing(state)

    def _finish(self) -> None:
        """Leaves the last checkpoint and the exported policy, unless it is the initial one."""
        self._checkpoints.save_last(self._state)
        if self._prepared.adapter is not None and not self._state.failure:
            folder = str(self._folder / "adapter")
            written = self._supervisor.learner.export_adapter(folder)
            self._supervisor.wait_for(written, timeout_s=self._wait_s)
            self._say(f"wrote the adapter to {folder}, as PEFT reads it")
        if self._checkpoint.export_hf and not self._state.failure:
            exported = self._supervisor.learner.export(str(self._folder / "export"))
            dtypes = self._supervisor.wait_for(exported, timeout_s=self._wait_s)
            chosen = self._checkpoint.export_dtype
            why = f"={chosen}" if chosen else " is null: as it came in, bfloat16 if quantised"
            self._say(f"exported the policy in {dtypes} (checkpoint.export_dtype{why})")

    @property
    def _steps_left(self) -> int:
        """Steps that are not trained; one whose update is under way is among them."""
        return self._run.steps - self._state.step

    def _replace_learner(self, error: LearnerLost) -> None:
        """Starts a learner in place of one that died."""
        self._leasing = False
        self.worker_errors.append(str(error))
        self._supervisor.fleet.cancel_all()
        self._evaluator.cancel(self._state)
        self._supervisor.restart_learner(error)

    def _begin(self, *, again: bool) -> None:
        """Restores what was recorded of the run, offers the policy, and waits for workers.

        Args:
            again: whether a learner of this run was there before.
        """
        fleet, learner = self._supervisor.fleet, self._supervisor.learner_info
        if not learner.sees_output_folder:
            raise RunError(
                f"run.output_dir={self._folder} is not there on {learner.host}, where the learner "
                "runs and writes checkpoints: use a folder that all hosts share"
            )
        issued = self._resume() if again or self._run.resume else {}
        if self._run.resume and not again:
            self._resumed_at = self._state.step
        self._reports.show_joined(learner, again=False)
        self._state.policy_version = self._supervisor.wait_for(
            self._supervisor.learner.publish(), timeout_s=self._startup_s
        )
        fleet.order_all(Orders(learner_address=learner.address))
        fleet.send_sources(learner.address)
        for worker in fleet.ready():
            if worker.policy_version >= 0 and worker.policy_version not in issued:
                worker.order(Orders(refetch=True))
        if not self._has_workers:
            self._supervisor.start_workers()
            self._supervisor.before_turn = self._before_turn
            self._supervisor.background = lambda: self._evaluator.calls
            self._reports.start_step(self._supervisor.step_timings().at_s)
        self._agreed = self._has_workers = True

    def _resume(self) -> dict[int, str]:
        """Sets the run state back to the newest complete checkpoint, if there is one, and adds
        what the learner has written down since.

        Returns:
            digest by version of what the learner before had issued since that checkpoint.
        """
        self._checkpoints.forget()
        restored = self._supervisor.wait_for(
            self._supervisor.learner.restore(), timeout_s=CLAIM_S + self._startup_s
        )
        for reason in restored.skipped if restored else ():
            self._warn(f"checkpoint skipped: {reason}")
        if restored is not None and restored.repaired:
            self._say(restored.repaired)
        for reason in restored.set_aside if restored else ():
            self._warn(f"an accepted group cannot train and is set aside: {reason}")
        self._state = self._new_state(restored)
        if restored is None or restored.driver_state is None:
            self._reports.rewind(BEFORE_ALL, {"totals": {}})
            self._say(f"no checkpoint in {self._folder} yet: starting anew")
        else:
            with keep_asking(self._supervisor.learner):  # the logs of a long run are large
                moved = self._reports.rewind(restored.step, restored.driver_state["ledger"])
            self._reports.record_checkpoint(restored.step, restored.step)
            self._say(
                f"resumed at step {restored.step}, policy version {restored.policy_version}; "
                f"{moved} later log lines moved to *.superseded.jsonl"
            )
        if restored is None:
            return {}
        self._say(
            f"on record since then: {len(restored.replay)} updates, which are made again, and "
            f"{len(restored.waiting)} groups that wait"
        )
        return restored.issued

    def _before_turn(self) -> None:
        """Leases as many groups as may be under way, and keeps the fleet at its size."""
        state, fleet = self._state, self._supervisor.fleet
        self._scaler.turn(state.step, self._reports.queues.newest)
        if self._leasing and not state.replay:
            fleet.dispatch_leases(
                state.intake.grant_leases(
                    fleet.free_capacity(), state.policy_version, self._steps_left
                )
            )
        self._evaluator.turn(state)
        self._record_queues()

    def _record_queues(self) -> None:
        state = self._state
        self._reports.queues.record_counts(
            state.intake.waiting, state.leases.out, state.policy_version
        )

    def _record_news(self, worker: Worker, news: News) -> None:
        self._reports.record_news(worker.name, news)
        if self._spending.add_spending(news.spent):
            self._say_spent()
            self._supervisor.fleet.order_all(Orders(stop_spending=self._spending.refusal))

    def _say_spent(self) -> None:
        self._warn(
            f"{self._spending.refusal}. Until then each completion that a judge should score gets "
            "an error"
        )

    def _record_end(self, result: LeaseResult) -> None:
        self._quarantine.clear_group(result.group_id)
        self._state.intake.record_result(result)

    def _record_death(self, begun: Sequence[Lease], cause: str) -> bool:
        """Holds the death of a worker against the groups that it was at; true if one is set aside
        for it.
        """
        aside = self._quarantine.record_death(begun, cause)
        if aside is not None:
            self._warn(
                f"prompt {aside.position} of data.train{self._source_of(aside.position)} is set "
                f"aside (quarantine.json): {aside.deaths} workers ended while they completed or "
                f"scored its group {aside.group_id}, the last one alone; {cause}"
            )
        return aside is not None

    def _source_of(self, position: int) -> str:
        """Names the source of a prompt, where there are several."""
        order = self._prepared.order
        return f" (of {order.source_of_position(position).name})" if order.is_mixed else ""

    def _return_leases(self, group_ids: Sequence[str], expired: bool) -> None:
        how = LeaseState.EXPIRED if expired else LeaseState.RETURNED
        self._state.leases.return_leases(group_ids, how)

    def _admit(self, worker: Worker, info: WorkerInfo) -> None:
        """Checks a worker that is ready, and connects it with the others."""
        self._prepared.check_worker(info, self._data)
        self._reports.show_joined(info, again=worker.restarts > 0)
        address = self._supervisor.learner_info.address
        # The address may have moved since the worker began.
        worker.order(Orders(learner_address=address, keep_version=self._evaluator.keeps))
        if self._spending.refusal:
            worker.order(Orders(stop_spending=self._spending.refusal))
        self._supervisor.fleet.send_sources(address)

    def _release(self, worker: Worker) -> None:
        """Frees the room of a worker that was drained."""
        self._scaler.release_room(worker)
        self._supervisor.fleet.send_sources(self._supervisor.learner_info.address)

    def _warn(self, text: str) -> None:
        self.worker_errors.append(text)
        self._say(text)

    def _gather(self) -> StepBatch:
        """Waits until a step can be taken."""
        state = self._state
        if state.replay:
            record = state.replay[0]  # while it stands there, nothing is leased
            reports = self._reports_of([*record.group_ids, *record.dropped_ids])
            batch = state.intake.repeat_batch(record.group_ids, record.dropped_ids, reports)
            state.replay.popleft()
            return batch
        while not state.intake.is_ready(state.policy_version, self._steps_left):
            self._supervisor.turn()
            if unconfirmed := sorted(state.intake.unconfirmed):
                state.intake.adopt_reports(self._reports_of(unconfirmed))
                # What the learner does not have any more has ended meanwhile.
                state.intake.unconfirmed.difference_update(unconfirmed)
        return state.intake.take_batch(state.policy_version)

    def _reports_of(self, group_ids: list[str]) -> list[GroupReport]:
        asked = self._supervisor.learner.reports(group_ids)
        return self._supervisor.wait_for(asked, timeout_s=self._wait_s)

    def _train_step(self, step: int) -> dict[str, float]:
        """Prompts to groups to the next policy version; returns the step's metrics.

        A signal ends it before the learner was asked for the update, or not at all.
        """
        failpoints.reach("driver.step")
        self._supervisor.check_stop()  # a step whose groups are there already waits for nothing
        started = time.monotonic()
        state, batch = self._state, self._gather()
        rollout_s = time.monotonic() - started
        metrics: dict[str, float] = {"train/update_skipped": 1.0}
        outcomes: dict[str, str] = {}
        if batch.kept or batch.dropped:
            report = self._supervisor.wait_for(
                self._supervisor.learner.update(batch.kept, batch.dropped, self._wait_s),
                timeout_s=2 * self._wait_s,
                interruptible=False,
            )
            self._checkpoints.record(report.saved, state)
            state.intake.discard_groups(report.disowned)
            for group_id, outcome in report.outcomes.items():
                state.leases.end_group(group_id, TrajectoryState(outcome))
            if report.replayed == "different":
                self._reports.show_divergence(step, report)
            state.policy_version = report.policy_version
            metrics, outcomes = report.metrics, report.outcomes
        metrics |= batch.metrics() | self._record_curriculum(step, batch)
        update_s = time.monotonic() - started - rollout_s
        self._reports.write_samples(step, batch.samples)
        skip_cause = batch.skip_cause(metrics, outcomes)
        state.record_update(metrics["reward/total/mean"], skip_cause)
        self._reports.show_problems(step, batch, skip_cause)
        return metrics | {
            "time/train/rollout_generate_s": rollout_s,
            "time/train/update_s": update_s,
            "rollout/prompts_set_aside": float(len(self._quarantine.set_aside)),
            "workers/restarts": float(self._supervisor.fleet.replacement.restarts),
            "learner/restarts": float(self._supervisor.learner_restarts),
        }

    def _record_curriculum(self, step: int, batch: StepBatch) -> dict[str, float]:
        """Counts the groups of a step for the curriculum, if there is one; its metrics."""
        curriculum = self._state.curriculum
        if curriculum is None:
            return {}
        before = curriculum.skipping
        curriculum.record(batch.reports)
        now, skipped = curriculum.skipping, self._state.leases.totals["skipped"]
        if now and not before and not skipped:
            self._say(
                f"step {step}: the curriculum skips {now} prompts of equal rewards from now on "
                "(rollout/prompts_skipped)"
            )
        return {"rollout/prompts_skipped": float(now), "rollout/groups_skipped": float(skipped)}

    @contextlib.contextmanager
    def _without_leases(self) -> Iterator[None]:
        """No lease is granted meanwhile, so that workers come to have nothing else to do."""
        self._leasing = False
        try:
            yield
        finally:
            self._leasing = True

    def _close_step(self, metrics: dict[str, float]) -> None:
        """Collects the seconds of every process, and closes the accounting of the step."""
        self._record_queues()
        timings = self._supervisor.step_timings()
        spent = self._spending.take_step()
        metrics |= spending_metrics(spent, self._spending.total)
        metrics |= self._checkpoints.take_metrics()
        record = self._reports.close_step(
            self._state, metrics, timings, self._supervisor.memory(), spent=spent
        )
        self._state.open = None
        self.overcome_errors += self.worker_errors
        self.worker_errors.clear()
        self._scaler.judge_step(record, set(timings.gaps & record.processes.keys()) - {LEARNER})
