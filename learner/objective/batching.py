"""From scored groups to fixed-shape micro-batches, on the host, in numpy.

`select_sequences` decides which completions train and with what weight; `pack` lays them out. A row
holds several sequences, told apart by segment numbers. Everything about a token comes from lengths,
owners and finish reasons: no id is special, so a pad token that equals EOS does no harm and EOS is
trained. What an environment wrote in an episode is context alone: it has no weight, as a prompt.

Dimension key:
    B: rows of a micro-batch, over all devices
    T: token slots of a row
    N: input tokens of one sequence (prompt + completion - 1: the last token has no successor)
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from learner.objective.advantages import (
    AdvantageRule,
    GroupRewards,
    batch_advantages,
    has_variance,
)
from learner.objective.length_rewards import LengthRule, length_rewards
from learner.objective.loss import denominator, token_weight
from services.wire.messages import Completion, FinishReason, Group, Record

SMALLEST_ROW_TOKENS = 64
MAX_PADDING_ROWS = 0.25
"""Share of empty rows above which a smaller micro-batch is taken."""


class SelectionRules(NamedTuple):
    """Which completions train, and what divides their sum; see AlgorithmConfig."""

    advantage: AdvantageRule
    aggregation: str
    zero_variance: str
    """`keep`, or `mask`; after `resample`, which happens earlier, the remaining ones are masked."""
    truncated: str
    max_completion_tokens: int
    length: LengthRule = LengthRule()
    reward_weights: Mapping[str, float] = {}
    """Of each reward function; for an advantage that looks at them one by one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSequence:
    """One completion that trains, with its prompt, or one record of it; arrays are per input token,
    [N].

    Where the target belongs to the prompt, or to an environment, `weights` is 0 and the logprobs
    mean nothing.
    """

    group_id: str
    sample_index: int
    """Of the completion in its group."""
    token_ids: np.ndarray
    target_ids: np.ndarray
    """The token after each input token."""
    behavior_logprobs: np.ndarray
    """float32, nats; recorded when the token was drawn."""
    old_logprobs: np.ndarray
    """float32, nats; of the policy that the ratio is taken against; as selected, the same."""
    importance: np.ndarray
    """float32, >= 0; multiplies the policy term of the token. As selected, 1."""
    weights: np.ndarray
    """float32, >= 0; how the token counts in the sum that is divided by the denominator."""
    advantages: np.ndarray
    """float32; as selected, that of the completion at each token in the loss, else 0."""
    reward: float = 0.0
    """Of the whole completion, what lengths cost included."""
    values: np.ndarray | None = None
    """float32, in units of reward; of a critic before the first update, None without one."""
    returns: np.ndarray | None = None
    """float32; what the critic should say."""
    log_ratio: float | None = None
    """Of the whole sequence, before the update; None where the ratio is that of each token."""

    @property
    def active(self) -> np.ndarray:
        """Bool [N]; whether the token is in the loss."""
        return self.weights > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """The sequences of one batch, and numbers of the whole batch."""

    sequences: tuple[TrainSequence, ...]
    denominator: float
    active_tokens: int
    """Completion tokens with a weight."""
    zero_variance_groups: int
    outcomes: dict[str, str]
    """Ledger state by group_id: trained, dropped_zero_variance, dropped_error, dropped_truncated
    where `truncated: mask` left none of the group's sequences, or dropped_stale where the
    off-policy correction did. A group is trained only if a sequence of it is."""


class MicroBatch(NamedTuple):
    """Arrays [B, T] of one call of the train step, numpy here and jax there.

    Slots of segment 0 are padding.
    """

    token_ids: Any
    """int32."""
    target_ids: Any
    """int32."""
    positions: Any
    """int32; from 0 in every segment."""
    segments: Any
    """int32; from 1 in every row."""
    old_logprobs: Any
    """float32, nats."""
    advantages: Any
    """float32; times the importance of the token."""
    weights: Any
    """float32; above 0 exactly where a token is in the loss."""
    sequence_log_ratios: Any = None
    """float32; None where the ratio is that of each token."""
    values: Any = None
    """float32, in units of reward; of the critic before the first update, None without one."""
    returns: Any = None
    """float32; what the critic should say; None without one."""

    @property
    def tokens_only(self) -> "MicroBatch":
        """Without what only some objectives have: one shape for every scoring of tokens."""
        return self._replace(sequence_log_ratios=None, values=None, returns=None)


