"""Facts of runs that ended badly, and the cause, evidence and next step that each must get."""

import dataclasses

import pytest

from driver.fleet.cluster import ResourcesNotMet
from driver.postmortem.host_state import Disk, Machine, ProcessState
from driver.postmortem.probable_cause import page, probable_causes
from driver.postmortem.run_facts import Facts

GIB = 2**30
RAY_DEATH = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker "
    "exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some "
    "common causes include: (1) the process was killed by the OOM killer due to high memory usage, "
    "(2) ray stop --force was called, or (3) the worker crashed unexpectedly due to SIGSEGV"
)
LEARNER_DIED = f"the learner died during 'update': {RAY_DEATH}"
ROOMY = Machine(
    host="h",
    cpus=2,
    load=1.0,
    boot_time=100.0,
    memory_total=64 * GIB,
    memory_available=32 * GIB,
    oom_kills=0,
    disks=(Disk(path="/run", total=100 * GIB, free=50 * GIB),),
)
TIGHT = Machine(
    host="h",
    cpus=2,
    load=1.0,
    boot_time=100.0,
    memory_total=64 * GIB,
    memory_available=GIB,
    oom_kills=0,
    disks=(Disk(path="/run", total=100 * GIB, free=2**20),),
)
WORKER = ProcessState(name="rollout-3", pid=4242, state="")
FATAL = (
    "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
    '  File "/a/engine.py", line 7 in step\n'
)
DUMP = 'Current thread 0x1 (most recent call first):\n  File "/a/wire.py", line 9 in receive\n'
RESTARTS = "rollout-1 failed and placement.worker_restarts=2 is used up: its process ended"
REFUSED = (
    "waited 30 s for weight service 10.0.0.1:7000: failed to connect to all addresses; last error: "
    "UNKNOWN: ipv4:10.0.0.1:7000: Connection refused"
)


