"""One run from its start to its end: what stands around the step loop (`session.py`).

Everything is opened here, in the order in which it is needed, and closed in the other, whatever
ends the run.
"""

import contextlib
import dataclasses
import errno
import os
import pathlib
import secrets
from collections.abc import Iterator

import ray

from driver.accounting.curriculum import Curriculum, SkipJournal
from driver.accounting.intake import IntakeRules
from driver.accounting.ledger import StepLedger
from driver.accounting.quarantine import Quarantine
from driver.accounting.run_spending import RunSpending
from driver.accounting.run_state import RunState
from driver.config import load_config as settings
from driver.config.actor_specs import ActorSpecs
from driver.config.prepare import Prepared
from driver.config.run_config import RunConfig
from driver.errors import RunError
from driver.evaluation.evaluator import Evaluator
from driver.fleet.cluster import (
    check_bind_host,
    check_network,
    cluster_hosts,
    connect,
    reserve,
    stop_notice,
)
from driver.fleet.control_server import ControlBox, offer_control
from driver.fleet.fleet_size import Scaler
from driver.fleet.launch import Launcher
from driver.fleet.replacement import WorkersLost
from driver.fleet.rooms import RayRooms
from driver.postmortem.archive import collect
from driver.postmortem.evidence import Sources
from driver.reports.code_record import record_code
from driver.reports.dashboard_process import METADATA_KEY, Dashboard, open_dashboard
from driver.reports.dropped import DroppedLog
from driver.reports.end_watch import start_end_watch
from driver.reports.metrics import MetricsLog, open_trackers, stored_run_id
from driver.reports.status import ExitCode, StatusFile
from driver.reports.step_report import StepReports
from driver.reports.timeline import Timeline
from driver.session import Session
from driver.signals import Interrupted, StopSignal
from driver.supervisor import Supervisor
from driver.terminal.step_table import StepView
from learner.learner_records import Restored
from services.process import failpoints, stacks
from services.wire.tls import RunAuthority


def run(config: RunConfig, folder: pathlib.Path, prepared: Prepared) -> None:
    """Trains as configured; returns when all steps are done.

    Args:
        config: checked, with paths that actors understand.
        folder: absolute and claimed; everything the run leaves behind goes there.
        prepared: what `driver/config/prepare.py` found in the data.

    Raises:
        NothingTrained: if every update was skipped, in all steps or in the first without a reward.
        Interrupted: after SIGINT or SIGTERM, with a checkpoint written.
        RunError: anything else that a person can act on; each names what was waited for.
    """
    check_bind_host(config.placement.bind_host)
    check_network(config.placement, os.environ)
    stop = StopSignal()
    stop.install()
    failpoints.install(os.environ.get(failpoints.VARIABLE))
    stacks.register(folder, "driver")
    with open_dashboard(config.log.dashboard, folder) as dashboard:
        _run_tracked(config, folder, prepared, stop, dashboard)


def _run_tracked(
    config: RunConfig,
    folder: pathlib.Path,
    prepared: Prepared,
    stop: StopSignal,
    dashboard: Dashboard | None,
) -> None:
    """The run while status.json says `running`; the dashboard stays longer, to show its end."""
    run_id = stored_run_id(folder, f"{config.run.name}-{secrets.token_hex(4)}")
    status = StatusFile(folder, run=config.run.name, run_id=run_id)
    start_end_watch(folder)
    stop.before_abort = lambda code: status.end(
        ExitCode(code), "ended at once by a second signal, without a checkpoint"
    )
    with status.tracked(), _readable(folder), contextlib.ExitStack() as stack:
        view = stack.enter_context(StepView(config.run.name, config.run.steps))
        view.say(f"run {run_id}: outputs in {folder}")
        record_code(folder, resume=bool(config.run.resume))
        if dashboard is not None:
            dashboard.start(view.say)
        metadata = {METADATA_KEY: dashboard.url} if dashboard else {}
        logs = connect(config.run.name, stop, metadata)
        if notice := stop_notice(os.environ):
            view.say(notice)
        stack.callback(ray.shutdown)
        group = reserve(config.placement, config.rollout.workers.at_start, stop)
        specs = ActorSpecs(
            config=config,
            folder=folder,
            run_id=run_id,
            authority=RunAuthority.create(run_id),
            driver_host=ray.util.get_node_ip_address(),
            order=prepared.order,
            moment=prepared.moment,
            teacher_digest=prepared.teacher and prepared.teacher.digest,
            adapter=prepared.adapter,
        )
        supervisor = Supervisor(
            config.placement,
            config.rollout,
            config.weights,
            specs=specs,
            group=group,
            launcher=Launcher(config.placement),
            rooms=RayRooms(),
            stop=stop,
            warn=view.say,
        )
        reports = _open_reports(config, folder, prepared, status, view, stack)
        box = ControlBox(config.rollout.workers)
        offered = offer_control(
            folder,
            specs.authority,
            box,
            bind_host=config.placement.bind_host,
            driver_host=specs.driver_host,
        )
        stack.enter_context(offered)
        session = _session(config, folder, prepared, supervisor, reports)
        stack.callback(session.close)
        stack.enter_context(_post_mortem(folder, config, session, logs, view))
        session.start(
            lambda fleet: Scaler(
                config.rollout.workers,
                config.placement,
                fleet,
                group,
                box,
                view.say,
                learner=supervisor.learner_status,
            )
        )
        try:
            session.work()
        except (Interrupted, WorkersLost) as error:
            stop.acknowledge()
            view.say(f"{error}: writing a checkpoint; a further signal ends the run at once")
            session.close_and_save()
            session.summarise()
            raise
        session.summarise()
        session.check_trained()


