"""Tries a scorer of the user before a run starts: most mistakes show at the first call."""

from collections.abc import Sequence

from rollout_worker.config.reward_config import RewardFunctionConfig
from rollout_worker.rewards.processes.reward_process import Allowance
from rollout_worker.rewards.reward_pool import RewardPool, ScoreRequest
from rollout_worker.rewards.reward_values import NO_REWARD
from rollout_worker.rewards.scorers import BUILT_INS


def try_scorer(
    function: RewardFunctionConfig,
    completions: Sequence[ScoreRequest],
    *,
    timeout_s: float,
    allowance: Allowance,
) -> str:
    """Scores completions of one prompt, in a child process that then ends.

    Args:
        function: can be loaded; nothing is done for a built-in one.
        completions: at least two, since a group scorer may return a list of another length.
        timeout_s: bound on one completion; of a group scorer on all of them.

    Returns:
        How it failed, where it failed for all of them; this may be the fault of the completions or
        of a server.

    Raises:
        ValueError: if what it returned is no reward; with the value, the rule and the fix.
        RuntimeError: if its process dies at its start or takes too long.
    """
    if function.name in BUILT_INS:
        return ""
    alone = RewardFunctionConfig(name=function.name, params=function.params)
    pool = RewardPool([alone], processes=1, timeout_s=timeout_s, allowance=allowance)
    try:
        scores = pool.submit(completions).wait()
    finally:
        pool.close()
    errors = [score.error.removeprefix(f"{function.name}: ") for score in scores]
    for error in errors:
        if error.startswith(NO_REWARD):
            raise ValueError(error)
    return errors[0] if all(errors) else ""
