"""What a run will do, worked out before any device is touched.

`derive` is arithmetic on the configuration: sizes, and the refusal of those that cannot work.
`prepare` also reads the files: it is what every run does first, and all that `--dry-run` does.
"""

import dataclasses
import math

from driver.config.load_config import ConfigError
from driver.config.plan_warnings import notes
from driver.config.run_config import Resources, RunConfig
from kernels import choose
from learner.update.batching import row_buckets
from learner.update.mesh import mesh_shape
from models.config import ModelConfig
from models.files.checkpoint import check_model_files, expected_shapes, read_model_config
from models.tokenizer import Tokenizer, load_tokenizer
from rollout_worker.config import MOST_WORKERS, SourceConfig, WorkersConfig
from rollout_worker.data.prompts import PromptSet, count_shared, load_prompts
from rollout_worker.engine.decode_programs import device_bytes
from rollout_worker.engine_setup import DecodeAttention, EngineSetup, stop_automaton
from rollout_worker.rewards.reward_pool import validate_functions

FLOAT32_BYTES = 4
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
OPTIMIZER_MOMENTS = {"adamw": 2, "lion": 1, "sgd": 0}
"""float32 copies of the parameters that each optimiser keeps."""


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
    """Twice that while a new version is swapped in."""
    cache_tokens: int
    """Columns of the widest cache."""
    cache_bytes: int
    """Of the slots' cache at its widest."""
    pool_bytes: int
    """Of the prompts that lie prefilled."""
    programs: int
    """That can be compiled at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Derived sizes of one run; bytes are of arrays alone, without temporaries."""

    devices: Devices
    mesh: tuple[int, int]
    """(data, fsdp) of the learner."""
    completions_per_step: int
    completion_tokens_per_step: int
    """At most: every completion at its longest."""
    positions_per_step: int
    """At most: prompts counted once per completion."""
    worker_completions: int
    """Of a step, by the busiest worker."""
    worker: WorkerPlan
    row_tokens: int
    """Longest training row: the first bucket that holds the longest sequence."""
    microbatch_rows: int
    """Rows of a micro-batch of such rows, over all learner devices."""
    microbatches_per_update: int
    """At most: packing short sequences into one row makes it fewer."""
    updates: int
    """Optimiser updates of the whole run."""
    loss: str
    """How the head is worked through, and by which implementation."""
    parameters: int
    learner_bytes_per_device: int
    """Master weights, optimiser moments, gradients and reference policy, cut over fsdp."""
    wire_bytes_per_version: int
    shared_bytes_per_device: int | None
    """Of learner and worker together, with two copies of the policy, where they share devices."""
    notes: tuple[str, ...]
    """What works, but is probably not meant."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """What `prepare` found out."""

    text: str
    """The report of --dry-run."""
    prompts: int
    """Prompts of data.train that fit."""
    held_out: int
    """Prompts of data.eval that fit; 0 without one."""
    digest: str
    """Of the training prompts and their tokens: every process must find the same."""
    model: ModelConfig


def asked_devices(config: RunConfig) -> Devices:
    """The devices that the processes will see, from the resources that they ask for.

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
            return 1
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


