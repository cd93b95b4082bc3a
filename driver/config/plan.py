"""Sizes of a run, derived from its configuration before any device is touched.

Sizes that cannot work are refused; settings that work but are probably not meant get a note.
"""

import dataclasses
import math

from driver.config.checks.doubtful_settings import doubtful_settings
from driver.config.load_config import ConfigError
from driver.config.run_config import RunConfig
from driver.config.sections.placement import Resources
from driver.config.wording import counted, say_bytes
from kernels import choose
from kernels.packed_attention.ops import plan_attention
from learner.config import AlgorithmConfig, OptimizerConfig
from learner.first_adapter import shape_of
from learner.objective.batching import row_buckets
from learner.update.mesh import MeshShape, mesh_shape
from learner.update.value_head import head_parameters
from models.adapter import AdapterShape, adapter_of, adapter_parameters
from models.config import ModelConfig
from models.files.checkpoint import expected_shapes
from rollout_worker.engine.decode_programs import device_bytes
from rollout_worker.engine_setup import DecodeAttention, EngineSetup

FLOAT32_BYTES = 4
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
OPTIMIZER_MOMENTS = {"adamw": 2, "lion": 1, "sgd": 0, "muon": 2, "adafactor": 0}
"""Copies of the parameters that each optimiser keeps at most: muon has one of a layer's matrices
and two of the others, adafactor rows and columns only."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """How many accelerators (or CPU devices) each process sees."""

    learner: int
    worker: int
    shared: bool = False
    """Whether these are the same ones, in one process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """Sizes of one worker's decode engine; bytes are those of one device."""

    lanes: int
    """Copies of the policy, each over `rollout.decode.tensor` devices."""
    lane_slots: int
    attention: DecodeAttention
    policy_bytes: int
    """The adapter of a policy included."""
    version_bytes: int
    """Of what a version brings, a policy or an adapter; both are there while versions change."""
    cache_tokens: int
    """Columns of the widest cache."""
    cache_bytes: int
    """Of the slots' cache at its widest."""
    pool_bytes: int
    """Of the prefilled prompts and the parked episodes."""
    parked: int
    """Episodes that a lane keeps between their turns."""
    programs: int
    """That can be compiled at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Derived sizes of one run; bytes are of arrays alone, without temporaries."""

    devices: Devices
    mesh: MeshShape
    """Of the learner."""
    completions_per_step: int
    completion_tokens_per_step: int
    """At most: every completion at its longest."""
    positions_per_step: int
    """At most: prompts counted once per completion, or record of one."""
    worker_completions: int
    """Of a step, by the busiest worker."""
    worker: WorkerPlan
    row_tokens: int
    """Longest training row: the first bucket that fits the longest sequence."""
    microbatch_rows: int
    """Rows of a micro-batch of such rows, over all learner devices."""
    microbatches_per_update: int
    """At most: packing short sequences into one row makes it fewer."""
    updates: int
    """Optimiser updates of the whole run."""
    loss: str
    """How the head is computed, and by which implementation."""
    attention: str
    """Of the learner: by which implementation."""
    parameters: int
    adapter: AdapterShape | None
    """That trains in place of the model."""
    trained_parameters: int
    """Of the adapter, or of the model."""
    learner_bytes_per_device: int
    """Master weights, those of a critic included, optimiser moments, gradients, the model under an
    adapter, reference policy and teacher, cut over fsdp x context."""
    wire_bytes_per_version: int
    shared_bytes_per_device: int | None
    """Of learner and worker together, with two copies of the policy, where they share devices."""
    keeps_policy: bool
    """Whether a worker keeps one more version during an evaluation beside training."""
    notes: tuple[str, ...]
    """Settings that work, but are probably not meant."""