def rewarded_sequences(
    groups: Sequence[Group], rules: SelectionRules, *, vocab_size: int
) -> dict[str, list[tuple[TrainSequence, ...]]]:
    """The records of every completion by group_id, without an advantage; none of one without a
    reward.

    Raises:
        ValueError: as select_sequences does.
    """
    for group in groups:
        _check_group(group, vocab_size)
    return {
        group.group_id: [
            _sequences(group, completion, 0.0, 0.0, rules.aggregation)
            if np.isfinite(_total(completion))
            else ()
            for completion in group.completions
        ]
        for group in groups
    }


def select_sequences(
    groups: Sequence[Group],
    rules: SelectionRules,
    *,
    vocab_size: int,
    added: Mapping[str, np.ndarray] | None = None,
) -> Selection:
    """Turns groups into training sequences with advantages and weights.

    A completion whose scoring failed or that was aborted is left out of the statistics of its
    group and of the loss. A truncated one stays in the baseline, and in the loss unless the rule
    says `mask`. Left-out completions count in no denominator.

    Args:
        added: by group_id, what is added to the rewards that advantages are made of; float64 [G].

    Raises:
        ValueError: if a group's arrays contradict each other or name unknown token ids.
    """
    outcomes, zero_variance_groups, used, rewards = {}, 0, [], []
    for group in groups:
        _check_group(group, vocab_size)
        total_G = np.array([_total(completion) for completion in group.completions])
        varied, rewarded = has_variance(total_G), bool(np.isfinite(total_G).any())
        zero_variance_groups += rewarded and not varied
        if not rewarded:
            outcomes[group.group_id] = "dropped_error"
        elif not varied and rules.zero_variance != "keep":
            outcomes[group.group_id] = "dropped_zero_variance"
        else:
            used.append(group)
            added_G = np.zeros(total_G.shape) if added is None else added[group.group_id]
            rewards.append(_rewards_of(group, total_G, added_G, rules))
    sequences = []
    advantages = batch_advantages(rewards, rules.advantage)
    for group, its, advantage_G in zip(used, rewards, advantages, strict=True):
        each = zip(group.completions, its.total_G, advantage_G, strict=True)
        kept = [
            sequence
            for completion, reward, advantage in each
            if np.isfinite(_total(completion)) and not _is_masked(completion, rules)
            for sequence in _sequences(
                group, completion, float(reward), float(advantage), rules.aggregation
            )
        ]
        outcomes[group.group_id] = "trained" if kept else "dropped_truncated"
        sequences += kept
    return sum_up(sequences, rules, outcomes=outcomes, zero_variance_groups=zero_variance_groups)


def _rewards_of(
    group: Group, total_G: np.ndarray, added_G: np.ndarray, rules: SelectionRules
) -> GroupRewards:
    """The rewards that advantages are made of, what lengths cost among them."""
    if rules.length.is_on:
        added_G = added_G + length_rewards(
            np.array([c.model_tokens for c in group.completions]),
            np.array([c.record_model_tokens for c in group.completions]),
            total_G,
            rules.length,
            max_completion_tokens=rules.max_completion_tokens,
        )
    if rules.advantage.kind != "reward_norm":
        return GroupRewards(total_G + added_G)
    has_none_G = np.where(np.isfinite(total_G), 0.0, np.nan)
    each_RG = [
        np.array([c.rewards.get(name, np.nan) for c in group.completions]) + has_none_G
        for name in rules.reward_weights
    ]
    weight_R = [*rules.reward_weights.values(), 1.0]
    return GroupRewards(
        total_G + added_G, np.array([*each_RG, added_G + has_none_G]), np.array(weight_R)
    )


def sum_up(
    sequences: Sequence[TrainSequence],
    rules: SelectionRules,
    *,
    outcomes: dict[str, str],
    zero_variance_groups: int,
) -> Selection:
    """The selection of exactly these sequences: they alone count in the denominator, in which all
    records of a completion are one.
    """
    active_tokens = sum(int(s.active.sum()) for s in sequences)
    completions = len({(s.group_id, s.sample_index) for s in sequences})
    return Selection(
        sequences=tuple(sequences),
        denominator=denominator(
            active_tokens, completions, rules.aggregation, rules.max_completion_tokens
        ),
        active_tokens=active_tokens,
        zero_variance_groups=zero_variance_groups,
        outcomes=outcomes,
    )


