"""Causes that lie in the run itself. See `cause.py` for what a rule is."""

import re

from driver.postmortem.cause import Cause, PatternRule, cause_of
from driver.postmortem.run_facts import (
    SHOWN_LINES,
    Facts,
    first_match,
    grouped,
    innermost_frame,
    matching,
    short,
)

RECENT_SAMPLES = 4
"""Fewer completions without a reward are no pattern."""

CANARY = PatternRule(
    "canary",
    94,
    r"canary.*?\b(?P<layer>layers?[. ]\d+|embedding|head)\b|canary",
    "a worker's results differ from the learner's under the same weights, first in {layer}",
    "compare dtype, layout and devices of both sides; one layer that differs is damaged memory "
    "or a wrong layout, a small gap everywhere is a bound too tight (weights.canary_bound)",
)

DAMAGED_FILE = PatternRule(
    "damaged file",
    87,
    r"DamagedCheckpoint|NoCompleteCheckpoint|CertificateMismatch|DamagedFile",
    "a checkpoint or spool file that the run resumes from is damaged",
    "restore the named file from a copy, or remove that checkpoint so that an older one is "
    "taken; then --resume",
)


def find_lost_learner(facts: Facts) -> Cause | None:
    """The learner process died."""
    if "LearnerLost" not in facts.error_types and not matching(r"learner died", facts.reported):
        return None
    gone = [
        f"learner, process {p.pid}, is gone"
        for p in facts.processes
        if p.name == "learner" and p.state == ""
    ]
    return cause_of(
        "learner killed",
        81,
        "the learner process was killed or crashed",
        (*matching(r"learner died|unexpectedly exits", facts.reported), *gone),
        "see logs/ for its last lines and kernel.txt for who killed it; go on with --resume",
    )


def find_failing_rewards(facts: Facts) -> Cause | None:
    """The reward function fails on every completion."""
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


def find_nonfinite_update(facts: Facts) -> Cause | None:
    """Updates were skipped for a loss or gradient that is not finite."""
    skipped = [m for m in facts.metrics[-10:] if m.get("train/update_skipped")]
    named = sorted(
        {key for m in skipped for key in m.get("nonfinite", []) if key.startswith("train/")}
    )
    reported = matching(
        r"not finite|non-?finite|\bnan\b.*(loss|grad)|(loss|grad).*\bnan\b", facts.reported
    )
    if not (named or facts.rejected or reported):
        return None
    steps = ", ".join(str(m.get("step")) for m in skipped)
    evidence = [*reported, *([f"updates skipped at steps {steps}"] if steps else [])]
    evidence += [f"not finite: {', '.join(named)}"] if named else []
    evidence += [f"groups kept: {', '.join(facts.rejected[:5])}"] if facts.rejected else []
    return cause_of(
        "not finite",
        85 if reported else 70 if named else 40,
        "updates gave a loss or gradient that is not finite",
        evidence,
        "look at the groups in rejected/; lower learner.optimizer.learning_rate, raise its warmup, "
        "or compute in float32 (learner.compute_dtype)",
    )


def find_foreign_groups(facts: Facts) -> Cause | None:
    """Groups were refused for their policy version or its digest."""
    last = facts.metrics[-1] if facts.metrics else {}
    names = ("groups/unknown_receipt", "groups/stale", "groups/dropped_stale")
    counts = {name: float(last[name]) for name in names if last.get(name)}
    other = r"receipt|live weights of version"
    reported = matching(rf"{other}|StaleGroup|too stale", facts.reported)
    if not (counts or reported):
        return None
    unknown = bool(counts.get("groups/unknown_receipt") or matching(other, reported))
    return cause_of(
        "receipts",
        82 if reported else 50 if unknown else 30,
        "groups were sampled under weights that the learner never published"
        if unknown
        else "groups arrived too late for the policy version that sampled them",
        (*reported, *(f"{name} = {count:g} at the last step" for name, count in counts.items())),
        "a worker holds other weights than it was sent: compare weights.dtype and devices of both "
        "sides"
        if unknown
        else "raise rollout.max_staleness, or add workers so that groups arrive sooner",
    )


def find_used_up_restarts(facts: Facts) -> Cause | None:
    """Workers failed more often than the run allows."""
    if "WorkersLost" not in facts.error_types and not matching("worker_restarts", facts.reported):
        return None
    used_up = matching(r"worker_restarts", facts.reported, shown=1)
    return cause_of(
        "restarts used up",
        64,
        "rollout workers failed more often than placement.worker_restarts allows",
        (*used_up, *grouped([*facts.overcome_errors, *facts.worker_errors])[:SHOWN_LINES]),
        "fix what the workers' errors name (logs/rollout-*), then go on with --resume; a higher "
        "placement.worker_restarts only delays the end",
    )


def find_silent_process(facts: Facts) -> Cause | None:
    """A process did not answer before a deadline."""
    silent = (
        r"(?P<who>[\w.-]+) (?:did not answer|did not finish|has not answered|made no progress)"
        r"|waited [\d.]+ s for (?P<what>.+?): "
    )
    match = first_match(silent, facts.reported)
    if not match:
        return None
    who = match["who"] or match["what"]
    evidence = list(matching(silent, facts.reported))
    stopped = False
    for process in facts.processes:
        if re.search(rf"\b{re.escape(process.name)}\b", match.string) and process.state:
            stopped |= process.state == "T"
            dump = facts.stacks.get(f"{process.name}-{process.pid}", "")
            where = f"; in {innermost_frame(dump)}" if dump else ", and returned no stacks"
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


def find_accounting_error(facts: Facts) -> Cause | None:
    """The accounting of groups or seconds does not add up."""
    if "LedgerError" not in facts.error_types:
        return None
    return cause_of(
        "accounting",
        84,
        "internal accounting error: a bug in this program",
        (short(facts.error),),
        "report the bug with this archive; go on with --resume",
    )


def find_nothing_trained(facts: Facts) -> Cause | None:
    """Every update was skipped."""
    if facts.exit_code != 4:
        return None
    return cause_of(
        "nothing trained",
        80,
        short(facts.error),
        [f"the last {len(facts.metrics)} steps of metrics.jsonl"] if facts.metrics else [],
        "look at samples.jsonl: rewards that never differ, completions that are cut or have a "
        "reward_error; correct reward.functions, the data, or rollout.max_completion_tokens",
    )


def find_bad_configuration(facts: Facts) -> Cause | None:
    """The configuration was refused."""
    if facts.exit_code != 2:
        return None
    return cause_of(
        "configuration",
        90,
        f"the configuration cannot work: {short(facts.error)}",
        [short(line) for line in facts.error.splitlines()],
        "correct the key that the message names; --dry-run checks without starting anything",
    )
