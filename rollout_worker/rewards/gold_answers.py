"""Finds the gold answers that a scorer of the run cannot judge, before the run starts."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout_worker.config.reward_config import RewardFunctionConfig
from rollout_worker.rewards.gold_scorer import UNJUDGED
from rollout_worker.rewards.processes.reward_process import USUAL, Allowance
from rollout_worker.rewards.reward_pool import RewardPool, ScoreRequest
from rollout_worker.rewards.scorers import BUILT_INS

_CHECK = "rollout_worker.rewards.gold_scorer:check_gold"
_FEWEST, _MOST = 4, 32
"""Answers that are checked before it is seen whether most of their checks hang: the most of each
process."""
_REQUESTS_PER_PROCESS = 1000  # fewer are checked before another process has started


def find_unjudged(
    scorer: str,
    golds: Sequence[ScoreRequest],
    *,
    timeout_s: float,
    allowance: Allowance = USUAL,
    params: Mapping[str, Any] | None = None,
) -> dict[int, str]:
    """Checks gold answers, those of foreign code in child processes, as completions are scored.

    Args:
        scorer: name of a reward function that can be loaded.
        golds: answers with their records; the completion is not read.
        timeout_s: bound on the check of one answer.
        allowance: what each child process gets.
        params: of the scorer.

    Returns:
        why the scorer cannot judge an answer, by its place in `golds`; nothing for a scorer that
        offers no check.

    Raises:
        ValueError: if a check hangs or ends its process again and again.
    """
    built_in = BUILT_INS.get(scorer)
    check = built_in.bound_check(params or {}) if built_in else None
    if not golds or (built_in and check is None):
        return {}
    if built_in and check and not built_in.needs:  # our own code, whose time is bounded
        reasons = [_reason(check, gold) for gold in golds]
        return {index: reason for index, reason in enumerate(reasons) if reason}
    processes = min(os.cpu_count() or 1, 1 + len(golds) // _REQUESTS_PER_PROCESS)
    pool = RewardPool(
        [RewardFunctionConfig(name=_CHECK, params={"scorer": scorer, "given": dict(params or {})})],
        processes=processes,
        timeout_s=timeout_s,
        allowance=allowance,
    )
    try:
        (first,) = pool.submit(golds[:1]).wait()
        if not first.error and not first.total:
            return {}
        problems = [first.error]
        while len(problems) < len(golds):
            at_once = min(max(_FEWEST, len(problems)), _MOST * processes)
            scores = pool.submit(golds[len(problems) :][:at_once]).wait()
            problems += [score.error for score in scores]
            _refuse_silence(scorer, problems[-len(scores) :], timeout_s)
    finally:
        pool.close()
    reasons = [problem.removeprefix(f"{_CHECK}: ").removeprefix(UNJUDGED) for problem in problems]
    return {index: reason for index, reason in enumerate(reasons) if reason}


def _refuse_silence(scorer: str, problems: Sequence[str], timeout_s: float) -> None:
    """Raises ValueError where most checks gave no answer: all of them would take hours."""
    silent = [one for one in problems if one and not one.startswith(f"{_CHECK}: {UNJUDGED}")]
    if len(problems) >= _FEWEST and 2 * len(silent) > len(problems):
        raise ValueError(
            f"reward function {scorer!r}: its check of gold answers gave no answer for "
            f"{len(silent)} of {len(problems)} records ({silent[0].removeprefix(f'{_CHECK}: ')}): "
            f"correct the check, or raise reward.timeout_s={timeout_s:g}"
        )


def needs_answer(scorer: str) -> bool:
    """Whether a built-in scorer cannot score without an answer; of another it is not known."""
    built_in = BUILT_INS.get(scorer)
    return built_in is not None and built_in.needs_answer


def _reason(check: Callable[[str, dict], object], gold: ScoreRequest) -> str:
    try:
        check(gold.answer, dict(gold.item))
    except ValueError as error:
        return str(error)
    return ""
