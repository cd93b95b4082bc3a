"""The jitted functions of a learner, with the shapes and shardings that they are compiled for.

Only the shapes of the parameters are read, so that the same functions can be compiled for devices
that this machine lacks (driver/chip_plan/learner_programs.py).
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
from kernels.packed_attention.ops import plan_attention
from learner.config import AlgorithmConfig, TrainingSettings
from learner.first_adapter import shape_of
from learner.objective.batching import MicroBatch
from learner.objective.loss import Objective
from learner.objective.own_policy_loss import policy_loss
from learner.publish.canary import make_canary
from learner.publish.snapshot import (
    PUBLISH_DTYPES,
    make_adapter_snapshots,
    make_snapshots,
)
from learner.update import value_head
from learner.update.distilled_head import TeacherPlan, teacher_specs
from learner.update.entropy_bonus import EntropyBonus, EntropyRule, first_bonus
from learner.update.head import HeadPlan
from learner.update.mesh import ROWS, MeshShape, make_mesh
from learner.update.optimizer import learning_rate_schedule, make_optimizer
from learner.update.sharding import param_specs
from learner.update.state import TrainState, abstract_state, state_shardings
from learner.update.train_step import (
    FrozenBase,
    PolicyOptions,
    make_accumulate,
    make_apply,
    make_empty_accumulator,
    make_score,
    make_score_values,
)
from models.adapter import AdapterShape, abstract_adapter, join
from models.config import ModelConfig
from models.layer_scan import Remat, layout_for
from models.transformer import Params, abstract_params


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerFunctions:
    """The functions of one learner, and what their arguments look like."""

    mesh: Mesh
    specs: Params
    """PartitionSpec of every parameter that trains."""
    adapter: AdapterShape | None
    """That trains in place of the model; None where the model does."""
    base: FrozenBase | None
    """The model, where an adapter trains."""
    optimizer: optax.GradientTransformation
    abstract_state: TrainState
    """Shape, dtype and sharding of every leaf of the state between updates; `apply` takes it as
    learner/update/host_memory.py moves it."""
    batch_sharding: NamedSharding
    """Rows of a micro-batch, whole, divided over the axes ROWS of the mesh."""
    sequence_ratios: bool
    """Whether micro-batches hold the ratio of each sequence."""
    has_critic: bool
    """Whether the parameters have a value head, and micro-batches values and returns."""
    entropy_bonus: EntropyBonus | None
    """Of a fresh state, where its coefficient is adaptive."""
    empty: Callable
    accumulate: Callable
    apply: Callable
    score: Callable
    score_reference: Callable
    score_values: Callable
    """As learner/update/train_step.py describes them: `score` of policy and reference, and
    `score_values` with a critic."""
    teacher: TeacherPlan | None
    score_teacher: Callable | None
    """As `score`, with the teacher's parameters; None where there is no teacher."""
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
            values=floats if self.has_critic else None,
            returns=floats if self.has_critic else None,
        )


