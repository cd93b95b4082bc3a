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
    training.find_bad_configuration,
    host.find_missing_resources,
)
"""In the order in which equal weights are listed."""

SHOWN_CAUSES = 3
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
    causes = [cause for cause in found if cause is not None]
    if all(cause.weight <= BROKEN for cause in causes):
        causes.append(_unknown(facts))
    return sorted(causes, key=lambda cause: -cause.weight)


def _unknown(facts: Facts) -> Cause:
    if not facts.error and facts.status.get("state") == "finished":
        return Cause(
            name="finished",
            weight=100,
            title="nothing went wrong: the run finished",
            evidence=(),
            next_step="nothing",
        )
    if not facts.error and facts.status.get("state") == "running" and not facts.driver_gone:
        return Cause(
            name="running",
            weight=100,
            title="the run is still going on: this shows its state",
            evidence=(),
            next_step="if it makes no progress, read stacks/ for where each process is",
        )
    error = facts.error or str(facts.status.get("reason", "")) or "no error is known"
    return Cause(
        name="unknown",
        weight=10,
        title=f"the cause is unknown: {short(without_ray_guesses(error))}",
        evidence=facts.logs[-3:],
        next_step="read error.txt, then the last lines of logs/",
    )


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
    ended = facts.error or str(status.get("reason") or "no reason is recorded")
    lines = [
        f"# {causes[0].title}",
        "",
        f"- run: {status.get('run', 'unknown')} ({status.get('run_id', 'no id')}), step "
        f"{status.get('step', 'unknown')}, last checkpoint {status.get('last_checkpoint')}",
        f"- started {_moment(status.get('started'))}, this page {utc()}",
        f"- exit code: {'none' if facts.exit_code is None else facts.exit_code}",
        f"- ended with: {short(without_ray_guesses(ended))}",
    ]
    for number, cause in enumerate(causes[:SHOWN_CAUSES], 1):
        lines += ["", f"## {number}. {cause.title} ({_certainty(cause.weight)})", ""]
        lines += [f"- {line}" for line in cause.evidence]
        lines += ["", f"What to do: {cause.next_step}."]
    lines += ["", "## In this archive", "", *(f"- {line}" for line in contents)]
    return "\n".join(lines) + "\n"


def _moment(seconds: float | None) -> str:
    return "unknown" if seconds is None else utc(seconds)


def _certainty(weight: int) -> str:
    named = ((90, "the evidence names it"), (65, "likely"), (40, "possible"))
    return next((word for least, word in named if weight >= least), "a guess")