def _has_reward(completion: Completion) -> bool:
    return completion.finish_reason is not FinishReason.ABORTED and not completion.reward_error


def _total(completion: Completion) -> float:
    return completion.total_reward if _has_reward(completion) else np.nan


def _is_masked(completion: Completion, rules: SelectionRules) -> bool:
    return completion.finish_reason is FinishReason.LENGTH and rules.truncated == "mask"


def _check_group(group: Group, vocab_size: int) -> None:
    ids = [group.prompt_token_ids, *(c.token_ids for c in group.completions)]
    if any(len(one) == 0 for one in ids):
        raise ValueError(f"group {group.group_id}: prompt and completions need at least 1 token")
    for completion in group.completions:
        try:
            completion.check_segments()
        except ValueError as error:
            where = f"group {group.group_id}, sample {completion.sample_index}"
            raise ValueError(f"{where}: {error}") from None
    low, high = min(int(one.min()) for one in ids), max(int(one.max()) for one in ids)
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"group {group.group_id}: token ids lie in {low}..{high}, "
            f"the model has 0..{vocab_size - 1}"
        )


def _sequences(
    group: Group, completion: Completion, reward: float, advantage: float, aggregation: str
) -> tuple[TrainSequence, ...]:
    """The records of a completion, whose rewards, advantages and weights are those of the whole."""
    weight = np.float32(token_weight(completion.model_tokens, aggregation))
    return tuple(
        _sequence(group, completion, record, reward, np.float32(advantage), weight)
        for record in completion.records(group.prompt_token_ids)
    )


def _sequence(
    group: Group,
    completion: Completion,
    record: Record,
    reward: float,
    advantage: np.float32,
    weight: np.float32,
) -> TrainSequence:
    tokens = record.token_ids
    # Input position t scores token t + 1: the last prompt token scores the first sampled one.
    is_sampled = record.is_sampled[1:]
    behavior_logprobs = np.zeros(len(tokens) - 1, np.float32)
    behavior_logprobs[is_sampled] = record.behavior_logprobs
    return TrainSequence(
        group_id=group.group_id,
        sample_index=completion.sample_index,
        token_ids=tokens[:-1],
        target_ids=tokens[1:],
        behavior_logprobs=behavior_logprobs,
        old_logprobs=behavior_logprobs,
        importance=np.ones(len(tokens) - 1, np.float32),
        weights=np.where(is_sampled, weight, np.float32(0)),
        advantages=np.where(is_sampled, advantage, np.float32(0)),
        reward=reward,
    )


def row_buckets(longest_row: int) -> tuple[int, ...]:
    """Row lengths that may be compiled: powers of two from 64, and the longest one."""
    buckets, size = [], SMALLEST_ROW_TOKENS
    while size < longest_row:
        buckets.append(size)
        size *= 2
    return (*buckets, longest_row)


class Packing(NamedTuple):
    """Sizes that micro-batches must fit."""

    longest_row: int
    """Slots of one micro-batch on one device, or on those that share its rows; of one row at
    most."""
    devices: int
    """Over which the rows of a micro-batch are divided, those that share rows counted as one."""


class RowLayout(NamedTuple):
    """Which sequences each row holds."""

    rows: list[list[int]]
    """Of all micro-batches, in order: the indices of the sequences that follow each other."""
    B: int
    T: int

    @property
    def starts(self) -> range:
        """The first row of each micro-batch."""
        return range(0, len(self.rows), self.B)