def make_learner_functions(
    params: Params,
    model_config: ModelConfig,
    settings: TrainingSettings,
    *,
    devices: Sequence[jax.Device],
    teacher: ModelConfig | None = None,
) -> LearnerFunctions:
    """Builds the functions of one learner; nothing is compiled or allocated yet.

    Args:
        params: arrays or shape structs, layers stacked, without a value head.
        teacher: of algorithm.distillation, with the rows of the vocabulary that the model has.

    Raises:
        ValueError: if mesh or schedule cannot work, with the numbers.
    """
    algorithm, learner = settings.algorithm, settings.learner
    mesh = make_mesh(
        data=learner.mesh.data,
        fsdp=learner.mesh.fsdp,
        context=learner.mesh.context,
        devices=devices,
    )
    shards = MeshShape.of(mesh).shards
    adapter = None if learner.lora is None else shape_of(learner.lora, model_config)
    base, trained = None, params
    if adapter is not None:
        trained = abstract_adapter(adapter, model_config)
        base_specs = param_specs(params, shards)
        reference_specs = base_specs
        if learner.lora is not None and learner.lora.init_from is not None:
            reference_specs = join(base_specs, param_specs(trained, shards))
        base = FrozenBase(specs=base_specs, reference_specs=reference_specs)
    if algorithm.has_critic:
        trained = value_head.with_value_head(trained, model_config.hidden_size)
    specs = param_specs(trained, shards)
    whole_specs = specs if base is None else join(base.specs, specs)
    objective = Objective(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        kl_coef=algorithm.kl_coef,
        kl_estimator=algorithm.kl_estimator,
        entropy_coef=algorithm.entropy_coef if algorithm.entropy_target is None else 0.0,
        policy_loss=policy_loss(algorithm.policy_loss),
        sequence_ratio=algorithm.ratio == "sequence",
        dual_clip=algorithm.dual_clip,
        gate_positive=algorithm.gate_positive,
        gate_negative=algorithm.gate_negative,
        value_coef=algorithm.value_coef,
        value_clip=algorithm.value_clip,
    )
    options = PolicyOptions(
        head=HeadPlan(
            schedule=learner.lm_head,
            impl=choose.resolve(learner.loss_impl, devices[0].platform),
            temperature=settings.temperature,
            valid_vocab=settings.valid_vocab,
        ),
        attention=plan_attention(learner.attention, devices[0].platform),
        compute_dtype=jnp.dtype(learner.compute_dtype),
        remat=Remat(learner.remat),
        layout=layout_for(devices[0].platform),
        adapter_scale=1.0 if adapter is None else adapter.scale,
    )
    plan = None if teacher is None else _plan_teacher(teacher, algorithm, mesh, whole_specs)
    in_loss = plan if algorithm.teacher_in_loss else None
    updates = settings.total_steps * learner.updates_per_batch
    schedule = learning_rate_schedule(learner.optimizer, updates)
    factor = algorithm.value_rate_factor if algorithm.has_critic else None
    optimizer = make_optimizer(learner.optimizer, schedule, value_rate_factor=factor)
    bonus, rule = _entropy_bonus(algorithm)
    state = abstract_state(
        trained, optimizer, mesh, specs, bonus, offload=learner.optimizer.offload
    )
    policy = value_head.policy_params(state.params)
    return LearnerFunctions(
        mesh=mesh,
        specs=specs,
        adapter=adapter,
        base=base,
        optimizer=optimizer,
        abstract_state=state,
        batch_sharding=NamedSharding(mesh, P(ROWS)),
        sequence_ratios=objective.sequence_ratio,
        has_critic=algorithm.has_critic,
        entropy_bonus=bonus,
        empty=make_empty_accumulator(mesh, specs),
        accumulate=make_accumulate(
            mesh,
            specs,
            model_config,
            objective,
            options,
            in_loss,
            base,
        ),
        apply=make_apply(
            mesh,
            state_shardings(trained, optimizer, mesh, specs, bonus),
            optimizer,
            schedule,
            rule,
        ),
        score=make_score(mesh, whole_specs, model_config, options),
        score_reference=make_score(
            mesh, whole_specs if base is None else base.reference_specs, model_config, options
        ),
        score_values=make_score_values(mesh, whole_specs, model_config, options),
        teacher=plan,
        score_teacher=plan and make_score(mesh, plan.specs, plan.config, options),
        snapshots=make_snapshots(policy, model_config)
        if adapter is None
        else make_adapter_snapshots(policy, adapter.scale),
        canaries={
            name: make_canary(
                mesh,
                value_head.policy_params(whole_specs),
                model_config,
                head=options.head,
                compute_dtype=options.compute_dtype,
                adapter_scale=options.adapter_scale,
                wire_dtype=dtype,
            )
            for name, dtype in PUBLISH_DTYPES.items()
        },
    )


def _entropy_bonus(algorithm: AlgorithmConfig) -> tuple[EntropyBonus | None, EntropyRule | None]:
    """The first state of an adaptive coefficient and how it moves; None twice for a fixed one."""
    if algorithm.entropy_target is None:
        return None, None
    rule = EntropyRule(algorithm.entropy_target, algorithm.entropy_delta, algorithm.entropy_max)
    return first_bonus(algorithm.entropy_coef), rule


def _plan_teacher(
    teacher: ModelConfig, algorithm: AlgorithmConfig, mesh: Mesh, specs: Params
) -> TeacherPlan:
    distillation = algorithm.distillation
    assert distillation is not None
    return TeacherPlan(
        config=teacher,
        specs=teacher_specs(abstract_params(teacher), specs, MeshShape.of(mesh).shards),
        coef=distillation.coef,
        top_k=distillation.top_k if distillation.form == "top_k" else None,
    )