@pytest.mark.parametrize(
    "facts, name, parts",
    [
        (
            Facts(
                error=LEARNER_DIED,
                kernel=("Out of memory: Killed process 4242 (ray::Rollout) total-vm:9kB",),
                processes=(WORKER,),
            ),
            "out of memory",
            ["the kernel killed rollout-3", "Killed process 4242", "rollout.decode.slots"],
        ),
        (
            Facts(
                error="the learner failed in 'restore': learner.durable.spool.SpoolFailed: [Errno "
                "16] cannot claim /run/spool.lock: another learner of this run has held it for "
                "30 s",
                worker_errors=(LEARNER_DIED,),
            ),
            "spool held",
            ["an earlier learner of this run still holds its spool, after 30 s", "its host"],
        ),
        (
            Facts(error=LEARNER_DIED, lost_hosts=("c (10.0.0.3): it did not answer",)),
            "host lost",
            ["in the cluster: c", "c (10.0.0.3): it did not answer", "ray start"],
        ),
        (
            Facts(error=LEARNER_DIED, machine=TIGHT),
            "learner killed",
            ["probably a process was killed because the host ran out of memory", "1,024 MiB of"],
        ),
        (
            Facts(worker_errors=("rollout-0: Task was killed: node running low on memory",)),
            "out of memory",
            ["by Ray"],
        ),
        (
            Facts(error="RuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"),
            "device memory",
            ["accelerator", "learner.microbatch_tokens"],
        ),
        (
            Facts(error="no space left on the disk of /run: free some", machine=TIGHT),
            "disk full",
            ["a disk is full", "/run has 1 MiB of", "--resume"],
        ),
        (
            Facts(error=LEARNER_DIED, error_types=("LearnerLost",), machine=ROOMY),
            "learner killed",
            ["killed or crashed", "go on with --resume"],
        ),
        (
            Facts(error=RESTARTS, stacks={"rollout-1-9": FATAL}),
            "crash",
            ["rollout-1-9 crashed in native code: Segmentation fault", "step (/a/engine.py:7)"],
        ),
        (
            Facts(driver_gone=True, status={"pid": 5, "host": "h", "started": 50.0}, machine=ROOMY),
            "driver killed",
            ["the host was restarted", "the host started after the run did"],
        ),
        (
            Facts(samples=({"reward_error": "KeyError: 'answer'"},) * 8),
            "reward function",
            ["failed on every completion with the same error: KeyError: 'answer'", "by hand"],
        ),
        (
            Facts(
                metrics=(
                    {"step": 4, "train/update_skipped": 1.0, "nonfinite": ["train/loss"]},
                    {"step": 5, "train/update_skipped": 1.0, "nonfinite": ["train/loss"]},
                ),
                rejected=("version-00000003.jsonl",),
            ),
            "not finite",
            ["steps 4, 5", "train/loss", "version-00000003.jsonl", "learning_rate"],
        ),
        (
            Facts(metrics=({"step": 1, "groups/unknown_receipt": 7.0},)),
            "receipts",
            ["never published", "groups/unknown_receipt = 7"],
        ),
        (
            Facts(metrics=({"step": 1, "groups/stale": 7.0},)),
            "receipts",
            ["arrived too late", "max_staleness"],
        ),
        (
            Facts(error="rollout-1: live weights of version 7 have digest ab, published was cd"),
            "receipts",
            ["never published", "weights.dtype"],
        ),
        (
            Facts(details="learner.checkpoint.DamagedCheckpoint: state/x: 3 of 9 bytes"),
            "damaged file",
            ["state/x: 3 of 9 bytes", "an older one is taken"],
        ),
        (Facts(error=REFUSED), "network", ["could not be reached", "Connection refused"]),
        (
            Facts(error="UNAVAILABLE: Ssl handshake failed: CERTIFICATE_VERIFY_FAILED"),
            "handshake",
            ["do not trust each other", "clock"],
        ),
        (
            Facts(
                error=RESTARTS,
                error_types=("WorkersLost",),
                worker_errors=(
                    "rollout-1: ValueError: bad width 7",
                    "rollout-1: its process ended",
                    "rollout-1: ValueError: bad width 9",
                ),
            ),
            "restarts used up",
            ["2 x rollout-1: ValueError: bad width 7", "1 x rollout-1: its process ended"],
        ),
        (
            Facts(error="canary: gap 0.71 over 0.05, first in layers.3 of rollout-2"),
            "canary",
            ["first in layers.3", "weights.canary_bound"],
        ),
        (
            Facts(
                error="rollout-0 did not finish rollout in 600 s",
                processes=(ProcessState(name="rollout-0", pid=7, state="S"),),
                stacks={"rollout-0-7": DUMP},
            ),
            "no answer",
            ["no answer from rollout-0", "in receive (/a/wire.py:9)", "step_timeout_s"],
        ),
        (
            Facts(error="TimeoutError: waited 9 s for policy version >= 3: the newest is 2"),
            "no answer",
            ["no answer from policy version >= 3"],
        ),
        (
            Facts(error="placement.bind_host='x' is no address", exit_code=2),
            "configuration",
            ["placement.bind_host='x' is no address", "--dry-run"],
        ),
        (
            Facts(error="nothing was trained: each of 2 updates was skipped", exit_code=4),
            "nothing trained",
            ["each of 2 updates was skipped", "samples.jsonl"],
        ),
        (
            Facts(error=str(ResourcesNotMet("cannot fit:\nCPU: asked 9, has 2")), exit_code=3),
            "resources",
            ["CPU: asked 9, has 2", "add nodes"],
        ),
        (
            Facts(error="PortUnavailable: cannot listen on 0.0.0.0 port 7001: the address must be"),
            "port taken",
            ["0.0.0.0 port 7001", "0 for a free one"],
        ),
        (
            Facts(error="LedgerError: 3 groups lost", error_types=("LedgerError",)),
            "accounting",
            ["internal accounting error", "3 groups lost"],
        ),
        (Facts(error="ZeroDivisionError: x", machine=ROOMY), "unknown", ["ZeroDivisionError: x"]),
        (Facts(), "unknown", ["no reason is recorded", "no rule says more of it"]),
        (
            Facts(
                error="the learner: SpoolFailed: [Errno 30] Read-only file system: '/run/spool/x'",
                stacks={"rollout-1-9": FATAL},
            ),
            "file system",
            ["file: Read-only file system (the evidence", "'/run/spool/x'", "its mount"],
        ),
        (
            Facts(
                error=RESTARTS,
                worker_errors=("rollout-1: OSError: [Errno 5] Input/output error: '/data/x'",),
                stacks={"rollout-1-9": FATAL.replace("Segmentation fault", "Bus error")},
            ),
            "file system",
            ["Input/output error", "'/data/x'", "crashed in native code: Bus error (likely)"],
        ),
        (
            Facts(error="PermissionError: [Errno 13] Permission denied: '/run/checkpoints'"),
            "file system",
            ["file: Permission denied", "'/run/checkpoints'"],
        ),
        (
            Facts(error="canary: gap 0.71 in layers.3", stacks={"rollout-1-9": FATAL}),
            "canary",
            ["layers.3", "crashed in native code: Segmentation fault (possible)"],
        ),
        (
            Facts(status={"state": "finished", "exit_code": 0}, exit_code=0),
            "finished",
            ["the run finished (known)", "- ended with: all steps are done"],
        ),
        (
            Facts(status={"state": "finished"}, metrics=({"step": 1, "groups/stale": 7.0},)),
            "finished",
            ["the run finished (known)", "groups/stale = 7"],
        ),
        (
            Facts(status={"state": "running"}),
            "running",
            ["still going on", "- ended with: it has not ended"],
        ),
        (
            Facts(error="interrupted by SIGINT", status={"state": "interrupted"}),
            "interrupted",
            ["nothing went wrong: the run was interrupted by SIGINT (known)", "--resume"],
        ),
        (
            Facts(metrics=({"groups/stale": "seven"},), error="Odd: x"),
            "unknown",
            ["Odd: x", "'foreign groups' could not be applied"],
        ),
    ],
)
def test_each_rule_names_its_cause_evidence_and_next_step(facts, name, parts):
    causes = probable_causes(facts)
    shown = page(facts, causes, ["records: run/status.json"])
    assert causes[0].name == name, [cause.name for cause in causes]
    assert [part for part in parts if part not in shown] == []


