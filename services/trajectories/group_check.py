"""The rules that every group must keep to be trained on."""

import math

import numpy as np

from services.process.phases import PHASES
from services.wire.messages import Completion, Group

LOGPROB_ROUNDING = 1e-5
"""A logprob is at most 0; float32 normalisers may overshoot by this much, in nats."""
MOST_SHOWN = 32
"""Numbers of a list in a message."""


def check_group(group: Group, run_id: str, group_size: int) -> None:
    """Raises ValueError, with value and rule, unless the group can be trained on in this run.

    Args:
        group_size: completions of every group: advantages are relative to a whole group.
    """
    if group.run_id != run_id:
        raise ValueError(f"group {group.group_id!r} is of run {group.run_id!r}, not {run_id!r}")
    if not group.group_id:
        raise ValueError("group_id must not be empty")
    where = f"group {group.group_id!r}"
    for field in ("attempt", "prompt_id", "epoch", "policy_version"):
        value = getattr(group, field)
        if value < 0:
            raise ValueError(f"{where}: {field} must be at least 0, got {value}")
    _check_ids(group.prompt_token_ids, f"{where}: prompt_token_ids")
    indices = [completion.sample_index for completion in group.completions]
    if sorted(indices) != list(range(group_size)):
        raise ValueError(
            f"{where}: a group of this run has {group_size} completions, with each sample_index "
            f"from 0 to {group_size - 1} once; got {len(indices)}: {_listed(indices)}"
        )
    for completion in group.completions:
        _check_completion(completion, f"{where}, sample {completion.sample_index}")
    for phase, seconds in group.phase_s.items():
        if phase not in PHASES or not 0 <= seconds < math.inf:
            raise ValueError(
                f"{where}: phase_s must give finite seconds >= 0 by ledger phase, "
                f"got {phase!r}: {seconds}"
            )


def group_nbytes(group: Group) -> int:
    """Bytes of the arrays of a group, which is nearly all of its memory."""
    return group.prompt_token_ids.nbytes + sum(
        completion.token_ids.nbytes + completion.behavior_logprobs.nbytes
        for completion in group.completions
    )


def _listed(indices: list[int]) -> str:
    """The numbers, or the first of very many."""
    shown = ", ".join(map(str, indices[:MOST_SHOWN]))
    return f"[{shown}{', ...' if len(indices) > MOST_SHOWN else ''}]"


def _check_completion(completion: Completion, where: str) -> None:
    token_ids, logprobs = completion.token_ids, completion.behavior_logprobs
    _check_ids(token_ids, f"{where}: token_ids")
    if logprobs.dtype != np.float32 or logprobs.shape != token_ids.shape:
        raise ValueError(
            f"{where}: behavior_logprobs must be float32 with one value for each of the "
            f"{len(token_ids)} token_ids, got {logprobs.dtype} {logprobs.shape}"
        )
    if (logprobs > LOGPROB_ROUNDING).any():
        raise ValueError(f"{where}: a logprob is at most 0, got {logprobs.max()}")
    failed = bool(completion.reward_error)
    if not failed and not np.isfinite(logprobs).all():
        position = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        raise ValueError(f"{where}: logprob of token {position} is {logprobs[position]}")
    if failed != math.isnan(completion.total_reward) or math.isinf(completion.total_reward):
        raise ValueError(
            f"{where}: total_reward must be finite, or NaN exactly when reward_error is set; got "
            f"{completion.total_reward} with reward_error={completion.reward_error!r}"
        )
    for name, reward in completion.rewards.items():
        if not failed and not math.isfinite(reward):
            raise ValueError(f"{where}: reward {name!r} is {reward} and reward_error is empty")


def _check_ids(ids: np.ndarray, where: str) -> None:
    if ids.dtype != np.int32 or ids.ndim != 1 or len(ids) == 0:
        raise ValueError(f"{where} must be int32 [T] with T >= 1, got {ids.dtype} {ids.shape}")
    if ids.min() < 0:
        raise ValueError(f"{where} must be at least 0, got {ids.min()}")
