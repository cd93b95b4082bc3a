"""The learner without its services: owns the policy, and makes the next version from groups.

The arithmetic is in the pure modules of update/ and publish/; here are the devices, the compiled
functions, the clock and the order of calls.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from learner.compiled_functions import make_learner_functions
from learner.config import DistillationConfig, TrainingSettings
from learner.objective.advantages import AdvantageRule
from learner.objective.batching import (
    MicroBatch,
    Packing,
    Selection,
    SelectionRules,
    TrainSequence,
    pack,
    rewarded_sequences,
    select_sequences,
    unpack,
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
from learner.objective.sequence_ratio import with_sequence_ratios
from learner.publish.canary import ScoredProbe
from learner.publish.snapshot import PUBLISH_DTYPES, Snapshot, host_weights
from learner.teacher import TeacherModel
from learner.update.state import TrainState, init_state, place_params
from learner.update.update_metrics import (
    combine_updates,
    group_metrics,
    outcome_metrics,
    selection_metrics,
    token_funnel,
    update_metrics,
)
from learner.update.value_head import policy_params, with_value_head
from models.config import ModelConfig
from models.probe import precision
from models.transformer import Params
from services.process import failpoints
from services.process.phase_clock import PhaseClock
from services.wire.messages import Group


class LearnerCore:
    """Owns the policy's master weights, their optimiser, and the devices both lie on.

    Methods may be called from different threads; each waits for the one before, so that weights
    are never read while a step replaces them.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        model_config: ModelConfig,
        params: Params,
        *,
        devices: Sequence[jax.Device] | None = None,
        teacher: TeacherModel | None = None,
    ):
        """Args:
            params: host arrays of any float dtype, layers stacked; also the reference policy
                where algorithm.kl_coef is above 0.
            devices: None takes every device of the default platform.
            teacher: as `load_teacher` gives it for the algorithm and the model.

        Raises:
            ValueError: if mesh or schedule cannot work, with the numbers, or the algorithm needs a
                teacher that is not given.
        """
        algorithm, learner = settings.algorithm, settings.learner
        if (algorithm.distillation is None) != (teacher is None):
            raise ValueError("a teacher is given where algorithm.distillation is, and only there")
        self._lock = threading.Lock()
        self._config = model_config
        self._learner = learner
        self._valid_vocab = settings.valid_vocab
        self._devices = jax.devices() if devices is None else list(devices)
        self._precision = precision(jnp.dtype(learner.compute_dtype), self._devices[0].platform)
        self._functions = make_learner_functions(
            params,
            model_config,
            settings,
            devices=self._devices,
            teacher=teacher and teacher.config,
        )
        self._rules = SelectionRules(
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
        self._clips_tokens = algorithm.policy_loss == "clip"
        self._packing = Packing(learner.microbatch_tokens, len(self._devices))
        self._correction = Correction(**algorithm.off_policy.model_dump())
        self._kl_in_reward = algorithm.kl_coef if algorithm.kl_in == "reward" else 0.0
        self._critic = GaeRule.of(algorithm) if algorithm.has_critic else None
        made = self._functions
        self._state = init_state(
            with_value_head(params, model_config.hidden_size) if self._critic else params,
            made.optimizer,
            made.mesh,
            made.specs,
            made.entropy_bonus,
        )
        self._reference = None
        if algorithm.kl_coef > 0:
            self._reference = place_params(
                params, made.mesh, policy_params(made.specs), jnp.dtype(learner.compute_dtype)
            )
        self._distillation, self._teacher = algorithm.distillation, None
        if teacher is not None and made.teacher is not None:
            dtype = jnp.dtype(learner.compute_dtype)
            self._teacher = place_params(teacher.params, made.mesh, made.teacher.specs, dtype)
        self._teacher_in_loss = self._teacher if algorithm.teacher_in_loss else None
        self._compiled: dict[str, jax.stages.Compiled] = {}
        self.policy_version = 0
        """Counts calls of `update`, skipped ones included: it names weights, one set each."""
        self.programs_run = 0
        """Programs that have ended, such as one for each micro-batch: they show that it works."""
        self.outcomes: dict[str, str] = {}
        """Of the last update: ledger state by group_id."""
        self.rejected: tuple[Group, ...] = ()
        """The groups of the last update if it was skipped as not finite; empty otherwise."""

    def update(self, groups: Sequence[Group], clock: PhaseClock) -> dict[str, float]:
        """Trains on these groups and becomes the next policy version.

        Args:
            groups: at least one; all of them are used or accounted for in `outcomes`.
            clock: gets the seconds of `compile`, `optimizer` and, for all the rest,
                `forward_backward`.

        Returns:
            Metrics by the names of the metrics log; `train/update_skipped` is 1.0 where the
            weights did not change because nothing was left to train on or a number was not finite.

        Raises:
            ValueError: if there is no group, or one is malformed or too long.
        """
        if not groups:
            raise ValueError("update needs at least 1 group, got none")
        with self._lock, clock.phase("forward_backward"):
            started, compile_s = time.monotonic(), clock.peek()["compile"]
            selected, reward_metrics, known = self._selected(groups, clock)
            selection, batches, metrics, logprobs = self._corrected(selected, known, clock)
            metrics |= reward_metrics | group_metrics(
                groups,
                policy_version=self.policy_version,
                max_completion_tokens=self._rules.max_completion_tokens,
            )
            metrics |= selection_metrics(selection, batches, groups=len(groups))
            trained, clipped_tokens = self._train(groups, selection, batches, logprobs, clock)
            skipped = bool(trained["train/update_skipped"])
            metrics |= trained | token_funnel(
                groups,
                selected,
                selection,
                clipped_tokens=clipped_tokens,
                skipped=skipped,
                all_train=self._teacher_in_loss is not None,
            )
            update_s = time.monotonic() - started - (clock.peek()["compile"] - compile_s)
            metrics["throughput/train/valid_tokens_per_s_update"] = (
                selection.active_tokens * self._learner.updates_per_batch / update_s
            )
            metrics |= self._memory_metrics()
            self.outcomes = selection.outcomes
            if self.rejected:
                ends = {"trained": "dropped_error"}
                self.outcomes = {g: ends.get(end, end) for g, end in selection.outcomes.items()}
            metrics |= outcome_metrics(self.outcomes)
            self.policy_version += 1
            return metrics

    def check_trainable(self, group: Group) -> None:
        """Checks one group as `update` does.

        Raises:
            ValueError: if an update with it would raise one.
        """
        selected = select_sequences([group], self._rules, vocab_size=self._config.vocab_size)
        pack(selected.sequences, self._packing)

    def _selected(
        self, groups: Sequence[Group], clock: PhaseClock
    ) -> tuple[Selection, dict[str, float], list[np.ndarray] | None]:
        """Sequences with advantages, of rewards and of a teacher.

        Returns:
            The selection, metrics, and the logprobs of its sequences if they had to be worked out.
        """
        selected, metrics, known = self._rewarded(groups, clock)
        if self._distillation is not None:
            selected, of_teacher = self._taught(selected, self._distillation, clock)
            metrics |= of_teacher
        return selected, metrics, known

    def _rewarded(
        self, groups: Sequence[Group], clock: PhaseClock
    ) -> tuple[Selection, dict[str, float], list[np.ndarray] | None]:
        """As `_selected`, of rewards alone, less the KL penalty where it is in them."""
        vocab_size, added, metrics = self._config.vocab_size, None, {}
        if self._critic is not None:
            return self._estimated(groups, self._critic, clock)
        if self._kl_in_reward:
            sequences = rewarded_sequences(groups, self._rules, vocab_size=vocab_size)
            flat = [one for its in sequences.values() for one in its if one is not None]
            scored = self._scored(flat, pack(flat, self._packing), clock, "reference")
            added, mean = kl_rewards(sequences, scored, self._kl_in_reward)
            metrics = {"train/kl": mean} if flat else {}
        selected = select_sequences(groups, self._rules, vocab_size=vocab_size, added=added)
        return selected, metrics, None

    def _estimated(
        self, groups: Sequence[Group], rule: GaeRule, clock: PhaseClock
    ) -> tuple[Selection, dict[str, float], list[np.ndarray] | None]:
        """As `_rewarded`, with advantages of tokens by the critic."""
        selected = select_sequences(groups, self._rules, vocab_size=self._config.vocab_size)
        sequences, reference = selected.sequences, None
        if not sequences:
            return selected, {}, None
        batches = pack(sequences, self._packing)
        scored = [self._score("critic", self._state.params, batch, clock) for batch in batches]
        logprobs, values = (
            unpack(arrays, sequences, self._packing) for arrays in zip(*scored, strict=True)
        )
        if self._kl_in_reward:
            reference = self._scored(sequences, batches, clock, "reference")
        selected, metrics = estimate_advantages(selected, values, rule, reference)
        return selected, metrics, logprobs

    def _taught(
        self, selection: Selection, distillation: DistillationConfig, clock: PhaseClock
    ) -> tuple[Selection, dict[str, float]]:
        """Advantages with what the teacher says of them, and what it says on average."""
        selection = weigh_advantages(selection, distillation.advantage_coef)
        if self._teacher_in_loss is not None or not selection.sequences:
            return selection, {}
        batches = pack(selection.sequences, self._packing)
        logprobs = self._scored(selection.sequences, batches, clock, "teacher")
        selection, mean = add_teacher(selection, logprobs, distillation.coef)
        return selection, {"train/distillation_kl": mean}

    def _corrected(
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
        if not batches or not self._correction.is_on:
            return selection, batches, {}, logprobs
        logprobs = logprobs or self._scored(selection.sequences, batches, clock)
        weights = self._weigh(selection, logprobs)
        kept = [its for its, weight in zip(logprobs, weights, strict=True) if weight.is_kept]
        selection = correct_selection(selection, weights, self._correction, self._rules)
        batches = pack(selection.sequences, self._packing)
        return selection, batches, off_policy_metrics(weights, self._correction), kept

    def _train(
        self, groups, selection: Selection, batches, logprobs, clock
    ) -> tuple[dict[str, float], float]:
        """Metrics, and the number of tokens that the clip held in the first update.

        Args:
            logprobs: of each sequence before it, where they are known.
        """
        self.rejected = ()
        if not batches:
            return {"train/update_skipped": 1.0}, 0.0
        metrics, reports, clipped_tokens = {}, [], 0.0
        for _ in range(self._learner.updates_per_batch):
            if self._functions.sequence_ratios:
                before = logprobs or self._scored(selection.sequences, batches, clock)
                rated = with_sequence_ratios(selection, before)
                batches, logprobs = pack(rated.sequences, self._packing), None
            sums, report, scores = self._one_update(batches, selection.denominator, clock)
            if not reports and self._clips_tokens:
                clipped_tokens = float(sums["clipped_low"]) + float(sums["clipped_high"])
            # Only the first update scores with the policy that the correction refers to.
            if not reports and not self._correction.is_on:
                of_each = unpack(scores, selection.sequences, self._packing)
                metrics = off_policy_metrics(self._weigh(selection, of_each), self._correction)
            reports.append(
                update_metrics(
                    sums,
                    report,
                    denominator=selection.denominator,
                    has_reference=self._reference_in_loss is not None,
                    has_teacher=self._teacher_in_loss is not None,
                )
            )
        if any(report["train/update_skipped"] for report in reports):
            self.rejected = tuple(groups)
        return metrics | combine_updates(reports), clipped_tokens

    @property
    def _reference_in_loss(self) -> Params | None:
        return None if self._kl_in_reward else self._reference

    def _scored(
        self,
        sequences: Sequence[TrainSequence],
        batches: Sequence[MicroBatch],
        clock: PhaseClock,
        who: Literal["policy", "reference", "teacher"] = "policy",
    ) -> list[np.ndarray]:
        """Logprobs of each sequence under the policy as it stands, or a frozen one."""
        frozen = {"reference": self._reference, "teacher": self._teacher}
        params = frozen.get(who, self._policy)
        scores = [self._score(who, params, batch, clock) for batch in batches]
        return unpack(scores, sequences, self._packing)

    def _score(self, who: str, params, batch: MicroBatch, clock: PhaseClock) -> Any:
        """Logprobs [B, T] on the host; of the critic logprobs and values."""
        made = self._functions
        batch = jax.device_put(batch.tokens_only, made.batch_sharding)
        key = f"score {who} {batch.token_ids.shape}"
        score = {"critic": made.score_values, "teacher": made.score_teacher}.get(who, made.score)
        return jax.device_get(self._run(clock, "forward_backward", key, score, params, batch))

    @property
    def _policy(self) -> Params:
        """The parameters that are published: without a value head."""
        return policy_params(self._state.params)

    def _weigh(self, selection: Selection, logprobs: Sequence[np.ndarray]) -> list[SequenceWeights]:
        """Importance weights of the sequences, from the policy's logprobs of each."""
        return [
            weigh_sequence(sequence, logprob_N, self._correction)
            for sequence, logprob_N in zip(selection.sequences, logprobs, strict=True)
        ]

    def _one_update(
        self, batches: Sequence[MicroBatch], denominator: float, clock: PhaseClock
    ) -> tuple[Mapping[str, float], Mapping[str, float], list[np.ndarray]]:
        """Sums, report, and the logprobs of each batch under the policy before the update."""
        accumulator = self._run(
            clock, "forward_backward", "empty", self._functions.empty, self._state.params
        )
        logprobs, bonus = [], self._state.entropy_bonus
        for batch in batches:
            batch = jax.device_put(batch, self._functions.batch_sharding)
            accumulator, logprob_BT = self._run(
                clock,
                "forward_backward",
                f"accumulate {batch.token_ids.shape}",
                self._functions.accumulate,
                self._state.params,
                self._reference_in_loss,
                accumulator,
                batch,
                None if bonus is None else bonus.coef,
                self._teacher_in_loss,
            )
            logprobs.append(np.asarray(logprob_BT))
        sums = jax.device_get(accumulator.sums)
        failpoints.reach("learner.update")
        self._state, report = self._run(
            clock,
            "optimizer",
            "apply",
            self._functions.apply,
            self._state,
            accumulator,
            jnp.float32(denominator),
        )
        return sums, jax.device_get(report), logprobs

    def _run(self, clock: PhaseClock, phase: str, key: str, function, *args):
        """Calls a jitted function and waits for its results."""
        started = self._start(clock, phase, key, function, *args)
        with clock.phase(phase):
            ended = jax.block_until_ready(started)
        self.programs_run += 1
        return ended

    def _start(self, clock: PhaseClock, phase: str, key: str, function, *args):
        """Calls a jitted function; a new shape is compiled first, in the phase `compile`."""
        if key not in self._compiled:
            with clock.phase("compile"):
                self._compiled[key] = function.lower(*args).compile()
        with clock.phase(phase):
            return self._compiled[key](*args)

    def _memory_metrics(self) -> dict[str, float]:
        stats = [device.memory_stats() for device in self._devices]
        peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
        return {"mem/peak_bytes_in_use_max": float(max(peaks))} if peaks else {}

    def named_weights(self, dtype: str) -> dict[str, np.ndarray]:
        """The current policy as `host_weights` has it, for wire or export.

        Raises:
            ValueError: if dtype is neither `bfloat16` nor `float32`.
        """
        _check_dtype(dtype)
        with self._lock:
            return host_weights(self._policy, self._config, dtype)

    def snapshot(self, dtype: str, clock: PhaseClock, *, probe: bool = True) -> Snapshot:
        """Copies the current policy on the devices, so that later steps do not change it.

        The copy needs the device memory of the parameters in this dtype until it is deleted.

        Args:
            clock: gets the seconds of `compile` and `publish`.
            probe: whether the canary's probe is scored as well; this call does not wait for it.

        Raises:
            ValueError: if dtype is neither `bfloat16` nor `float32`.
        """
        _check_dtype(dtype)
        with self._lock:
            copy = self._functions.snapshots[dtype]
            return Snapshot(
                policy_version=self.policy_version,
                tensors=self._run(clock, "publish", f"snapshot {dtype}", copy, self._policy),
                probe=self._score_probe(dtype, clock) if probe else None,
            )

    def _score_probe(self, dtype: str, clock: PhaseClock) -> ScoredProbe:
        """Starts the canary, in the thread that starts all other programs.

        Programs that run on every device must be started in the same order on each of them.
        """
        score = self._functions.canaries[dtype]
        return ScoredProbe(
            scores=self._start(clock, "publish", f"canary {dtype}", score, self._policy),
            valid_vocab=self._valid_vocab or self._config.vocab_size,
            precision=self._precision,
        )

    @property
    def compiled(self) -> Mapping[str, jax.stages.Compiled]:
        """The compiled programs that have run so far: `empty`, `apply`, `accumulate <shape>` and
        `score <shape>` for each, and `snapshot <dtype>` and `canary <dtype>`.
        """
        return self._compiled

    @property
    def state(self) -> TrainState:
        """The current state; the next update donates its arrays."""
        return self._state

    @property
    def abstract_state(self) -> TrainState:
        """Shape, dtype and sharding of every leaf of `state`, to restore a checkpoint into."""
        return self._functions.abstract_state

    def resume(self, state: TrainState, *, policy_version: int) -> None:
        """Continues from a restored state, sharded as `abstract_state` says."""
        with self._lock:
            self._state = state
            self.policy_version = policy_version


def _check_dtype(dtype: str) -> None:
    if dtype not in PUBLISH_DTYPES:
        raise ValueError(f"dtype must be one of {sorted(PUBLISH_DTYPES)}, got {dtype!r}")