def lay_out(sequences: Sequence[TrainSequence], packing: Packing) -> RowLayout:
    """Plans rows of equal length, and micro-batches of equal shape.

    The row length is the smallest bucket that holds the longest sequence; shorter ones share
    rows (first fit, longest first). A micro-batch has the same number of rows on every device: as
    many as the token budget allows, or that halved until few rows stay empty. So few shapes are
    ever compiled.

    Args:
        sequences: at least one.

    Raises:
        ValueError: if a sequence exceeds the budget.
    """
    longest_row, devices = packing
    longest = max(len(s.token_ids) for s in sequences)
    if longest > longest_row:
        raise ValueError(
            f"a sequence of {longest} tokens does not fit a row of {longest_row}: raise "
            "learner.microbatch_tokens or learner.mesh.context, or lower the length limits of "
            "prompt and completion"
        )
    row_tokens = min(b for b in row_buckets(longest_row) if b >= longest)
    rows = first_fit_decreasing([len(s.token_ids) for s in sequences], row_tokens)
    B = devices * _rows_per_device(-(-len(rows) // devices), longest_row // row_tokens)
    return RowLayout(rows, B, row_tokens)


def pack(sequences: Sequence[TrainSequence], packing: Packing) -> tuple[MicroBatch, ...]:
    """Lays sequences out as `lay_out` plans; none where there are no sequences.

    Raises:
        ValueError: if a sequence exceeds the budget.
    """
    if not sequences:
        return ()
    layout = lay_out(sequences, packing)
    rows = [[sequences[i] for i in row] for row in layout.rows]
    return tuple(
        _fill(rows[start : start + layout.B], layout.B, layout.T) for start in layout.starts
    )


def unpack(
    arrays: Sequence[np.ndarray], sequences: Sequence[TrainSequence], packing: Packing
) -> list[np.ndarray]:
    """The inverse of `pack(sequences, packing)`, for one array.

    Args:
        arrays: [B, T] of each micro-batch, a number per token.

    Returns:
        [N] for each sequence, in their order.
    """
    layout = lay_out(sequences, packing)
    found: list[np.ndarray] = [np.empty(0)] * len(sequences)
    for start, array_BT in zip(layout.starts, arrays, strict=True):
        for row, array_T in zip(layout.rows[start : start + layout.B], array_BT, strict=False):
            at = 0
            for i in row:
                N = len(sequences[i].token_ids)
                found[i] = array_T[at : at + N]
                at += N
    return found


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of the items of each bin; ties keep their order, so the result is reproducible."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((b for b, free in enumerate(room) if free >= lengths[i]), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(capacity)
        bins[place].append(i)
        room[place] -= lengths[i]
    return bins


def _rows_per_device(needed: int, most: int) -> int:
    """The largest of most, most/2, .. that leaves few rows empty, or the least wasteful."""
    sizes = []
    while most >= 1:
        sizes.append(most)
        most //= 2
    padding = {size: -needed % size for size in sizes}
    for size in sizes:
        if padding[size] <= MAX_PADDING_ROWS * (needed + padding[size]):
            return size
    return min(sizes, key=lambda size: padding[size])


def _fill(rows: list[list[TrainSequence]], B: int, T: int) -> MicroBatch:
    integers = {
        name: np.zeros((B, T), np.int32)
        for name in ("token_ids", "target_ids", "positions", "segments")
    }
    floats = {
        name: np.zeros((B, T), np.float32) for name in ("old_logprobs", "advantages", "weights")
    }
    every = [sequence for row in rows for sequence in row]
    if any(sequence.log_ratio is not None for sequence in every):
        floats["sequence_log_ratios"] = np.zeros((B, T), np.float32)
    if any(sequence.returns is not None for sequence in every):
        floats |= {name: np.zeros((B, T), np.float32) for name in ("values", "returns")}
    batch = MicroBatch(**integers, **floats)
    for b, row in enumerate(rows):
        start = 0
        for segment, sequence in enumerate(row, start=1):
            N = len(sequence.token_ids)
            here = (b, slice(start, start + N))
            batch.token_ids[here] = sequence.token_ids
            batch.target_ids[here] = sequence.target_ids
            batch.positions[here] = np.arange(N)
            batch.segments[here] = segment
            batch.old_logprobs[here] = sequence.old_logprobs
            batch.advantages[here] = sequence.advantages * sequence.importance
            batch.weights[here] = sequence.weights
            if batch.sequence_log_ratios is not None:
                batch.sequence_log_ratios[here] = sequence.log_ratio
            if batch.returns is not None:
                batch.values[here], batch.returns[here] = sequence.values, sequence.returns
            start += N
    return batch
