"""Supervised training of a model on the devices of this process: owns what an update changes.

An update is that of reinforcement learning: rows of several sequences, micro-batches whose
gradients are added up, one division by the number of trained tokens of the step.
"""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import choose
from kernels.packed_attention.ops import plan_attention
from learner.config import LearnerConfig
from learner.objective.batching import MicroBatch, Packing, TrainSequence, pack
from learner.publish.snapshot import host_weights
from learner.sft.sequences import OBJECTIVE
from learner.update.head import HeadPlan
from learner.update.host_memory import at_rest, on_devices
from learner.update.mesh import ROWS, MeshShape, make_mesh
from learner.update.optimizer import learning_rate_schedule, make_optimizer
from learner.update.sharding import param_specs
from learner.update.state import TrainState, abstract_state, init_state, state_shardings
from learner.update.train_step import (
    PolicyOptions,
    make_accumulate,
    make_apply,
    make_empty_accumulator,
    make_score,
)
from models.config import ModelConfig
from models.flops import flops_metrics, training_flops
from models.layer_scan import Remat, layout_for
from models.transformer import Params


class SupervisedLearner:
    """Owns the master weights, their optimiser, and the devices both lie on."""

    def __init__(
        self,
        config: LearnerConfig,
        model: ModelConfig,
        params: Params,
        *,
        total_steps: int,
        valid_vocab: int,
        devices: Sequence[jax.Device],
    ):
        """Args:
            config: how a batch becomes an update; of the section `learner`.
            params: host arrays of any float dtype, layers stacked.
            total_steps: updates of the whole training, which the learning rate plans with.
            valid_vocab: ids from here on are no tokens.

        Raises:
            ValueError: if mesh or schedule cannot work, with the numbers.
        """
        mesh = make_mesh(
            data=config.mesh.data,
            fsdp=config.mesh.fsdp,
            context=config.mesh.context,
            devices=devices,
        )
        specs = param_specs(params, MeshShape.of(mesh).shards)
        schedule = learning_rate_schedule(config.optimizer, total_steps)
        optimizer = make_optimizer(config.optimizer, schedule)
        options = PolicyOptions(
            head=HeadPlan(
                schedule=config.lm_head,
                impl=choose.resolve(config.loss_impl, devices[0].platform),
                temperature=1.0,
                valid_vocab=valid_vocab,
            ),
            attention=plan_attention(config.attention, devices[0].platform),
            compute_dtype=jnp.dtype(config.compute_dtype),
            remat=Remat(config.remat),
            layout=layout_for(devices[0].platform),
        )
        self._model = model
        self._devices, self._compute_dtype = devices, config.compute_dtype
        self._packing = Packing(config.longest_row, MeshShape.of(mesh).rows)
        self._batch_sharding = NamedSharding(mesh, P(ROWS))
        self._empty = make_empty_accumulator(mesh, specs)
        self._accumulate = make_accumulate(mesh, specs, model, OBJECTIVE, options)
        offload = config.optimizer.offload
        shardings = state_shardings(params, optimizer, mesh, specs)
        self._apply = make_apply(mesh, shardings, optimizer, schedule)
        self._score = make_score(mesh, specs, model, options)
        self._compiled: dict[str, jax.stages.Compiled] = {}
        self._compile_s = 0.0
        self.abstract_state = abstract_state(params, optimizer, mesh, specs, offload=offload)
        """Shape, dtype and sharding of every leaf of `state`, to restore a checkpoint into."""
        self.state: TrainState = init_state(params, optimizer, mesh, specs, offload=offload)
        """The next update donates its arrays."""

    def update(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Takes one step on these sequences.

        Args:
            sequences: at least one, each with a token that trains.

        Returns:
            Metrics by the names of the metrics log; `train/update_skipped` is 1.0 where loss or
            gradient was not finite, and the weights stayed as they were.

        Raises:
            ValueError: if a sequence exceeds the budget of a micro-batch.
        """
        started, compile_s = time.monotonic(), self._compile_s
        batches = pack(sequences, self._packing)
        tokens = sum(int(sequence.active.sum()) for sequence in sequences)
        accumulator = self._run("empty", self._empty, self.state.params)
        for batch in batches:
            accumulator, _ = self._run(
                f"accumulate {batch.token_ids.shape}",
                self._accumulate,
                self.state.params,
                None,
                accumulator,
                self._placed(batch),
            )
        entropy = accumulator.sums["entropy"]
        self.state = on_devices(self.state)  # what lay on the host is free, too
        state, report = self._run(
            "apply", self._apply, self.state, accumulator, jnp.float32(tokens)
        )
        self.state = at_rest(state, self.abstract_state)
        report, entropy = jax.device_get((report, entropy))
        update_s = time.monotonic() - started - (self._compile_s - compile_s)
        lengths = [len(sequence.token_ids) for sequence in sequences]
        inputs = sum(lengths)
        return {
            "train/loss": float(report["loss"]),
            "train/entropy": float(entropy) / tokens,
            "train/grad_norm": float(report["grad_norm"]),
            "train/learning_rate": float(report["learning_rate"]),
            "train/update_skipped": float(report["skipped"]),
            "train/sequences": float(len(sequences)),
            "train/valid_tokens": float(tokens),
            "train/input_tokens": float(inputs),
            "train/microbatches": float(len(batches)),
            "train/padding_fraction": 1.0 - inputs / sum(b.token_ids.size for b in batches),
            "throughput/train/valid_tokens_per_s_update": tokens / update_s,
            "throughput/train/input_tokens_per_s_update": inputs / update_s,
            **flops_metrics(
                training_flops(self._model, lengths),
                update_s,
                self._devices,
                self._compute_dtype,
            ),
        }

    def packed(self, sequences: Sequence[TrainSequence]) -> tuple[MicroBatch, ...]:
        """Sequences as `loss` takes them; on the host."""
        return pack(sequences, self._packing)

    def loss(self, batches: Sequence[MicroBatch]) -> float:
        """The mean of -log p over the trained tokens of these batches, in nats."""
        total, tokens = 0.0, 0
        for batch in batches:
            score = f"score {batch.token_ids.shape}"
            logprob_BT = self._run(score, self._score, self.state.params, self._placed(batch))
            active_BT = batch.weights > 0
            total -= float(np.asarray(logprob_BT, np.float64)[active_BT].sum())
            tokens += int(active_BT.sum())
        return total / tokens

    def named_weights(self, dtype: str) -> dict[str, np.ndarray]:
        """The current weights, as `host_weights` has them."""
        return host_weights(self.state.params, self._model, dtype)

    def _placed(self, batch: MicroBatch) -> MicroBatch:
        return jax.device_put(batch, self._batch_sharding)

    def _run(self, key: str, function: Any, *arguments: Any) -> Any:
        """Calls a jitted function and waits for its results; a new shape is compiled first.

        Args:
            key: of the function and the shapes of its arguments.
        """
        if key not in self._compiled:
            started = time.monotonic()
            self._compiled[key] = function.lower(*arguments).compile()
            self._compile_s += time.monotonic() - started
        return jax.block_until_ready(self._compiled[key](*arguments))
