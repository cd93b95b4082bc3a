"""From groups to the sequences of an update: rewards, advantages, a teacher, and what is too far
off-policy.

The rules are the pure modules of objective/; here is their order, and what they ask the devices.
"""

from collections.abc import Sequence

import numpy as np

from learner.config import DistillationConfig, TrainingSettings
from learner.objective.advantages import AdvantageRule
from learner.objective.batching import (
    MicroBatch,
    Packing,
    Selection,
    SelectionRules,
    pack,
    rewarded_sequences,
    select_sequences,
)
from learner.objective.distillation import add_teacher, weigh_advantages
from learner.objective.gae import GaeRule, estimate_advantages
from learner.objective.kl_reward import kl_rewards
from learner.objective.length_rewards import LengthRule
from learner.objective.off_policy import (
    Correction,
    SequenceWeights,
    correct_selection,
    off_policy_metrics,
    weigh_sequence,
)
from learner.programs import Scorer
from services.process.phase_clock import PhaseClock
from services.wire.messages import Group


class GroupSelection:
    """How the groups of a step become what trains."""

    def __init__(
        self, settings: TrainingSettings, packing: Packing, vocab_size: int, scorer: Scorer
    ):
        """Args:
        scorer: of the policy, and of reference, critic and teacher where the algorithm has one.
        """
        algorithm = settings.algorithm
        self.rules = selection_rules(settings)
        self.correction = Correction(**algorithm.off_policy.model_dump())
        self._packing = packing
        self._vocab_size = vocab_size
        self._scorer = scorer
        self._kl_in_reward = algorithm.kl_coef if algorithm.kl_in == "reward" else 0.0
        self._critic = GaeRule.of(algorithm) if algorithm.has_critic else None
        self._distillation = algorithm.distillation
        self._teacher_in_loss = algorithm.teacher_in_loss

    def check(self, group: Group) -> None:
        """Checks one group as `select` does.

        Raises:
            ValueError: if a selection with it would raise one.
        """
        selected = select_sequences([group], self.rules, vocab_size=self._vocab_size)
        pack(selected.sequences, self._packing)

    def select(
        self, groups: Sequence[Group], clock: PhaseClock
    ) -> tuple[Selection, dict[str, float], list[np.ndarray] | None]:
        """Sequences with advantages, of rewards and of a teacher.

        Returns:
            The selection, metrics, and the logprobs of its sequences if they had to be worked out.

        Raises:
            ValueError: if a group is malformed or too long.
        """
        selected, metrics, known = self._rewarded(groups, clock)
        if self._distillation is not None:
            selected, of_teacher = self._taught(selected, self._distillation, clock)
            metrics |= of_teacher
        return selected, metrics, known

    def correct(
        self, selection: Selection, logprobs: list[np.ndarray] | None, clock: PhaseClock
    ) -> tuple[Selection, Sequence[MicroBatch], dict[str, float], list[np.ndarray] | None]:
        """Applies the off-policy correction.

        Args:
            logprobs: of each sequence, where they are known.

        Returns:
            The selection that remains, packed, metrics, and the logprobs of its sequences if they
            had to be worked out.
        """
        batches = pack(selection.sequences, self._packing)
        if not batches or not self.correction.is_on:
            return selection, batches, {}, logprobs
        logprobs = logprobs or self._scorer.logprobs(selection.sequences, batches, clock)
        weights = self.weigh(selection, logprobs)
        kept = [its for its, weight in zip(logprobs, weights, strict=True) if weight.is_kept]
        selection = correct_selection(selection, weights, self.correction, self.rules)
        batches = pack(selection.sequences, self._packing)
        return selection, batches, off_policy_metrics(weights, self.correction), kept

    def weigh(self, selection: Selection, logprobs: Sequence[np.ndarray]) -> list[SequenceWeights]:
        """Importance weights of the sequences, from the policy's logprobs of each."""
        return [
            weigh_sequence(sequence, logprob_N, self.correction)
            for sequence, logprob_N in zip(selection.sequences, logprobs, strict=True)
        ]

    def _rewarded(
        self, groups: Sequence[Group], clock: PhaseClock
    ) -> tuple[Selection, dict[str, float], list[np.ndarray] | None]:
        """As `select`, of rewards alone, less the KL penalty where it is in them."""
        vocab_size, added, metrics = self._vocab_size, None, {}
        if self._critic is not None:
            return self._estimated(groups, self._critic, clock)
        if self._kl_in_reward:
            sequences = rewarded_sequences(groups, self.rules, vocab_size=vocab_size)
            flat = [one for its in sequences.values() for records in its for one in records]
            scored = self._scorer.logprobs(flat, pack(flat, self._packing), clock, "reference")
            added, mean = kl_rewards(sequences, scored, self._kl_in_reward)
            metrics = {"train/kl": mean} if flat else {}
        selected = select_sequences(groups, self.rules, vocab_size=vocab_size, added=added)
        return selected, metrics, None

    def _estimated(
        self, groups: Sequence[Group], rule: GaeRule, clock: PhaseClock
    ) -> tuple[Selection, dict[str, float], list[np.ndarray] | None]:
        """As `_rewarded`, with advantages of tokens by the critic."""
        selected = select_sequences(groups, self.rules, vocab_size=self._vocab_size)
        sequences, reference = selected.sequences, None
        if not sequences:
            return selected, {}, None
        batches = pack(sequences, self._packing)
        logprobs, values = self._scorer.logprobs_and_values(sequences, batches, clock)
        if self._kl_in_reward:
            reference = self._scorer.logprobs(sequences, batches, clock, "reference")
        selected, metrics = estimate_advantages(selected, values, rule, reference)
        return selected, metrics, logprobs

    def _taught(
        self, selection: Selection, distillation: DistillationConfig, clock: PhaseClock
    ) -> tuple[Selection, dict[str, float]]:
        """Advantages with what the teacher says of them, and what it says on average."""
        selection = weigh_advantages(selection, distillation.advantage_coef)
        if self._teacher_in_loss or not selection.sequences:
            return selection, {}
        batches = pack(selection.sequences, self._packing)
        logprobs = self._scorer.logprobs(selection.sequences, batches, clock, "teacher")
        selection, mean = add_teacher(selection, logprobs, distillation.coef)
        return selection, {"train/distillation_kl": mean}


def selection_rules(settings: TrainingSettings) -> SelectionRules:
    """What the sections of a run say of rewards and advantages."""
    algorithm = settings.algorithm
    return SelectionRules(
        advantage=AdvantageRule(
            algorithm.advantage,
            eps=algorithm.advantage_eps,
            pass_k=algorithm.pass_k,
            pass_from=algorithm.correct_from,
        ),
        aggregation=algorithm.aggregation,
        zero_variance=algorithm.zero_variance,
        truncated=algorithm.truncated,
        max_completion_tokens=settings.max_completion_tokens,
        length=LengthRule(
            overlong_share=algorithm.overlong_share,
            length_coef=algorithm.length_coef,
            correct_from=algorithm.correct_from,
        ),
        reward_weights=settings.reward_weights,
    )
