"""The learner without its services: owns the policy, and makes the next version from groups.

The arithmetic is in the pure modules of update/ and publish/; here are the devices, the compiled
functions, the clock and the order of calls.
"""

import threading
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from learner.compiled_functions import make_learner_functions
from learner.config import TrainingSettings
from learner.first_adapter import first_adapter
from learner.group_selection import GroupSelection
from learner.objective.batching import MicroBatch, Packing, Selection, pack, unpack
from learner.objective.off_policy import off_policy_metrics
from learner.objective.sequence_ratio import with_sequence_ratios
from learner.programs import Model, ProgramRunner, Scorer
from learner.publish.canary import ScoredProbe
from learner.publish.snapshot import PUBLISH_DTYPES, BaseDigest, Snapshot, host_weights
from learner.teacher import TeacherModel
from learner.update.host_memory import at_rest, on_devices
from learner.update.mesh import MeshShape
from learner.update.state import TrainState, init_state, place_frozen, place_params
from learner.update.update_metrics import (
    combine_updates,
    group_metrics,
    outcome_metrics,
    selection_metrics,
    token_funnel,
    update_metrics,
)
from learner.update.value_head import policy_params, with_value_head
from models.adapter import BASE_DIGEST, join
from models.config import ModelConfig
from models.files.peft_folder import PeftAdapter
from models.flops import flops_metrics, training_flops
from models.probe import precision
from models.transformer import Params
from services.process import failpoints
from services.process.phase_clock import PhaseClock
from services.wire.messages import Group


