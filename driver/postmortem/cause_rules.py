"""The rules behind `probable_cause.py`, each of which knows one way for a run to end.

A rule is a function of the facts that returns a cause or None. Weights say how sure it is: from 90
the evidence names the culprit, below 50 it is a guess.
"""

import dataclasses
import re
from collections.abc import Callable

from driver.postmortem.host_state import Machine, ProcessState
from driver.postmortem.run_facts import (
    SHOWN_LINES,
    Cause,
    Facts,
    cause_of,
    first_match,
    grouped,
    matching,
    short,
)

LOW_MEMORY = 0.05
"""Share of the memory below which the next large allocation may end a process."""
LOW_DISK = 0.01
LOW_DISK_BYTES = 64 * 2**20
RECENT_SAMPLES = 4
"""Fewer completions without a reward are no pattern."""

Rule = Callable[[Facts], Cause | None]


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"


def _gone(facts: Facts) -> list[ProcessState]:
    return [process for process in facts.processes if process.state == ""]


_ENDED = r"process (ended unexpectedly|has died)|the learner died|unexpectedly exits"


def _out_of_memory(facts: Facts) -> Cause | None:
    killed = "a process was killed because the host ran out of memory"
    next_step = (
        "give the host or container more memory, or lower what the run holds: rollout.workers, "
        "rollout.decode.slots, learner.microbatch_tokens, weights.keep_versions"
    )
    pids = "|".join(str(process.pid) for process in facts.processes) or "none"
    ours = matching(rf"(killed process|oom-kill.*pid=).*\b({pids})\b", facts.kernel)
    by_ray = matching(r"node running low on memory|OutOfMemoryError", [*facts.told, *facts.logs])
    raised = matching(r"\bMemoryError\b|cannot allocate memory", facts.told)
    other = matching(r"out of memory|oom-kill|killed process", facts.kernel)
    ended = matching(_ENDED, facts.told, shown=2)
    left = _memory_left(facts.machine)
    if ours:
        said = " ".join(ours)
        who = [p.name for p in facts.processes if re.search(rf"\b{p.pid}\b", said)]
        title = f"the kernel killed {', '.join(who)}: the host ran out of memory"
        return cause_of("out of memory", 97, title, (*ours, *left), next_step)
    if by_ray:
        return cause_of("out of memory", 92, f"{killed}, by Ray", (*by_ray, *left), next_step)
    if raised:
        title = "a process could not get the memory that it asked for"
        return cause_of("out of memory", 80, title, (*raised, *left), next_step)
    if ended and facts.machine and facts.machine.oom_kills:
        count = f"the container's kernel counter of processes killed: {facts.machine.oom_kills}"
        return cause_of("out of memory", 85, killed, (*ended, count, *left), next_step)
    if ended and (left or other):
        title = f"probably {killed}"
        weight = 70 if left else 60
        return cause_of("out of memory", weight, title, (*ended, *left, *other), next_step)
    return None


def _memory_left(machine: Machine | None) -> tuple[str, ...]:
    """A line where little memory is left now."""
    if not machine or not machine.memory_total:
        return ()
    if machine.memory_available > LOW_MEMORY * machine.memory_total:
        return ()
    left, total = _mib(machine.memory_available), _mib(machine.memory_total)
    return (f"{machine.host} has {left} of {total} memory left",)


def _disk_full(facts: Facts) -> Cause | None:
    said = r"no space left|disk quota exceeded|\bENOSPC\b|\bEDQUOT\b"
    told, logs = matching(said, facts.told), matching(said, facts.logs)
    disks = facts.machine.disks if facts.machine else ()
    low = tuple(
        f"{disk.path} has {_mib(disk.free)} of {_mib(disk.total)} left"
        for disk in disks
        if disk.free < max(LOW_DISK_BYTES, LOW_DISK * disk.total)
    )
    if not (told or logs or low):
        return None
    return cause_of(
        "disk full",
        95 if told else 75 if logs else 45,
        "a disk is full" if told or logs else "a disk is nearly full",
        (*told, *logs, *low),
        "free some space there, lower checkpoint.keep, or move run.output_dir; then go on with "
        "--resume",
    )


def _crashed(facts: Facts) -> Cause | None:
    fatal = {
        who: line
        for who, dump in facts.stacks.items()
        if (line := next((x for x in dump.splitlines() if x.startswith("Fatal Python error")), ""))
    }
    if not fatal:
        return None
    who, line = next(iter(fatal.items()))
    reason = line.removeprefix("Fatal Python error: ")
    evidence = [f"{name}: {text}; in {_top(facts.stacks[name])}" for name, text in fatal.items()]
    return cause_of(
        "crash",
        90,
        f"{who} crashed in native code: {reason}",
        (*evidence, *matching(r"segfault|general protection", facts.kernel)),
        f"read stacks/{who}.txt, where the last Python frames stand; a driver, jaxlib or kernel "
        "that does not fit the other is the usual reason (versions.json)",
    )


