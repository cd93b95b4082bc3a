"""Ranks the probable causes of how a run ended, and writes them on one page."""

from collections.abc import Sequence

from driver.postmortem import host_causes as host
from driver.postmortem import training_causes as training
from driver.postmortem.cause import Cause, PatternRule, Rule
from driver.postmortem.host_state import utc
from driver.postmortem.run_facts import Facts, short, without_ray_guesses

RULES: tuple[Rule, ...] = (
    host.find_out_of_memory,
    host.DEVICE_MEMORY,
    host.find_disk_full,
    host.FILE_ERROR,
    host.find_crash,
    training.find_lost_learner,
    host.find_killed_driver,
    training.find_failing_rewards,
    training.find_nonfinite_update,
    training.CANARY,
    training.find_foreign_groups,
    training.DAMAGED_FILE,
    host.PORT_TAKEN,
    host.HANDSHAKE,
    host.NETWORK,
    training.find_used_up_restarts,
    training.find_silent_process,
    training.find_accounting_error,
    training.find_nothing_trained,
    training.find_bad_configuration,
    host.find_missing_resources,
    host.HELD_SPOOL,
    host.find_lost_host,
)
"""In the order in which equal weights are listed."""

SHOWN_CAUSES = 3
KNOWN = 100
"""Weight of what status.json says of a run that has not failed."""
UNEXPLAINED = 10
"""Weight of an error that no rule explains."""
BROKEN = 1
"""Weight of a rule that could not be applied."""


def probable_causes(facts: Facts) -> list[Cause]:
    """Every explanation that the facts support, the likeliest first; at least one.

    A rule that fails on malformed facts, as a killed process may leave them, is skipped.
    """
    found = []
    for rule in RULES:
        try:
            found.append(rule(facts))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            found.append(_broken(rule, error))
    causes = [cause for cause in [_no_failure(facts), *found] if cause is not None]
    if all(cause.weight <= BROKEN for cause in causes):
        causes.append(_unknown(facts))
    return sorted(causes, key=lambda cause: -cause.weight)


def _no_failure(facts: Facts) -> Cause | None:
    """What status.json says of a run that has not failed; None for one that has."""
    state = facts.status.get("state")
    if state == "finished" and not facts.error:
        title, next_step = "nothing went wrong: the run finished", "nothing"
    elif state == "running" and not facts.error and not facts.driver_gone:
        title = "the run is still going on: this shows its state"
        next_step = "if it makes no progress, read stacks/ for where each process is"
    elif state == "interrupted":
        title = f"nothing went wrong: the run was {_ended(facts)}"
        next_step = "go on with --resume"
    else:
        return None
    return Cause(name=state, weight=KNOWN, title=title, evidence=(), next_step=next_step)


def _unknown(facts: Facts) -> Cause:
    """The error itself, where no rule says more of it."""
    return Cause(
        name="unknown",
        weight=UNEXPLAINED,
        title=_ended(facts),
        evidence=facts.logs[-3:],
        next_step="read error.txt, then the last lines of logs/",
    )


def _ended(facts: Facts) -> str:
    """How the run ended, in one line."""
    reason = facts.error or str(facts.status.get("reason") or "")
    if reason:
        return short(without_ray_guesses(reason))
    if facts.driver_gone:
        return "the driver is gone and did not write how it ended"
    states = {"finished": "all steps are done", "running": "it has not ended"}
    return states.get(str(facts.status.get("state")), "no reason is recorded")


def _broken(rule: Rule, error: Exception) -> Cause:
    name = (
        rule.name
        if isinstance(rule, PatternRule)
        else rule.__name__.removeprefix("find_").replace("_", " ")
    )
    return Cause(
        name="rule failed",
        weight=BROKEN,
        title=f"the rule {name!r} could not be applied",
        evidence=(f"{type(error).__name__}: {short(str(error))}",),
        next_step="report this as a bug, with this archive",
    )


def page(facts: Facts, causes: Sequence[Cause], contents: Sequence[str]) -> str:
    """PROBABLE_CAUSE.md: how the run ended, the likeliest causes, and what lies beside this page.

    Args:
        contents: a line for each part of the archive, and for each missing part.
    """
    status = facts.status
    lines = [
        f"# {causes[0].title}",
        "",
        f"- run: {status.get('run', 'unknown')} ({status.get('run_id', 'no id')}), step "
        f"{status.get('step', 'unknown')}, last checkpoint {status.get('last_checkpoint')}",
        f"- started {_moment(status.get('started'))}, this page {utc()}",
        f"- exit code: {'none' if facts.exit_code is None else facts.exit_code}",
        f"- ended with: {_ended(facts)}",
    ]
    for number, cause in enumerate(causes[:SHOWN_CAUSES], 1):
        lines += ["", f"## {number}. {cause.title} ({_certainty(cause.weight)})", ""]
        lines += [f"- {line}" for line in cause.evidence]
        lines += ["", f"What to do: {cause.next_step}."]
    lines += ["", "## In this archive", "", *(f"- {line}" for line in contents)]
    if facts.missing:
        gone = "stacks and logs, which are on that host in the logs folder of Ray's session"
        lines += ["", "## Not in this archive", "", *(f"- {who}: {gone}" for who in facts.missing)]
    return "\n".join(lines) + "\n"


def _moment(seconds: float | None) -> str:
    return "unknown" if seconds is None else utc(seconds)


def _certainty(weight: int) -> str:
    named = (
        (KNOWN, "known"),
        (90, "the evidence names it"),
        (65, "likely"),
        (40, "possible"),
        (UNEXPLAINED + 1, "a guess"),
    )
    return next((word for least, word in named if weight >= least), "no rule says more of it")
