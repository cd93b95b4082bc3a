"""The jitted functions of a learner, with the shapes and shardings that they are compiled for.

Only the shapes of the parameters are read, so that the same functions can be compiled for devices
that this machine lacks (benchmarks/tpu/run_programs.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import choose
from learner.config import TrainingSettings
from learner.objective.batching import MicroBatch
from learner.objective.loss import Objective
from learner.objective.own_policy_loss import policy_loss
from learner.publish.canary import make_canary
from learner.publish.snapshot import PUBLISH_DTYPES, make_snapshots
from learner.update.head import HeadPlan
from learner.update.mesh import AXES, make_mesh
from learner.update.optimizer import learning_rate_schedule, make_optimizer
from learner.update.sharding import param_specs
from learner.update.state import TrainState, abstract_state, state_shardings
from learner.update.train_step import (
    PolicyOptions,
    make_accumulate,
    make_apply,
    make_empty_accumulator,
    make_score,
)
from models.config import ModelConfig
from models.transformer import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerFunctions:
    """The functions of one learner, and what their arguments look like."""

    mesh: Mesh
    specs: Params
    """PartitionSpec of every parameter."""
    optimizer: optax.GradientTransformation
    abstract_state: TrainState
    """Shape, dtype and sharding of every leaf of the state."""
    batch_sharding: NamedSharding
    """Rows of a micro-batch, divided over all devices."""
    sequence_ratios: bool
    """Whether micro-batches hold the ratio of each sequence."""
    empty: Callable
    accumulate: Callable
    apply: Callable
    score: Callable
    """These four as learner/update/train_step.py describes them."""
    snapshots: Mapping[str, Callable]
    canaries: Mapping[str, Callable]
    """By wire dtype, as learner/publish/snapshot.py and learner/publish/canary.py describe them."""

    def batch_shapes(self, rows: int, row_tokens: int) -> MicroBatch:
        """A micro-batch of shape structs, its rows counted over all devices."""
        struct = functools.partial(
            jax.ShapeDtypeStruct, (rows, row_tokens), sharding=self.batch_sharding
        )
        integers, floats = struct(jnp.int32), struct(jnp.float32)
        return MicroBatch(
            token_ids=integers,
            target_ids=integers,
            positions=integers,
            segments=integers,
            old_logprobs=floats,
            advantages=floats,
            weights=floats,
            sequence_log_ratios=floats if self.sequence_ratios else None,
        )


def make_learner_functions(
    params: Params,
    model_config: ModelConfig,
    settings: TrainingSettings,
    *,
    devices: Sequence[jax.Device],
) -> LearnerFunctions:
    """Builds the functions of one learner; nothing is compiled or allocated yet.

    Args:
        params: arrays or shape structs, layers stacked.

    Raises:
        ValueError: if mesh or schedule cannot work, with the numbers.
    """
    algorithm, learner = settings.algorithm, settings.learner
    mesh = make_mesh(data=learner.mesh.data, fsdp=learner.mesh.fsdp, devices=devices)
    specs = param_specs(params, mesh.shape["fsdp"])
    objective = Objective(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        kl_coef=algorithm.kl_coef,
        kl_estimator=algorithm.kl_estimator,
        entropy_coef=algorithm.entropy_coef,
        policy_loss=policy_loss(algorithm.policy_loss),
        sequence_ratio=algorithm.ratio == "sequence",
        dual_clip=algorithm.dual_clip,
        gate_positive=algorithm.gate_positive,
        gate_negative=algorithm.gate_negative,
    )
    options = PolicyOptions(
        head=HeadPlan(
            schedule=learner.lm_head,
            impl=choose.resolve(learner.loss_impl, devices[0].platform),
            temperature=settings.temperature,
            valid_vocab=settings.valid_vocab,
        ),
        compute_dtype=jnp.dtype(learner.compute_dtype),
        remat=learner.remat,
    )
    updates = settings.total_steps * learner.updates_per_batch
    schedule = learning_rate_schedule(learner.optimizer, updates)
    optimizer = make_optimizer(learner.optimizer, schedule)
    state = abstract_state(params, optimizer, mesh, specs)
    return LearnerFunctions(
        mesh=mesh,
        specs=specs,
        optimizer=optimizer,
        abstract_state=state,
        batch_sharding=NamedSharding(mesh, P(AXES)),
        sequence_ratios=objective.sequence_ratio,
        empty=make_empty_accumulator(mesh, specs),
        accumulate=make_accumulate(mesh, specs, model_config, objective, options),
        apply=make_apply(
            mesh, state_shardings(params, optimizer, mesh, specs), optimizer, schedule
        ),
        score=make_score(mesh, specs, model_config, options),
        snapshots=make_snapshots(state.params, model_config),
        canaries={
            name: make_canary(
                mesh,
                specs,
                model_config,
                head=options.head,
                compute_dtype=options.compute_dtype,
                wire_dtype=dtype,
            )
            for name, dtype in PUBLISH_DTYPES.items()
        },
    )