class LearnerCore:
    """Owns the policy's master weights, their optimiser, and the devices both lie on; where an
    adapter trains, its own, and the frozen model.

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
                where algorithm.kl_coef is above 0, and the model that an adapter is added to.
            devices: None takes every device of the default platform.
            teacher: as `load_teacher` gives it for the algorithm and the model.

        Raises:
            ValueError: if mesh, schedule or adapter cannot work, with the numbers, or the algorithm
                needs a teacher that is not given.
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
        self._clips_tokens = algorithm.policy_loss == "clip"
        self._packing = Packing(learner.longest_row, MeshShape.of(self._functions.mesh).rows)
        self._kl_in_reward = algorithm.kl_in == "reward"
        self._programs = ProgramRunner()
        self._scorer = Scorer(self._functions, self._programs, self._packing, self._params_of)
        self._selection = GroupSelection(
            settings, self._packing, model_config.vocab_size, self._scorer
        )
        made = self._functions
        dtype = jnp.dtype(learner.compute_dtype)
        self._base, trained = None, params
        """What an adapter leaves as it is; None where the model itself trains."""
        self._base_digest = None
        if learner.lora is not None and made.base is not None:
            self._base = place_frozen(params, made.mesh, made.base.specs, dtype)
            self._base_digest = BaseDigest(self._base, model_config, made.mesh)
            trained = first_adapter(learner.lora, model_config, settings.seed)
        adapter = trained
        if algorithm.has_critic:
            trained = with_value_head(trained, model_config.hidden_size)
        self._state = init_state(
            trained,
            made.optimizer,
            made.mesh,
            made.specs,
            made.entropy_bonus,
            offload=learner.optimizer.offload,
        )
        self._reference = None
        if algorithm.kl_coef > 0 and self._base is not None:
            # Where training starts: the policy without its adapter, or with the one it starts from.
            self._reference = self._base
            if learner.lora is not None and learner.lora.init_from is not None:
                first = place_params(adapter, made.mesh, policy_params(made.specs), jnp.float32)
                self._reference = join(self._base, first)
        elif algorithm.kl_coef > 0:
            self._reference = place_params(params, made.mesh, policy_params(made.specs), dtype)
        self._teacher = None
        if teacher is not None and made.teacher is not None:
            self._teacher = place_params(teacher.params, made.mesh, made.teacher.specs, dtype)
        self._teacher_in_loss = self._teacher if algorithm.teacher_in_loss else None
        self.policy_version = 0
        """Counts calls of `update`, skipped ones included: it names weights, one set each."""
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
            selected, reward_metrics, known = self._selection.select(groups, clock)
            selection, batches, metrics, logprobs = self._selection.correct(selected, known, clock)
            metrics |= reward_metrics | group_metrics(
                groups,
                policy_version=self.policy_version,
                max_completion_tokens=self._selection.rules.max_completion_tokens,
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
            if batches:
                lengths = [len(sequence.token_ids) for sequence in selection.sequences]
                flops = training_flops(self._config, lengths, frozen=self._base is not None)
                flops *= self._learner.updates_per_batch
                metrics |= flops_metrics(
                    flops, update_s, self._devices, self._learner.compute_dtype
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
        self._selection.check(group)

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
                before = logprobs or self._scorer.logprobs(selection.sequences, batches, clock)
                rated = with_sequence_ratios(selection, before)
                batches, logprobs = pack(rated.sequences, self._packing), None
            sums, report, scores = self._one_update(batches, selection.denominator, clock)
            if not reports and self._clips_tokens:
                clipped_tokens = float(sums["clipped_low"]) + float(sums["clipped_high"])
            # Only the first update scores with the policy that the correction refers to.
            if not reports and not self._selection.correction.is_on:
                of_each = unpack(scores, selection.sequences, self._packing)
                metrics = off_policy_metrics(
                    self._selection.weigh(selection, of_each), self._selection.correction
                )
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

    @property
    def _policy(self) -> Params:
        """The whole policy: without a value head, and with the base of an adapter."""
        return policy_params(self._whole)

    @property
    def _whole(self) -> Params:
        """All parameters, those that do not train among them."""
        trained = self._state.params
        return trained if self._base is None else join(self._base, trained)

    def _params_of(self, model: Model) -> Params:
        if model == "policy":
            return self._policy
        if model == "critic":
            return self._whole
        frozen = self._reference if model == "reference" else self._teacher
        if frozen is None:
            raise AssertionError(f"the algorithm has no {model}")
        return frozen

    def _one_update(
        self, batches: Sequence[MicroBatch], denominator: float, clock: PhaseClock
    ) -> tuple[Mapping[str, float], Mapping[str, float], list[np.ndarray]]:
        """Sums, report, and the logprobs of each batch under the policy before the update."""
        accumulator = self._programs.run(
            clock, "forward_backward", "empty", self._functions.empty, self._state.params
        )
        logprobs, bonus = [], self._state.entropy_bonus
        for batch in batches:
            batch = jax.device_put(batch, self._functions.batch_sharding)
            accumulator, logprob_BT = self._programs.run(
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
                self._base,
            )
            logprobs.append(np.asarray(logprob_BT))
        sums = jax.device_get(accumulator.sums)
        failpoints.reach("learner.update")
        with clock.phase("optimizer"):
            self._state = on_devices(self._state)  # what lay on the host is free, too
        apply, denominator = self._functions.apply, jnp.float32(denominator)
        given = (self._state, accumulator, denominator)
        state, report = self._programs.run(clock, "optimizer", "apply", apply, *given)
        with clock.phase("optimizer"):
            self._state = at_rest(state, self._functions.abstract_state)
        return sums, jax.device_get(report), logprobs

    def _memory_metrics(self) -> dict[str, float]:
        stats = [device.memory_stats() for device in self._devices]
        peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
        return {"mem/peak_bytes_in_use_max": float(max(peaks))} if peaks else {}

    def named_weights(self, dtype: str) -> dict[str, np.ndarray]:
        """The current policy as `host_weights` has it, for an export.

        Raises:
            ValueError: if dtype is neither `bfloat16` nor `float32`, or an adapter trains.
        """
        _check_dtype(dtype)
        with self._lock:
            return host_weights(self._policy, self._config, dtype)

    def host_adapter(self) -> PeftAdapter:
        """A copy of the adapter that trains, float32.

        Raises:
            ValueError: if the model itself trains.
        """
        shape = self._functions.adapter
        if shape is None:
            raise ValueError("there is no adapter: learner.lora is null, and the model trains")
        with self._lock:
            params = jax.tree.map(np.array, policy_params(self._state.params))
        return PeftAdapter(shape=shape, params=params)

    def snapshot(self, dtype: str, clock: PhaseClock, *, probe: bool = True) -> Snapshot:
        """Copies the current policy on the devices, so that later steps do not change it; of an
        adapter the adapter alone.

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
            trained = policy_params(self._state.params)
            tensors = self._programs.run(clock, "publish", f"snapshot {dtype}", copy, trained)
            if self._base_digest is not None:
                with clock.phase("publish"):
                    tensors = tensors | {BASE_DIGEST: self._base_digest.tensor(dtype)}
            return Snapshot(
                policy_version=self.policy_version,
                tensors=tensors,
                probe=self._score_probe(dtype, clock) if probe else None,
            )

    def _score_probe(self, dtype: str, clock: PhaseClock) -> ScoredProbe:
        """Starts the canary, in the thread that starts all other programs.

        Programs that run on every device must be started in the same order on each of them.
        """
        score = self._functions.canaries[dtype]
        return ScoredProbe(
            scores=self._programs.start(clock, "publish", f"canary {dtype}", score, self._policy),
            valid_vocab=self._valid_vocab or self._config.vocab_size,
            precision=self._precision,
            adapter=self._base is not None,
        )

    @property
    def compiled(self) -> Mapping[str, jax.stages.Compiled]:
        """The compiled programs that have run so far: `empty`, `apply`, `accumulate <shape>` and
        `score <shape>` for each, and `snapshot <dtype>` and `canary <dtype>`.
        """
        return self._programs.compiled

    @property
    def programs_run(self) -> int:
        """Programs that have ended, such as one for each micro-batch: they show that it works."""
        return self._programs.ended

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
