"""A scorer that asks another scorer whether it can judge a gold answer.

It runs where scorers run, in the child processes of `reward_pool.py`; `gold_answers.py` uses it.
"""

import inspect

from rollout_worker.rewards.scorers import BUILT_INS, BadScorer, resolve_scorer

UNJUDGED = "cannot judge: "
"""Begins the reason of a check; without it, the check gave no answer."""
MESSAGE_CHARS = 500


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
    if check is None:
        return 0.0
    try:
        if inspect.isawaitable(check(answer, item)):
            raise TypeError("it returns what has to be awaited: make it a plain function")
    except BaseException as error:  # foreign code, whose answer needs no traceback in the log
        mistake = f"its check_gold raises {type(error).__name__}: "
        text = str(error) if isinstance(error, ValueError) else f"{mistake}{error}"
        raise BadScorer(f"{UNJUDGED}{' '.join(text.split())[:MESSAGE_CHARS]}") from error
    return 1.0
