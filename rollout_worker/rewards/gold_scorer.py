"""A scorer that asks another scorer whether it can judge a gold answer.

It runs where scorers run, in the child processes of `reward_pool.py`; `gold_answers.py` uses it.
"""

import inspect

from rollout_worker.rewards.scorers import BUILT_INS, BadScorer, resolve_scorer


def check_gold(
    completion: str, *, answer: str, prompt: str, item: dict, scorer: str, given: dict | None = None
) -> float:
    """Returns 1 where a scorer can judge a gold answer, 0 where it offers no check.

    A scorer of the user's own offers one as an attribute: `score.check_gold = check`, where
    `check(answer, item)` raises ValueError for an answer that `score` cannot judge.

    Args:
        completion: not used.
        answer: the gold answer.
        prompt: not used.
        item: the whole record of the source.
        scorer: its name in the configuration.
        given: its parameters there; only the checks of built-in scorers read them.

    Raises:
        BadScorer: if the scorer cannot judge the answer.
    """
    if scorer in BUILT_INS:
        check = BUILT_INS[scorer].bound_check(given or {})
    else:
        check = getattr(resolve_scorer(scorer), "check_gold", None)
        if inspect.iscoroutinefunction(check):
            raise BadScorer(f"the check_gold of {scorer!r} is async: it must be a plain function")
    if check is None:
        return 0.0
    try:
        check(answer, item)
    except ValueError as error:  # an answer of the check, which needs no traceback in the log
        raise BadScorer(str(error)) from error
    return 1.0
