"""From what is known of a run that ended badly to why it did, in plain words.

Pure: facts go in (`run_facts.py`), ranked causes come out (`cause_rules.py`), on one page.
"""

from collections.abc import Sequence

from driver.postmortem.cause_rules import RULES, Rule, Said
from driver.postmortem.host_state import utc
from driver.postmortem.run_facts import Cause, Facts, short, without_ray_guesses

SHOWN_CAUSES = 3
BROKEN = 1
"""Weight of a rule that could not be applied."""


def probable_causes(facts: Facts) -> list[Cause]:
    """Every explanation that the facts support, the likeliest first; at least one.

    A rule that stumbles over facts of an odd form, as a killed process may leave them, is one
    explanation less.
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
            next_step="nothing, unless its results surprise you",
        )
    if not facts.error and facts.status.get("state") == "running" and not facts.driver_gone:
        return Cause(
            name="running",
            weight=100,
            title="the run still goes: this shows where it is",
            evidence=(),
            next_step="if it does not move, read stacks/ for where each process is",
        )
    error = facts.error or str(facts.status.get("reason", "")) or "no error is known"
    return Cause(
        name="unknown",
        weight=10,
        title=f"no rule knows this end: {short(without_ray_guesses(error))}",
        evidence=facts.logs[-3:],
        next_step="read error.txt, then the last lines of logs/",
    )


def _broken(rule: Rule, error: Exception) -> Cause:
    name = rule.name if isinstance(rule, Said) else rule.__name__.strip("_")
    return Cause(
        name="rule failed",
        weight=BROKEN,
        title=f"the rule {name!r} could not be applied",
        evidence=(f"{type(error).__name__}: {short(str(error))}",),
        next_step="keep this archive with a report of the fault",
    )


def page(facts: Facts, causes: Sequence[Cause], contents: Sequence[str]) -> str:
    """PROBABLE_CAUSE.md: how the run ended, the likeliest causes, and what lies beside this page.

    Args:
        contents: a line for each part of the archive, and for what could not be had.
    """
    status = facts.status
    ended = facts.error or str(status.get("reason") or "nothing said")
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