@pytest.mark.parametrize(
    "facts, not_named",
    [
        (Facts(error="UNAUTHENTICATED: permission denied for rollout-1"), ("file system",)),
        # Ray's own guesses, source code in a traceback, and old or foreign events are no evidence.
        (Facts(error=RAY_DEATH, details=RAY_DEATH, machine=ROOMY), ("out of memory", "crash")),
        (Facts(details='  raise OSError("no space left")\nValueError: x'), ("disk full",)),
        (Facts(error="ValueError: x", kernel=("Killed process 1 (x)",)), ("out of memory",)),
        (Facts(error="ValueError: x", machine=TIGHT), ("out of memory",)),
        (Facts(samples=({"reward_error": "E"}, {"reward_error": ""}) * 8), ("reward function",)),
        (Facts(metrics=({"step": 1, "nonfinite": ["reward/total/mean"]},)), ("not finite",)),
    ],
)
def test_what_proves_nothing_names_nothing(facts, not_named):
    causes = probable_causes(facts)
    assert not {cause.name for cause in causes} & set(not_named)
    assert "common causes" not in page(facts, causes, [])


NO_ROOM = "no room for another learner came within 150 s: no host of the Ray cluster has 5 CPU free"


def test_what_the_run_has_gone_on_after_is_not_why_it_ended():
    """A full disk at step 15 and workers that were killed, in a run that lost a host at step 26."""
    dump = 'Fatal Python error: Aborted\n\nCurrent thread 0x1\n  File "a.py", line 1 in main'
    facts = Facts(
        error=NO_ROOM,
        error_types=("ResourcesNotMet",),
        exit_code=3,
        overcome_errors=(
            "step 15: the learner failed in 'save': [Errno 28] No space left on device",
            "rollout-0 failed, restart 2 of 3: its process ended: killed",
            "rollout-1: Task was killed: node running low on memory",
        ),
        worker_errors=("rollout-2 failed: its process ended",),
        stacks={"rollout-2-7": dump},
    )
    names = [cause.name for cause in probable_causes(facts)]
    assert names[0] == "resources" and not {"disk full", "out of memory"} & {*names}
    again = dataclasses.replace(
        facts, worker_errors=facts.overcome_errors, overcome_errors=(), error="", exit_code=1
    )
    assert probable_causes(again)[0].name == "disk full", "where nothing has overcome it"


def test_every_failure_counts_where_restarts_are_used_up():
    facts = Facts(
        error="rollout-0 failed and placement.worker_restarts=2 is used up: x",
        error_types=("WorkersLost",),
        overcome_errors=(
            "rollout-0 failed, restart 1 of 2: x",
            "rollout-0 failed, restart 2 of 2: x",
        ),
    )
    (cause,) = [one for one in probable_causes(facts) if one.name == "restarts used up"]
    assert "2 x rollout-0 failed, restart 1 of 2: x" in cause.evidence


def test_a_worker_that_could_not_reach_a_dead_learner_is_not_the_cause():
    facts = Facts(
        error=LEARNER_DIED,
        error_types=("LearnerLost",),
        worker_errors=(f"rollout-0: {REFUSED}",),
    )
    assert [cause.name for cause in probable_causes(facts)][:2] == ["learner killed", "no answer"]
