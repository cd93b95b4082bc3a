"""The rules that every group must keep to be trained on."""

import dataclasses
import math

import numpy as np

from services.process.phases import PHASES
from services.trajectories.data_order import DataOrder, index_of
from services.wire.messages import Completion, Group

LOGPROB_ROUNDING = 1e-5
"""A logprob is at most 0; float32 normalisers may overshoot by this much, in nats."""
LOWEST_LOGPROB = -80.0
"""A token that was drawn has more: float32 noise draws none below e^-40. The importance weight of a
lower one is no float32."""
MOST_SHOWN = 32
"""Numbers of a list in a message."""
MOST_NAMES = 1024
"""Rewards of a completion, by name: `gsm8k_answer`, `gsm8k_answer/lenient`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupRules:
    """What the groups of one run have in common: whatever trains on a group relies on it."""

    run_id: str
    group_size: int
    """Completions of every group: advantages are relative to a whole group."""
    vocab_size: int
    """Token ids from here on are none."""
    max_prompt_tokens: int
    max_completion_tokens: int
    order: DataOrder | None
    """Of the prompts; None where groups are not made from it, and have any id."""


def check_group(group: Group, rules: GroupRules) -> None:
    """Raises ValueError, with value and rule, unless the group can be trained on in this run."""
    if group.run_id != rules.run_id:
        raise ValueError(
            f"group {group.group_id!r} is of run {group.run_id!r}, not {rules.run_id!r}"
        )
    if not group.group_id:
        raise ValueError("group_id must not be empty")
    where = f"group {group.group_id!r}"
    for field in ("attempt", "prompt_id", "epoch", "policy_version"):
        value = getattr(group, field)
        if value < 0:
            raise ValueError(f"{where}: {field} must be at least 0, got {value}")
    if rules.order is not None:
        _check_place(group, rules.order, where)
    _check_ids(
        group.prompt_token_ids,
        f"{where}: prompt_token_ids",
        vocab_size=rules.vocab_size,
        longest=rules.max_prompt_tokens,
    )
    indices = [completion.sample_index for completion in group.completions]
    if sorted(indices) != list(range(rules.group_size)):
        raise ValueError(
            f"{where}: a group of this run has {rules.group_size} completions, with each "
            f"sample_index from 0 to {rules.group_size - 1} once; got {len(indices)}: "
            f"{_listed(indices)}"
        )
    for completion in group.completions:
        its = f"{where}, sample {completion.sample_index}"
        _check_completion(completion, rules, its)
        _check_records(completion, group.prompt_token_ids, rules, its)
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


def _check_completion(completion: Completion, rules: GroupRules, where: str) -> None:
    token_ids, logprobs = completion.token_ids, completion.behavior_logprobs
    longest = math.inf if completion.record_starts else rules.max_completion_tokens
    _check_ids(token_ids, f"{where}: token_ids", vocab_size=rules.vocab_size, longest=longest)
    try:
        completion.check_segments()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if (logprobs > LOGPROB_ROUNDING).any():
        raise ValueError(f"{where}: a logprob is at most 0, got {logprobs.max()}")
    failed = bool(completion.reward_error)
    if not failed and not np.isfinite(logprobs).all():
        position = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        raise ValueError(f"{where}: logprob of token {position} is {logprobs[position]}")
    if not failed and logprobs.min() < LOWEST_LOGPROB:
        raise ValueError(
            f"{where}: the logprob of a drawn token is at least {LOWEST_LOGPROB:g}, got "
            f"{logprobs.min()}"
        )
    if failed != math.isnan(completion.total_reward) or math.isinf(completion.total_reward):
        raise ValueError(
            f"{where}: total_reward must be finite, or NaN exactly when reward_error is set; got "
            f"{completion.total_reward} with reward_error={completion.reward_error!r}"
        )
    if len(completion.rewards) > MOST_NAMES:
        raise ValueError(
            f"{where}: a completion has at most {MOST_NAMES} rewards by name, got "
            f"{len(completion.rewards)}"
        )
    for name, reward in completion.rewards.items():
        if not failed and not math.isfinite(reward):
            raise ValueError(f"{where}: reward {name!r} is {reward} and reward_error is empty")


def _check_records(
    completion: Completion, prompt_token_ids: np.ndarray, rules: GroupRules, where: str
) -> None:
    """Checks that no record is longer than the prompt and a completion may be."""
    longest = len(prompt_token_ids) + rules.max_completion_tokens
    for number, record in enumerate(completion.records(prompt_token_ids)):
        if len(record.token_ids) > longest:
            raise ValueError(
                f"{where}: record {number} may have {longest} tokens, those of the prompt and "
                f"{rules.max_completion_tokens}, got {len(record.token_ids)}"
            )


def _check_place(group: Group, order: DataOrder, where: str) -> None:
    """Checks that id and epoch are those of one index of the data order."""
    index = index_of(group.group_id)
    if index is None:
        raise ValueError(f"{where}: the id of a group is made from its index, such as g00000012")
    epoch = order.epoch_at(index)
    if group.epoch != epoch:
        source = order.source_at(index)
        of_source = f" of its source {source.name}" if order.is_mixed else ""
        raise ValueError(
            f"{where}: with {source.count} prompts{of_source} its epoch is {epoch}, got "
            f"{group.epoch}"
        )


def _check_ids(ids: np.ndarray, where: str, *, vocab_size: int, longest: float) -> None:
    if ids.dtype != np.int32 or ids.ndim != 1 or len(ids) == 0:
        raise ValueError(f"{where} must be int32 [T] with T >= 1, got {ids.dtype} {ids.shape}")
    if ids.min() < 0:
        raise ValueError(f"{where} must be at least 0, got {ids.min()}")
    if ids.max() >= vocab_size:
        raise ValueError(f"{where} must be below the vocabulary's {vocab_size}, got {ids.max()}")
    if len(ids) > longest:
        raise ValueError(f"{where} may have {longest} tokens in this run, got {len(ids)}")
