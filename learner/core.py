"""The learner without its wires: holds the policy, takes groups, makes the next version.

Everything that computes is in the pure modules beside this one; here are the devices, the
compiled functions, the clock and the order of calls.
"""

import threading
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from learner.batching import MicroBatch, Selection, SelectionRules, pack, select
from learner.config import AlgorithmConfig, LearnerConfig
from learner.metrics import combine_updates, group_metrics, selection_metrics, update_metrics
from learner.programs import make_programs
from learner.state import TrainState, init_state, place_params
from models.checkpoint import to_named
from models.config import ModelConfig
from models.transformer import Params
from services.messages import Group
from services.phase_clock import PhaseClock

WIRE_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


class LearnerCore:
    """Owns the policy's master weights, their optimiser, and the devices both lie on.

    Methods may be called from different threads; each waits for the one before, so that weights
    are never read while a step replaces them.
    """

    def __init__(
        self,
        *,
        algorithm: AlgorithmConfig,
        learner: LearnerConfig,
        model_config: ModelConfig,
        params: Params,
        total_steps: int,
        temperature: float,
        valid_vocab: int | None,
        max_completion_tokens: int,
        devices: Sequence[jax.Device] | None = None,
    ):
        """
        Args:
            params: host arrays of any float dtype, layers stacked; also the reference policy
                where algorithm.kl_coef is above 0.
            total_steps: calls of `update` in the whole run, which the learning rate plans with.
            temperature: that of the rollout.
            valid_vocab: ids below it can be sampled; None for the whole embedding.
            max_completion_tokens: that of the rollout; the constant of aggregation `constant`.
            devices: None takes every device of the default platform.

        Raises:
            ValueError: if mesh or schedule cannot work, with the numbers.
        """
        self._lock = threading.Lock()
        self._config = model_config
        self._learner = learner
        self._devices = jax.devices() if devices is None else list(devices)
        self._programs = make_programs(
            params,
            model_config,
            algorithm=algorithm,
            learner=learner,
            total_steps=total_steps,
            temperature=temperature,
            valid_vocab=valid_vocab,
            devices=self._devices,
        )
        self._rules = SelectionRules(
            advantage=algorithm.advantage,
            advantage_eps=algorithm.advantage_eps,
            aggregation=algorithm.aggregation,
            zero_variance=algorithm.zero_variance,
            truncated=algorithm.truncated,
            max_completion_tokens=max_completion_tokens,
        )
        mesh, specs = self._programs.mesh, self._programs.specs
        self._state = init_state(params, self._programs.optimizer, mesh, specs)
        self._reference = None
        if algorithm.kl_coef > 0:
            self._reference = place_params(params, mesh, specs, jnp.dtype(learner.compute_dtype))
        self._compiled: dict[str, jax.stages.Compiled] = {}
        self.policy_version = 0
        """Counts calls of `update`, skipped ones included: it names weights, one set each."""
        self.outcomes: dict[str, str] = {}
        """Of the last update: ledger state by group_id."""
        self.rejected: tuple[Group, ...] = ()
        """The groups of the last update if it was skipped as not finite, for a look at them."""

    def update(self, groups: Sequence[Group], clock: PhaseClock) -> dict[str, float]:
        """Trains on these groups and becomes the next policy version.

        Args:
            groups: at least one; all of them are used or accounted for in `outcomes`.
            clock: gets the seconds of `compile`, `forward_backward` and `optimizer`.

        Returns:
            Metrics by the names of the metrics log; `train/update_skipped` is 1.0 where the
            weights did not change because nothing was left to train on or a number was not finite.

        Raises:
            ValueError: if there is no group, or one is malformed or too long.
        """
        if not groups:
            raise ValueError("update needs at least 1 group, got none")
        with self._lock:
            started, compile_s = time.monotonic(), clock.peek()["compile"]
            with clock.phase("forward_backward"):
                selection = select(groups, self._rules, vocab_size=self._config.vocab_size)
                batches = pack(
                    selection.sequences,
                    microbatch_tokens=self._learner.microbatch_tokens,
                    devices=len(self._devices),
                )
            metrics = group_metrics(groups, policy_version=self.policy_version)
            metrics |= selection_metrics(selection, batches, groups=len(groups))
            metrics |= self._train(groups, selection, batches, clock)
            update_s = time.monotonic() - started - (clock.peek()["compile"] - compile_s)
            metrics["throughput/train/valid_tokens_per_s_update"] = (
                selection.active_tokens * self._learner.updates_per_batch / update_s
            )
            metrics |= self._memory_metrics()
            self.outcomes = selection.outcomes
            if self.rejected:
                ends = {"trained": "dropped_error"}
                self.outcomes = {g: ends.get(end, end) for g, end in selection.outcomes.items()}
            self.policy_version += 1
            return metrics

    def _train(self, groups, selection: Selection, batches, clock) -> dict[str, float]:
        self.rejected = ()
        if not batches:
            return {"train/update_skipped": 1.0}
        reports = [
            self._one_update(batches, selection.denominator, clock)
            for _ in range(self._learner.updates_per_batch)
        ]
        if any(report["train/update_skipped"] for report in reports):
            self.rejected = tuple(groups)
        return combine_updates(reports)

    def _one_update(
        self, batches: Sequence[MicroBatch], denominator: float, clock: PhaseClock
    ) -> dict[str, float]:
        accumulator = self._run(
            clock, "forward_backward", "empty", self._programs.empty, self._state.params
        )
        for batch in batches:
            batch = jax.device_put(batch, self._programs.batch_sharding)
            accumulator = self._run(
                clock,
                "forward_backward",
                f"accumulate {batch.token_ids.shape}",
                self._programs.accumulate,
                self._state.params,
                self._reference,
                accumulator,
                batch,
            )
        sums, maxima = jax.device_get((accumulator.sums, accumulator.maxima))
        self._state, report = self._run(
            clock,
            "optimizer",
            "apply",
            self._programs.apply,
            self._state,
            accumulator,
            jnp.float32(denominator),
        )
        return update_metrics(
            sums, maxima, jax.device_get(report), has_reference=self._reference is not None
        )

    def _run(self, clock: PhaseClock, phase: str, key: str, function, *args):
        """Calls a jitted function, compiling it under its own phase when the shape is new."""
        if key not in self._compiled:
            with clock.phase("compile"):
                self._compiled[key] = function.lower(*args).compile()
        with clock.phase(phase):
            return jax.block_until_ready(self._compiled[key](*args))

    def _memory_metrics(self) -> dict[str, float]:
        stats = [device.memory_stats() for device in self._devices]
        peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
        return {"mem/peak_bytes_in_use_max": float(max(peaks))} if peaks else {}

    def named_weights(self, dtype: str) -> dict[str, np.ndarray]:
        """Host copies of the current policy under Hugging Face names, for wire or export.

        One parameter at a time is cast and gathered on its way to the host. Nothing returned
        shares memory with a device.

        Raises:
            ValueError: if dtype is neither `bfloat16` nor `float32`.
        """
        if dtype not in WIRE_DTYPES:
            raise ValueError(f"dtype must be one of {sorted(WIRE_DTYPES)}, got {dtype!r}")
        with self._lock:
            host = jax.tree.map(
                lambda leaf: np.array(leaf.astype(WIRE_DTYPES[dtype])), self._state.params
            )
        return to_named(host, self._config)

    @property
    def compiled(self) -> Mapping[str, jax.stages.Compiled]:
        """The programs that have run so far: `empty`, `apply`, `accumulate <shape>` for each."""
        return self._compiled

    @property
    def state(self) -> TrainState:
        """The current state; the next update donates its arrays."""
        return self._state

    @property
    def abstract_state(self) -> TrainState:
        """Shape, dtype and sharding of every leaf of `state`, to restore a checkpoint into."""
        return self._programs.abstract_state

    def resume(self, state: TrainState, *, policy_version: int) -> None:
        """Goes on from a restored state, sharded as `abstract_state` says."""
        with self._lock:
            self._state = state
            self.policy_version = policy_version