def derive(config: RunConfig, model: ModelConfig, devices: Devices) -> Plan:
    """Derived sizes.

    Raises:
        ConfigError: if the geometry cannot work, with the numbers and the rule.
    """
    rollout, learner = config.rollout, config.learner
    mesh = _checked(
        mesh_shape, data=learner.mesh.data, fsdp=learner.mesh.fsdp, devices=devices.learner
    )
    if config.sequence_tokens > model.max_position_embeddings:
        raise ConfigError(
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} + "
            f"rollout.max_completion_tokens={rollout.max_completion_tokens} = "
            f"{config.sequence_tokens} positions, but the model at model.path was trained for "
            f"max_position_embeddings={model.max_position_embeddings}: lower "
            "rollout.max_prompt_tokens or rollout.max_completion_tokens"
        )
    setup = EngineSetup(
        rollout=rollout,
        model=model,
        platform=config.placement.platform,
        weights_dtype=config.weights.dtype,
    )
    worker = _checked(plan_worker, setup, devices.worker)
    loss_impl = _checked(
        choose.resolve,
        learner.loss_impl,
        config.placement.platform,
        about=f"learner.loss_impl={learner.loss_impl}",
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
    row_tokens = min(b for b in row_buckets(learner.microbatch_tokens) if b >= longest)
    microbatch_rows = devices.learner * (learner.microbatch_tokens // row_tokens)
    parameters = sum(math.prod(shape) for shape in expected_shapes(model).values())
    copies = 2 + OPTIMIZER_MOMENTS[learner.optimizer.name]
    learner_bytes = FLOAT32_BYTES * copies * parameters
    if config.algorithm.kl_coef > 0:
        learner_bytes += DTYPE_BYTES[learner.compute_dtype] * parameters
    wire_bytes = DTYPE_BYTES[config.weights.dtype] * parameters
    return Plan(
        devices=devices,
        mesh=mesh,
        completions_per_step=rollout.completions_per_step,
        completion_tokens_per_step=rollout.completions_per_step * rollout.max_completion_tokens,
        positions_per_step=rollout.completions_per_step * config.sequence_tokens,
        worker_completions=worker_prompts * rollout.completions_per_prompt,
        worker=worker,
        row_tokens=row_tokens,
        microbatch_rows=microbatch_rows,
        microbatches_per_update=math.ceil(rollout.completions_per_step / microbatch_rows),
        updates=updates,
        loss=f"lm_head={learner.lm_head} by {loss_impl}",
        parameters=parameters,
        learner_bytes_per_device=math.ceil(learner_bytes / mesh[1]),
        wire_bytes_per_version=wire_bytes,
        shared_bytes_per_device=math.ceil(learner_bytes / mesh[1])
        + 2 * worker.policy_bytes
        + worker.cache_bytes
        + worker.pool_bytes
        if devices.shared
        else None,
        notes=notes(
            config,
            decode_impl=worker.attention.impl,
            loss_impl=loss_impl,
            programs=worker.programs,
        ),
    )


def plan_worker(setup: EngineSetup, devices: int) -> WorkerPlan:
    """The decode engine of a worker with so many devices, which need not be at hand.

    Raises:
        ValueError: if it cannot work, with value, rule and fix.
    """
    programs = setup.programs(setup.abstract_mesh(devices))
    widest = programs.geometry.widths[-1]
    return WorkerPlan(
        lanes=programs.spec.lanes,
        lane_slots=programs.spec.slots,
        attention=setup.attention,
        policy_bytes=device_bytes(programs.params_struct()),
        cache_tokens=widest,
        cache_bytes=programs.cache_bytes(widest),
        pool_bytes=programs.pool_bytes(),
        programs=sum(1 for _ in programs.planned()),
    )


def format_plan(plan: Plan) -> str:
    """The derived sizes as lines of `what: number`."""
    (data, fsdp), worker = plan.mesh, plan.worker
    lines = [
        f"step: {plan.completions_per_step:,} completions, at most "
        f"{plan.completion_tokens_per_step:,} sampled tokens and {plan.positions_per_step:,} "
        "training positions",
        f"decode: {plan.worker_completions:,} completions a step by the busiest worker, "
        f"{worker.lanes * worker.lane_slots:,} at once in {worker.lanes} lane(s) of "
        f"{worker.lane_slots:,} slots; attention by {worker.attention.impl} on "
        f"{worker.attention.operand_dtype}; at most {worker.programs} programs",
        f"update: at most {plan.microbatches_per_update} micro-batches of {plan.microbatch_rows} "
        f"rows x {plan.row_tokens:,} tokens; {plan.updates:,} updates in the run",
        f"loss: {plan.loss}",
        f"learner: mesh data={data} x fsdp={fsdp}; state {_bytes(plan.learner_bytes_per_device)} "
        "a device, activations apart",
        f"worker: {plan.devices.worker} device(s); policy {_bytes(worker.policy_bytes)} a device, "
        "twice that while versions change; KV cache at most "
        f"{_bytes(worker.cache_bytes)} for {worker.cache_tokens:,} columns a slot, and "
        f"{_bytes(worker.pool_bytes)} of prefilled prompts",
    ]
    version = _bytes(plan.wire_bytes_per_version)
    if plan.shared_bytes_per_device is None:
        lines.append(f"wire: {version} to each worker for every policy version")
    else:
        lines.append(
            f"colocated: learner and worker share {plan.devices.learner} device(s) of one process, "
            f"together {_bytes(plan.shared_bytes_per_device)} a device, activations apart; the "
            f"{version} of a policy version are handed over there"
        )
    return "\n".join(lines + [f"note: {note}" for note in plan.notes])


def prepare(config: RunConfig) -> Prepared:
    """Checks model files, tokenizer, prompts and reward functions, and derives the sizes.

    Touches no device: what it needs of the model are its config and headers.

    Raises:
        ConfigError: for whatever of these cannot work.
    """
    path = config.model.path
    model = _checked(read_model_config, path, about=f"model.path={path}")
    plan = derive(config, model, asked_devices(config))
    _checked(check_model_files, path, about=f"model.path={path}")
    tokenizer = _checked(
        load_tokenizer,
        path,
        tokenizer=config.model.tokenizer,
        chat_template=config.model.chat_template,
        stop_tokens=config.model.stop_tokens,
        about="model",
    )
    _checked(stop_automaton, tokenizer, config.rollout.stop_strings, about="rollout.stop_strings")
    _checked(validate_functions, config.reward.functions, about="reward.functions")
    train = _prompts(config, "train", config.data.train, tokenizer)
    held_out = None
    if config.data.eval is not None:
        held_out = _prompts(config, "eval", config.data.eval, tokenizer)
    lines = [
        f"run {config.run.name}: {config.run.steps} steps, seed {config.run.seed}, platform "
        f"{config.placement.platform}, {_say_workers(config.rollout.workers)}",
        f"model: {path}, {model.model_type} of {model.num_layers} layers, "
        f"{plan.parameters:,} parameters, vocabulary {model.vocab_size:,}",
        f"tokenizer: {tokenizer.vocab_size:,} tokens, stop ids "
        f"{', '.join(map(str, sorted(tokenizer.stop_ids)))}, pad id {tokenizer.pad_id}",
        _describe(config, "train", config.data.train, train) + f", {_epochs(config, train)}",
    ]
    if config.data.eval is not None and held_out is not None:
        lines.append(_describe(config, "eval", config.data.eval, held_out))
        shared = count_shared(train, held_out)
        if shared:
            lines.append(f"note: {shared:,} prompts of data.eval are also in data.train")
    weights = [f"{one.name} x {one.weight:g}" for one in config.reward.functions]
    lines += [f"reward: {' + '.join(weights)}", format_plan(plan)]
    return Prepared(
        text="\n".join(lines),
        prompts=len(train),
        held_out=0 if held_out is None else len(held_out),
        digest=train.digest,
        model=model,
    )


def _say_workers(workers: WorkersConfig) -> str:
    text = f"{workers.at_start} rollout worker(s)"
    if (workers.min, workers.max) != (1, MOST_WORKERS):
        text += f", {workers.min} to {workers.max} ({workers.policy})"
    return text


def _prompts(
    config: RunConfig, which: str, source: SourceConfig, tokenizer: Tokenizer
) -> PromptSet:
    return _checked(
        load_prompts,
        source,
        tokenizer=tokenizer,
        system_prompt=config.data.system_prompt,
        question_template=config.data.question_template,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        about=f"data.{which}",
    )


def _describe(config: RunConfig, which: str, source: SourceConfig, prompts: PromptSet) -> str:
    text = f"data.{which}: {len(prompts):,} prompts from {source.source}"
    if prompts.overlong:
        limit = config.rollout.max_prompt_tokens
        text += f", {prompts.overlong:,} left out with more than {limit} tokens"
    if which == "eval":
        used = min(config.eval.prompts or len(prompts), len(prompts))
        text += f", {used:,} evaluated"
    return text


def _epochs(config: RunConfig, train: PromptSet) -> str:
    taken = config.run.steps * config.rollout.prompts_per_step
    return f"{taken / len(train):.2f} epochs in the run"


def _checked(function, *arguments, about: str = "", **named):
    """Calls a check of another package; what it refuses is a fault of the configuration."""
    try:
        return function(*arguments, **named)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        raise ConfigError(f"{about}: {error}" if about else str(error)) from error


def _bytes(count: int) -> str:
    """A number of bytes as people say it, in powers of 1000."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"