def _top(dump: str) -> str:
    """The innermost frame of the current thread, or of the first."""
    _, _, current = dump.rpartition("Current thread")
    frames = re.findall(r'^\s+File "(.*?)", line (\d+)(?: in (.+))?', current or dump, re.M)
    return f"{frames[0][2]} ({frames[0][0]}:{frames[0][1]})" if frames else "no Python frame"


def _learner_lost(facts: Facts) -> Cause | None:
    if "LearnerLost" not in facts.error_types and not matching(r"learner died", facts.told):
        return None
    gone = [f"learner, process {p.pid}, is gone" for p in _gone(facts) if p.name == "learner"]
    return cause_of(
        "learner killed",
        81,
        "the learner process was killed or crashed",
        (*matching(r"learner died|unexpectedly exits", facts.told), *gone),
        "see logs/ for its last lines and kernel.txt for who killed it; go on with --resume",
    )


def _driver_killed(facts: Facts) -> Cause | None:
    if not facts.driver_gone:
        return None
    status, machine = facts.status, facts.machine
    evidence = [f"status.json: running as process {status.get('pid')} on {status.get('host')}"]
    evidence += ["that process is gone, and it did not write how it ended"]
    rebooted = machine and machine.boot_time > float(status.get("started", 0)) > 0
    if rebooted:
        evidence.append("the host started after the run did")
    return cause_of(
        "driver killed",
        88 if rebooted else 66,
        "the host was restarted" if rebooted else "the driver was killed outright (SIGKILL)",
        (*evidence, *matching(r"out of memory|killed process", facts.kernel)),
        f"go on with --resume: the last checkpoint is of step {status.get('last_checkpoint')}",
    )


def _rewards_fail(facts: Facts) -> Cause | None:
    recent = facts.samples[-64:]
    errors = [str(sample["reward_error"]) for sample in recent if sample.get("reward_error")]
    if len(errors) < RECENT_SAMPLES or len(errors) < len(recent):
        return None
    kinds = grouped(errors)
    same = len(kinds) == 1
    return cause_of(
        "reward function",
        86 if same else 72,
        f"the reward function failed on every completion{' with the same error' if same else ''}: "
        f"{short(errors[-1])}",
        (f"the last {len(errors)} of samples.jsonl have a reward_error", *kinds[:3]),
        "run the scorer by hand on a completion of samples.jsonl; correct reward.functions or the "
        "answers in data.train",
    )


def _not_finite(facts: Facts) -> Cause | None:
    skipped = [m for m in facts.metrics[-10:] if m.get("train/update_skipped")]
    named = sorted(
        {key for m in skipped for key in m.get("nonfinite", []) if key.startswith("train/")}
    )
    told = matching(r"not finite|non-?finite|\bnan\b.*(loss|grad)|(loss|grad).*\bnan\b", facts.told)
    if not (named or facts.rejected or told):
        return None
    steps = ", ".join(str(m.get("step")) for m in skipped)
    evidence = [*told, *([f"updates skipped at steps {steps}"] if steps else [])]
    evidence += [f"not finite: {', '.join(named)}"] if named else []
    evidence += [f"groups kept: {', '.join(facts.rejected[:5])}"] if facts.rejected else []
    return cause_of(
        "not finite",
        85 if told else 70 if named else 40,
        "updates gave a loss or gradient that is not finite",
        evidence,
        "look at the groups in rejected/; lower learner.optimizer.learning_rate, raise its warmup, "
        "or compute in float32 (learner.compute_dtype)",
    )


def _receipts(facts: Facts) -> Cause | None:
    last = facts.metrics[-1] if facts.metrics else {}
    names = ("groups/unknown_receipt", "groups/stale", "groups/dropped_stale")
    counts = {name: float(last[name]) for name in names if last.get(name)}
    other = r"receipt|live weights of version"
    told = matching(rf"{other}|StaleGroup|too stale", facts.told)
    if not (counts or told):
        return None
    unknown = bool(counts.get("groups/unknown_receipt") or matching(other, told))
    return cause_of(
        "receipts",
        82 if told else 50 if unknown else 30,
        "groups were made by weights that the learner never issued"
        if unknown
        else "groups came too late for the version that they were sampled under",
        (*told, *(f"{name} = {count:g} at the last step" for name, count in counts.items())),
        "a worker holds other weights than it was sent: compare weights.dtype and devices of both "
        "sides"
        if unknown
        else "raise rollout.max_staleness, or add workers so that groups are made sooner",
    )


def _restarts(facts: Facts) -> Cause | None:
    if "WorkersLost" not in facts.error_types and not matching("worker_restarts", facts.told):
        return None
    used_up = matching(r"worker_restarts", facts.told, shown=1)
    return cause_of(
        "restarts used up",
        64,
        "rollout workers failed more often than placement.worker_restarts allows",
        (*used_up, *grouped(facts.worker_errors)[:SHOWN_LINES]),
        "mend what the workers' errors say (logs/rollout-*), then go on with --resume; a higher "
        "placement.worker_restarts only buys time",
    )