def asked_devices(config: RunConfig, cpu_devices: int = 1) -> Devices:
    """The devices that the processes will see, from the resources that they ask for.

    Args:
        cpu_devices: that JAX makes of the CPU of one process.

    Raises:
        ConfigError: if the resources do not fit the platform.
    """
    placement = config.placement

    def count(name: str, resources: Resources) -> int:
        asked = {"gpu": resources.gpus, "tpu": resources.tpus}
        key = f"placement.{name}"
        for platform, amount in asked.items():
            if platform != placement.platform and amount > 0:
                raise ConfigError(
                    f"{key}.{platform}s={amount:g} but placement.platform={placement.platform}: "
                    f"set placement.platform={platform}, or {key}.{platform}s=0"
                )
        if placement.platform == "cpu":
            return cpu_devices
        amount = asked[placement.platform]
        whole = amount == int(amount)
        if amount <= 0 or (not whole and (placement.platform == "tpu" or amount > 1)):
            rule = "a whole number of chips, at least 1"
            if placement.platform == "gpu":
                rule = "1, 2, .. or between 0 and 1"
            asks = f"{key}.{placement.platform}s"
            raise ConfigError(
                f"{asks}={amount:g} with placement.platform={placement.platform}: must be {rule}; "
                f"set {asks}=1, or as many as it shall have"
            )
        return math.ceil(amount)

    learner = count("learner", placement.learner)
    if placement.mode == "colocated":
        return Devices(learner=learner, worker=learner, shared=True)
    return Devices(learner=learner, worker=count("rollout", placement.rollout))