def _open_reports(
    config: RunConfig,
    folder: pathlib.Path,
    prepared: Prepared,
    status: StatusFile,
    view: StepView,
    stack: contextlib.ExitStack,
) -> StepReports:
    """Opens the logs of the run; the stack closes them."""
    trackers = open_trackers(
        folder,
        config.log.wandb,
        run_id=status.current.run_id,
        config=config.model_dump(mode="json"),
        warn=view.say,
        tensorboard=config.log.tensorboard,
    )
    metrics = MetricsLog(folder, trackers)
    stack.callback(metrics.close)
    ledger = StepLedger(folder, unexplained_fraction=config.log.unexplained_fraction, warn=view.say)
    stack.callback(ledger.close_log)
    timeline = Timeline(folder, enabled=config.log.timeline)
    stack.callback(timeline.close_log)
    dropped = DroppedLog(folder, prepared.order, prepared.place_of)
    stack.callback(dropped.close_log)
    if not config.run.resume:
        dropped.write_prompts(prepared.left_out)
    return StepReports(
        config.run,
        config.log,
        folder,
        max_staleness=config.rollout.max_staleness,
        metrics=metrics,
        ledger=ledger,
        timeline=timeline,
        dropped=dropped,
        status=status,
        say=view.say,
        show_step=view.add_step,
    )


def _session(
    config: RunConfig,
    folder: pathlib.Path,
    prepared: Prepared,
    supervisor: Supervisor,
    reports: StepReports,
) -> Session:
    """The step loop, with the sections of the configuration that it needs."""
    quarantine = Quarantine(folder)
    rules = config.data.curriculum

    def make_curriculum() -> Curriculum | None:
        return rules and Curriculum(rules, prepared.order, SkipJournal(folder))

    def new_state(restored: Restored | None) -> RunState:
        return RunState.create(
            IntakeRules.of(config.rollout, config.algorithm, config.log.samples_per_step),
            prepared.order,
            restored=restored,
            set_aside=quarantine.set_aside,
            curriculum=make_curriculum(),
        )

    return Session(
        folder,
        run=config.run,
        data=config.data,
        checkpoint=config.checkpoint,
        placement=config.placement,
        prepared=prepared,
        new_state=new_state,
        quarantine=quarantine,
        spending=RunSpending(folder, config.reward.budget),
        supervisor=supervisor,
        evaluator=Evaluator(
            config.eval,
            config.held_out_sets,
            prepared.held_out,
            supervisor,
            reports,
            steps=config.run.steps,
            timeout_s=config.placement.step_timeout_s,
            slots=config.rollout.decode.slots,
            beside_training=config.evaluates_beside_training,
        ),
        reports=reports,
    )


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
            path.write_text(error.details, encoding="utf-8", errors="backslashreplace")
            error.args = (f"{error} (traceback: {path})",)
        raise


@contextlib.contextmanager
def _post_mortem(
    folder: pathlib.Path,
    config: RunConfig,
    session: Session,
    logs: list[pathlib.Path],
    view: StepView,
) -> Iterator[None]:
    """Leaves an archive of what is known where a run ends badly, while its processes are there."""
    try:
        yield
    except Interrupted:
        raise
    except BaseException as error:
        collect(folder, error, _sources(config, session, logs), view.say)
        raise


def _sources(config: RunConfig, session: Session, logs: list[pathlib.Path]) -> Sources:
    known = Sources(
        config=settings.dump(config),
        worker_errors=session.worker_errors,
        overcome_errors=session.overcome_errors,
        log_folders=logs,
        hosts=cluster_hosts,
    )
    try:
        return dataclasses.replace(known, tables=session.tables())
    except Exception as error:  # whatever fails in here must not hide what ended the run
        more = f"the driver could not say more: {type(error).__name__}: {error}"
        return dataclasses.replace(known, worker_errors=[*session.worker_errors, more])
