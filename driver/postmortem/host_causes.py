"""Causes that lie in the host, the cluster or the network. See `cause.py` for what a rule is."""

import re

from driver.postmortem.cause import Cause, PatternRule, cause_of
from driver.postmortem.host_state import Machine
from driver.postmortem.run_facts import Facts, first_match, innermost_frame, matching, short

LOW_MEMORY = 0.05
"""Fraction of the memory below which the next large allocation may end a process."""
LOW_DISK = 0.01
LOW_DISK_BYTES = 64 * 2**20

DEVICE_MEMORY = PatternRule(
    "device memory",
    93,
    r"RESOURCE_EXHAUSTED: .*(allocat|out of memory|hbm)|CUDA_ERROR_OUT_OF_MEMORY",
    "an accelerator ran out of memory",
    "lower learner.microbatch_tokens or rollout.decode.slots, or cut the model over more "
    "devices; `python -m driver --dry-run` prints the sizes",
)

PORT_TAKEN = PatternRule(
    "port taken",
    92,
    r"cannot listen on (?P<where>\S+ port \d+)|address already in use",
    "an address is already in use: {where}",
    "set the port to 0 for a free one, or end the run that uses it",
)

HANDSHAKE = PatternRule(
    "handshake",
    88,
    r"handshake|CERTIFICATE_VERIFY|SSL_ERROR|certificate (is|has|verify|unknown|expired)",
    "two processes do not trust each other: the TLS handshake failed",
    "an address may lead to another run's port, or a host's clock may be off by more than a "
    "day; start the run anew, which makes new certificates",
)

NETWORK = PatternRule(
    "network",
    80,
    r"connection refused|failed to connect|(nobody|no \w+) answers|no route to host"
    r"|connection reset|network is unreachable|\bUNAVAILABLE\b",
    "a process could not be reached over the network",
    "check whether the process that listened there is still running (processes.json); across hosts "
    "check firewall, placement.bind_host and placement.learner_port",
)

FILE_ERROR = PatternRule(
    "file system",
    93,
    r"(?P<reason>read-only file system|input/output error|stale file handle|too many open files"
    r"|structure needs cleaning|transport endpoint is not connected"
    r"|(?<=\] )(permission denied|operation not permitted|no such device|file too large))",
    "the system refused to read or write a file: {reason}",
    "look after the path that the error names: its mount, its disk (kernel.txt), its permissions; "
    "then go on with --resume",
)

_ENDED = r"process (ended unexpectedly|has died)|the learner died|unexpectedly exits"


def find_out_of_memory(facts: Facts) -> Cause | None:
    """The host or the container ran out of memory."""
    killed = "a process was killed because the host ran out of memory"
    next_step = (
        "give the host or container more memory, or lower what the run holds: rollout.workers, "
        "rollout.decode.slots, learner.microbatch_tokens, weights.keep_versions"
    )
    pids = "|".join(str(process.pid) for process in facts.processes) or "none"
    ours = matching(rf"(killed process|oom-kill.*pid=).*\b({pids})\b", facts.kernel)
    by_ray = matching(
        r"node running low on memory|OutOfMemoryError", [*facts.reported, *facts.logs]
    )
    raised = matching(r"\bMemoryError\b|cannot allocate memory", facts.reported)
    other = matching(r"out of memory|oom-kill|killed process", facts.kernel)
    ended = matching(_ENDED, facts.reported, shown=2)
    left = _memory_left(facts.machine)
    if ours:
        lines = " ".join(ours)
        who = [p.name for p in facts.processes if re.search(rf"\b{p.pid}\b", lines)]
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
    """One line if little memory is left now."""
    if not machine or not machine.memory_total:
        return ()
    if machine.memory_available > LOW_MEMORY * machine.memory_total:
        return ()
    left, total = _mib(machine.memory_available), _mib(machine.memory_total)
    return (f"{machine.host} has {left} of {total} memory left",)


def find_disk_full(facts: Facts) -> Cause | None:
    """A file system of the run is full."""
    pattern = r"no space left|disk quota exceeded|\bENOSPC\b|\bEDQUOT\b"
    reported, logs = matching(pattern, facts.reported), matching(pattern, facts.logs)
    disks = facts.machine.disks if facts.machine else ()
    low = tuple(
        f"{disk.path} has {_mib(disk.free)} of {_mib(disk.total)} left"
        for disk in disks
        if disk.free < max(LOW_DISK_BYTES, LOW_DISK * disk.total)
    )
    if not (reported or logs or low):
        return None
    return cause_of(
        "disk full",
        95 if reported else 75 if logs else 45,
        "a disk is full" if reported or logs else "a disk is nearly full",
        (*reported, *logs, *low),
        "free some space there, lower checkpoint.keep, or move run.output_dir; then go on with "
        "--resume",
    )


def find_crash(facts: Facts) -> Cause | None:
    """A process crashed in native code."""
    fatal = {
        who: line
        for who, dump in facts.stacks.items()
        if (line := next((x for x in dump.splitlines() if x.startswith("Fatal Python error")), ""))
    }
    if not fatal:
        return None
    # An error that says itself what happened was not the end of a process.
    ended = not facts.error or first_match(rf"{_ENDED}|process ended", facts.reported)
    weight = 55 if not ended else 70 if FILE_ERROR(facts) else 90
    who, line = next(iter(fatal.items()))
    reason = line.removeprefix("Fatal Python error: ")
    evidence = [
        f"{name}: {text}; in {innermost_frame(facts.stacks[name])}" for name, text in fatal.items()
    ]
    return cause_of(
        "crash",
        weight,
        f"{who} crashed in native code: {reason}",
        (*evidence, *matching(r"segfault|general protection", facts.kernel)),
        f"read stacks/{who}.txt, where the last Python frames stand; a driver, jaxlib or kernel "
        "that does not fit the other is the usual reason (versions.json)",
    )


def find_killed_driver(facts: Facts) -> Cause | None:
    """The driver was killed, or its host restarted."""
    if not facts.driver_gone:
        return None
    status, machine = facts.status, facts.machine
    evidence = [f"status.json: it ran as process {status.get('pid')} on {status.get('host')}"]
    evidence += ["that process has ended, and it did not write how"]
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


HELD_SPOOL = PatternRule(
    "spool held",
    95,
    r"another learner of this run has held it for (?P<time>\S+ s)",
    "an earlier learner of this run still holds its spool, after {time}: cut off from the driver "
    "or stopped, it has not ended",
    "end that process on its host (the stacks folder of the run names it), and look for what cut "
    "the host off; then go on with --resume",
)


def find_lost_host(facts: Facts) -> Cause | None:
    """A host of the cluster is gone."""
    ended = matching(rf"{_ENDED}|did not answer|lost with its host", facts.reported)
    if not facts.lost_hosts or not ended:
        return None
    names = ", ".join(line.partition(" (")[0] for line in facts.lost_hosts)
    return cause_of(
        "host lost",
        89,
        f"Ray counts a host as dead that was in the cluster: {names}",
        (*facts.lost_hosts, *ended),
        "look whether that host is up and reaches the others; a host that was cut off needs `ray "
        "start` again; then go on with --resume",
    )


def find_missing_resources(facts: Facts) -> Cause | None:
    """The cluster lacks what the run asks for."""
    if facts.exit_code != 3:
        return None
    return cause_of(
        "resources",
        92,
        "the cluster or machine lacks what the run asks for",
        [short(line) for line in facts.error.splitlines()],
        "lower what the message names, or add nodes",
    )


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"