def _hang(facts: Facts) -> Cause | None:
    silent = (
        r"(?P<who>[\w.-]+) (?:did not answer|did not finish|has not answered|made no progress)"
        r"|waited [\d.]+ s for (?P<what>.+?): "
    )
    match = first_match(silent, facts.told)
    if not match:
        return None
    who = match["who"] or match["what"]
    evidence = list(matching(silent, facts.told))
    stopped = False
    for process in facts.processes:
        if re.search(rf"\b{re.escape(process.name)}\b", match.string) and process.state:
            stopped |= process.state == "T"
            dump = facts.stacks.get(f"{process.name}-{process.pid}", "")
            where = f"; in {_top(dump)}" if dump else ", and gave no stacks"
            waits = f"; threads wait in {', '.join(process.waits_in)}" if process.waits_in else ""
            evidence.append(f"{process.name}: state {process.state}{where}{waits}")
    return cause_of(
        "no answer",
        78,
        f"no answer from {who} before its deadline{': its process is stopped' * stopped}",
        evidence,
        "read the stacks of that process in stacks/ and its last lines in logs/; if it was only "
        "slow, raise the time limit that the message names (placement.step_timeout_s, "
        "placement.startup_timeout_s or weights.timeout_s)",
    )


def _fault_of_ours(facts: Facts) -> Cause | None:
    if "LedgerError" not in facts.error_types:
        return None
    return cause_of(
        "books",
        84,
        "the books do not balance, which is a fault in this program",
        (short(facts.error),),
        "keep this archive with a report of the fault; go on with --resume",
    )


def _configuration(facts: Facts) -> Cause | None:
    if facts.exit_code != 2:
        return None
    return cause_of(
        "configuration",
        90,
        f"the configuration cannot work: {short(facts.error)}",
        [short(line) for line in facts.error.splitlines()],
        "correct the key that the message names; --dry-run checks without starting anything",
    )


def _resources(facts: Facts) -> Cause | None:
    if facts.exit_code != 3:
        return None
    return cause_of(
        "resources",
        90,
        "the cluster or machine lacks what the run asks for",
        [short(line) for line in facts.error.splitlines()],
        "lower what the message names, or add nodes",
    )


@dataclasses.dataclass(frozen=True)
class Said:
    """A rule that goes by what a process said."""

    name: str
    weight: int
    pattern: str
    title: str
    """May use the pattern's named groups."""
    next_step: str

    def __call__(self, facts: Facts) -> Cause | None:
        match = first_match(self.pattern, facts.told)
        if not match:
            return None
        named = {name: value or "one not named" for name, value in match.groupdict().items()}
        title = self.title.format_map(named)
        # What a worker said on its way out may follow from the end of another process.
        by_worker = match.string not in (facts.error, *facts.details.splitlines())
        weight = self.weight - 15 * by_worker
        return cause_of(
            self.name, weight, title, matching(self.pattern, facts.told), self.next_step
        )


RULES: tuple[Rule, ...] = (
    _out_of_memory,
    Said(
        "device memory",
        93,
        r"RESOURCE_EXHAUSTED: .*(allocat|out of memory|hbm)|CUDA_ERROR_OUT_OF_MEMORY",
        "an accelerator ran out of memory",
        "lower learner.microbatch_tokens or rollout.decode.slots, or cut the model over more "
        "devices; `python -m driver --dry-run` prints the sizes",
    ),
    _disk_full,
    _crashed,
    _learner_lost,
    _driver_killed,
    _rewards_fail,
    _not_finite,
    Said(
        "canary",
        94,
        r"canary.*?\b(?P<layer>layers?[. ]\d+|embedding|head)\b|canary",
        "a worker computes something else than the learner under the same weights, first in "
        "{layer}",
        "compare dtype, layout and devices of both sides; one layer that differs is damaged memory "
        "or a wrong layout, a small gap everywhere is a bound too tight (weights.canary_bound)",
    ),
    _receipts,
    Said(
        "damaged file",
        87,
        r"DamagedCheckpoint|NoCompleteCheckpoint|CertificateMismatch|DamagedFile",
        "a checkpoint or spool that the run goes on from is damaged",
        "put the named file back from a copy, or remove that checkpoint so that an older one is "
        "taken; then --resume",
    ),
    Said(
        "port taken",
        92,
        r"cannot listen on (?P<where>\S+ port \d+)|address already in use",
        "an address could not be listened on: {where}",
        "set the port to 0 for a free one, or end the run that holds it",
    ),
    Said(
        "handshake",
        88,
        r"handshake|CERTIFICATE_VERIFY|SSL_ERROR|certificate (is|has|verify|unknown|expired)",
        "two processes do not trust each other: the TLS handshake failed",
        "an address may lead to another run's port, or a host's clock may be off by more than a "
        "day; start the run anew, which makes new certificates",
    ),
    Said(
        "network",
        80,
        r"connection refused|failed to connect|nobody answers|no route to host|connection reset"
        r"|network is unreachable|\bUNAVAILABLE\b",
        "a process could not be reached over the network",
        "see whether the process that listened there still lives (processes.json); across hosts "
        "check firewall, placement.bind_host and placement.learner_port",
    ),
    _restarts,
    _hang,
    _fault_of_ours,
    _configuration,
    _resources,
)
"""In the order in which equal weights are listed."""
