"""The rules of a run of small groups."""

from services.trajectories.group_check import GroupRules


def group_rules(run_id: str, **changes) -> GroupRules:
    """Of groups of two completions with any id, with no bound on lengths, but for the changes."""
    settings = dict(
        group_size=2,
        vocab_size=369,
        max_prompt_tokens=2**25,
        max_completion_tokens=2**25,
        order=None,
    )
    return GroupRules(run_id=run_id, **{**settings, **changes})