def derive(
    config: RunConfig, model: ModelConfig, devices: Devices, teacher: ModelConfig | None = None
) -> Plan:
    """Derived sizes.

    Args:
        teacher: of algorithm.distillation, if there is one.

    Raises:
        ConfigError: if the geometry cannot work, with the numbers and the rule.
    """
    rollout, learner = config.rollout, config.learner
    mesh = checked(
        mesh_shape,
        data=learner.mesh.data,
        fsdp=learner.mesh.fsdp,
        context=learner.mesh.context,
        devices=devices.learner,
    )
    if config.sequence_tokens > model.max_position_embeddings:
        raise ConfigError(
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} + "
            f"rollout.max_completion_tokens={rollout.max_completion_tokens} = "
            f"{config.sequence_tokens} positions, but the model at model.path was trained for "
            f"max_position_embeddings={model.max_position_embeddings}: lower "
            "rollout.max_prompt_tokens or rollout.max_completion_tokens"
        )
    adapter = None
    if learner.lora is not None:
        adapter = checked(shape_of, learner.lora, model, about="learner.lora")
    setup = EngineSetup(
        rollout=rollout,
        model=model,
        platform=config.placement.platform,
        weights_dtype=config.weights.dtype,
        several_turns=config.environment is not None,
        adapter=adapter,
    )
    worker = checked(plan_worker, setup, devices.worker)
    loss_impl = checked(
        choose.resolve,
        learner.loss_impl,
        config.placement.platform,
        about=f"learner.loss_impl={learner.loss_impl}",
    )
    attention = checked(
        plan_attention,
        learner.attention,
        config.placement.platform,
        about=f"learner.attention={learner.attention}",
    )
    updates = config.run.steps * learner.updates_per_batch
    if learner.optimizer.warmup_steps >= updates:
        raise ConfigError(
            f"learner.optimizer.warmup_steps={learner.optimizer.warmup_steps} must be below the "
            f"run.steps x learner.updates_per_batch = {updates} updates of the run; set it to "
            f"{updates - 1} or less, or run more steps"
        )
    worker_prompts = math.ceil(rollout.prompts_per_step / rollout.workers.at_start)
    longest = config.sequence_tokens - 1  # the last token is only ever a target
    row_tokens = min(b for b in row_buckets(learner.longest_row) if b >= longest)
    microbatch_rows = mesh.rows * (learner.longest_row // row_tokens)
    parameters = trained = _parameters(model)
    if adapter is not None:
        trained = adapter_parameters(adapter, model)
    thin = adapter is not None
    trained_bytes = 2 * FLOAT32_BYTES + moment_bytes(learner.optimizer, thin=thin)
    value_head = head_parameters(model.hidden_size) if config.algorithm.has_critic else 0
    learner_bytes = trained_bytes * (trained + value_head)
    if config.algorithm.kl_coef > 0 or adapter is not None:
        # The reference of an adapter is the model under it.
        learner_bytes += DTYPE_BYTES[learner.compute_dtype] * parameters
    if teacher is not None:
        learner_bytes += DTYPE_BYTES[learner.compute_dtype] * _parameters(teacher)
    wire_bytes = DTYPE_BYTES[config.weights.dtype] * trained
    records = rollout.completions_per_step * config.records_per_completion
    return Plan(
        devices=devices,
        mesh=mesh,
        completions_per_step=rollout.completions_per_step,
        completion_tokens_per_step=records * rollout.max_completion_tokens,
        positions_per_step=records * config.sequence_tokens,
        worker_completions=worker_prompts * rollout.completions_per_prompt,
        worker=worker,
        row_tokens=row_tokens,
        microbatch_rows=microbatch_rows,
        microbatches_per_update=math.ceil(records / microbatch_rows),
        updates=updates,
        loss=f"{_objective(config.algorithm)}; lm_head={learner.lm_head} by {loss_impl}",
        attention=str(attention),
        parameters=parameters,
        adapter=adapter,
        trained_parameters=trained,
        learner_bytes_per_device=math.ceil(learner_bytes / mesh.shards),
        wire_bytes_per_version=wire_bytes,
        shared_bytes_per_device=math.ceil(learner_bytes / mesh.shards)
        + worker.policy_bytes
        + worker.version_bytes
        + worker.cache_bytes
        + worker.pool_bytes
        if devices.shared
        else None,
        keeps_policy=config.evaluates_beside_training,
        notes=doubtful_settings(
            config,
            impls={
                "rollout.decode.attention": worker.attention.impl,
                "learner.loss_impl": loss_impl,
                "learner.attention": attention.impl_for(row_tokens),
            },
            score_bytes=FLOAT32_BYTES * model.num_heads * row_tokens**2 // mesh.context,
            programs=worker.programs,
        ),
    )


def moment_bytes(optimizer: OptimizerConfig, *, thin: bool = False) -> int:
    """Of all moments of one parameter, at most.

    Args:
        thin: whether the parameters are those of an adapter: adafactor factors no thin matrix.
    """
    if thin and optimizer.name == "adafactor":
        return FLOAT32_BYTES
    return OPTIMIZER_MOMENTS[optimizer.name] * DTYPE_BYTES[optimizer.moments_dtype]


def plan_worker(setup: EngineSetup, devices: int) -> WorkerPlan:
    """The decode engine of a worker with `devices` devices, which need not be present.

    Raises:
        ValueError: if it cannot work, with value, rule and fix.
    """
    programs = setup.programs(setup.abstract_mesh(devices))
    widest = programs.geometry.widths[-1]
    params = programs.params_struct()
    version = params if setup.adapter is None else adapter_of(params)
    return WorkerPlan(
        lanes=programs.spec.lanes,
        lane_slots=programs.spec.slots,
        attention=setup.attention,
        policy_bytes=device_bytes(params),
        version_bytes=device_bytes(version),
        cache_tokens=widest,
        cache_bytes=programs.cache_bytes(widest),
        pool_bytes=programs.pool_bytes(),
        parked=programs.geometry.parked,
        programs=sum(1 for _ in programs.planned()),
    )


def format_plan(plan: Plan) -> str:
    """The derived sizes as lines of `what: number`."""
    mesh, worker = plan.mesh, plan.worker
    kept = " and once more during an evaluation" * plan.keeps_policy
    parked = f" and {counted(worker.parked * worker.lanes, 'parked episode')}" * bool(worker.parked)
    lines = [
        f"step: {counted(plan.completions_per_step, 'completion')}, at most "
        f"{counted(plan.completion_tokens_per_step, 'sampled token')} and "
        f"{counted(plan.positions_per_step, 'training position')}",
        f"decode: {counted(plan.worker_completions, 'completion')} a step by the busiest worker, "
        f"{worker.lanes * worker.lane_slots:,} at once{_each_copy(worker)}; attention by "
        f"{worker.attention.impl} on {worker.attention.operand_dtype}; up to "
        f"{counted(worker.programs, 'program')} to compile",
        f"update: up to "
        f"{counted(plan.microbatches_per_update, 'micro-batch', 'micro-batches')} of "
        f"{counted(plan.microbatch_rows, 'row')} x {plan.row_tokens:,} tokens; "
        f"{counted(plan.updates, 'update')} in the run",
        f"loss: {plan.loss}",
        f"attention: {plan.attention}",
        *_say_adapter(plan),
        f"learner: mesh data={mesh.data} x fsdp={mesh.fsdp} x context={mesh.context}; state "
        f"{say_bytes(plan.learner_bytes_per_device)} a device, without activations",
        f"worker: {counted(plan.devices.worker, 'device')}; policy "
        f"{say_bytes(worker.policy_bytes)} a device, {_say_change(worker)}{kept}; KV "
        f"cache at most {say_bytes(worker.cache_bytes)} for {worker.cache_tokens:,} columns a "
        f"slot, and {say_bytes(worker.pool_bytes)} of prefilled prompts{parked}",
    ]
    version = say_bytes(plan.wire_bytes_per_version)
    if plan.shared_bytes_per_device is None:
        lines.append(f"wire: {version} to each worker for every policy version")
    else:
        lines.append(
            f"colocated: learner and worker share {counted(plan.devices.learner, 'device')} of one "
            f"process, together {say_bytes(plan.shared_bytes_per_device)} a device, without "
            f"activations; the {version} of a policy version stay there"
        )
    return "\n".join(lines + [f"note: {note}" for note in plan.notes])


def _say_change(worker: WorkerPlan) -> str:
    if worker.version_bytes == worker.policy_bytes:
        return "twice that while versions change"
    return f"and {say_bytes(worker.version_bytes)} more while adapters change"


def _say_adapter(plan: Plan) -> list[str]:
    """One line where an adapter trains."""
    if plan.adapter is None:
        return []
    modules = ", ".join(module.rpartition(".")[2] for module in plan.adapter.modules)
    return [
        f"lora: {plan.trained_parameters:,} parameters train, "
        f"{plan.trained_parameters / plan.parameters:.2%} of the model's: rank "
        f"{plan.adapter.rank}, alpha {plan.adapter.alpha:g}, at {modules} of every layer"
    ]


def _each_copy(worker: WorkerPlan) -> str:
    """Where the completions of a worker are decoded, if it holds several copies of the policy."""
    if worker.lanes == 1:
        return ""
    return f", {worker.lane_slots:,} by each of {worker.lanes} copies of the policy"


def _parameters(model: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in expected_shapes(model).values())


def _objective(algorithm: AlgorithmConfig) -> str:
    """The choices that name the objective."""
    kl = f", KL {algorithm.kl_coef:g} x {algorithm.kl_estimator}" if algorithm.kl_coef else ""
    kl += " in the reward" * (algorithm.kl_in == "reward")
    if (teacher := algorithm.distillation) is not None:
        form = f"top {teacher.top_k}" if teacher.form == "top_k" else teacher.form
        kl += (
            f"; distillation {teacher.coef:g} x {form} from {teacher.teacher}, advantages x "
            f"{teacher.advantage_coef:g}"
        )
    critic = ""
    if algorithm.has_critic:
        critic = f" (gamma {algorithm.gamma:g}, lambda {algorithm.gae_lambda:g})"
    return (
        f"{algorithm.policy_loss} of {algorithm.ratio} ratios, advantage "
        f"{algorithm.advantage}{critic}, "
        f"{algorithm.aggregation}{kl}"
    )


def checked(function, *arguments, about: str = "", **named):
    """Calls a check of another package; its errors become a ConfigError.

    Args:
        about: the key to name in front of the message.
    """
    try:
        return function(*arguments, **named)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        raise ConfigError(f"{about}: {error}" if about else str(error)) from error
