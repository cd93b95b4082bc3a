"""What a run will do, worked out before any device is touched.

`derive` is arithmetic on the configuration: sizes, and the refusal of those that cannot work.
`prepare` also reads the files: it is what every run does first, and all that `--dry-run` does.
"""

import dataclasses
import math

from driver.config import Resources, RunConfig
from driver.settings import ConfigError
from kernels import choose
from learner.batching import row_buckets
from learner.mesh import mesh_shape
from models.checkpoint import check_model_files, expected_shapes, read_model_config
from models.config import ModelConfig
from models.tokenizer import Tokenizer, load_tokenizer
from rollout_worker.config import SourceConfig
from rollout_worker.kv_cache import check_geometry
from rollout_worker.prompts import PromptSet, count_shared, load_prompts
from rollout_worker.reward_pool import validate_functions

FLOAT32_BYTES = 4
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
OPTIMIZER_MOMENTS = {"adamw": 2, "lion": 1, "sgd": 0}
"""float32 copies of the parameters that each optimiser keeps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """How many accelerators (or CPU devices) each process sees."""

    learner: int
    worker: int


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
    decode_rows: int
    """Rows of a decode batch that hold completions; the rest of batch_rows is filler."""
    decode_batches_per_step: int
    decode_batches_per_worker: int
    """Of the busiest worker."""
    cache_positions: int
    """KV slots of one decode batch."""
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
    worker_bytes_per_device: int
    """The policy, twice while a new version is swapped in."""
    cache_bytes_per_device: int
    wire_bytes_per_version: int
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

    return Devices(
        learner=count("learner", placement.learner), worker=count("rollout", placement.rollout)
    )


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
    _checked(
        check_geometry,
        prompt_tokens=rollout.max_prompt_tokens,
        completion_tokens=rollout.max_completion_tokens,
        cache_tokens=rollout.cache_tokens,
        max_position_embeddings=model.max_position_embeddings,
    )
    _check_decode_rows(config, devices.worker)
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
    batch_prompts = rollout.decode.batch_rows // rollout.completions_per_prompt
    prompts = min(batch_prompts, math.ceil(rollout.prompts_per_step / rollout.workers))
    batches = math.ceil(rollout.prompts_per_step / prompts)
    longest = config.sequence_tokens - 1  # the last token is only ever a target
    row_tokens = min(b for b in row_buckets(learner.microbatch_tokens) if b >= longest)
    microbatch_rows = devices.learner * (learner.microbatch_tokens // row_tokens)
    parameters = sum(math.prod(shape) for shape in expected_shapes(model).values())
    copies = 2 + OPTIMIZER_MOMENTS[learner.optimizer.name]
    learner_bytes = FLOAT32_BYTES * copies * parameters
    if config.algorithm.kl_coef > 0:
        learner_bytes += DTYPE_BYTES[learner.compute_dtype] * parameters
    wire_bytes = DTYPE_BYTES[config.weights.dtype] * parameters
    slots = rollout.decode.batch_rows * config.sequence_tokens
    slot_bytes = (2 * model.num_layers * model.num_kv_heads * model.head_dim) * DTYPE_BYTES[
        rollout.decode.compute_dtype
    ]
    return Plan(
        devices=devices,
        mesh=mesh,
        completions_per_step=rollout.completions_per_step,
        completion_tokens_per_step=rollout.completions_per_step * rollout.max_completion_tokens,
        positions_per_step=rollout.completions_per_step * config.sequence_tokens,
        decode_rows=prompts * rollout.completions_per_prompt,
        decode_batches_per_step=batches,
        decode_batches_per_worker=math.ceil(batches / rollout.workers),
        cache_positions=slots,
        row_tokens=row_tokens,
        microbatch_rows=microbatch_rows,
        microbatches_per_update=math.ceil(rollout.completions_per_step / microbatch_rows),
        updates=updates,
        loss=f"lm_head={learner.lm_head} by {loss_impl}",
        parameters=parameters,
        learner_bytes_per_device=math.ceil(learner_bytes / mesh[1]),
        worker_bytes_per_device=wire_bytes,
        cache_bytes_per_device=math.ceil(slots * slot_bytes / devices.worker),
        wire_bytes_per_version=wire_bytes,
        notes=_notes(
            config,
            decode_rows=prompts * rollout.completions_per_prompt,
            batches=batches,
            loss_impl=loss_impl,
        ),
    )


def format_plan(plan: Plan) -> str:
    """The derived sizes as lines of `what: number`."""
    data, fsdp = plan.mesh
    lines = [
        f"step: {plan.completions_per_step:,} completions, at most "
        f"{plan.completion_tokens_per_step:,} sampled tokens and {plan.positions_per_step:,} "
        "training positions",
        f"decode: {plan.decode_batches_per_step} x {plan.decode_rows} rows a step, "
        f"{plan.decode_batches_per_worker} of them by the busiest worker; "
        f"{plan.cache_positions:,} KV positions a batch, "
        f"{_bytes(plan.cache_bytes_per_device)} a device",
        f"update: at most {plan.microbatches_per_update} micro-batches of {plan.microbatch_rows} "
        f"rows x {plan.row_tokens:,} tokens; {plan.updates:,} updates in the run",
        f"loss: {plan.loss}",
        f"learner: mesh data={data} x fsdp={fsdp}; state {_bytes(plan.learner_bytes_per_device)} "
        "a device, activations apart",
        f"worker: {plan.devices.worker} device(s); policy {_bytes(plan.worker_bytes_per_device)} "
        "a device, twice that while versions change",
        f"wire: {_bytes(plan.wire_bytes_per_version)} to each worker for every policy version",
    ]
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
    _checked(validate_functions, config.reward.functions, about="reward.functions")
    train = _prompts(config, "train", config.data.train, tokenizer)
    held_out = None
    if config.data.eval is not None:
        held_out = _prompts(config, "eval", config.data.eval, tokenizer)
    lines = [
        f"run {config.run.name}: {config.run.steps} steps, seed {config.run.seed}, platform "
        f"{config.placement.platform}, {config.rollout.workers} rollout worker(s)",
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


def _check_decode_rows(config: RunConfig, devices: int) -> None:
    """Holds the decode engine's rule: every device gets whole groups."""
    rows = config.rollout.decode.batch_rows
    evaluates = config.eval.every_steps or config.eval.at_start or config.eval.at_end
    asked = {"rollout.completions_per_prompt": config.rollout.completions_per_prompt}
    if evaluates:
        asked["eval.samples_per_prompt"] = config.eval.samples_per_prompt
    for key, samples in asked.items():
        if rows % (samples * devices):
            raise ConfigError(
                f"rollout.decode.batch_rows={rows} must be a multiple of {key}={samples} x "
                f"{devices} device(s) of a worker = {samples * devices}"
            )


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


def _notes(config: RunConfig, *, decode_rows: int, batches: int, loss_impl: str) -> tuple[str, ...]:
    rollout = config.rollout
    notes = []
    if loss_impl == choose.PALLAS_INTERPRET:
        notes.append(
            f"learner.loss_impl={config.learner.loss_impl} is interpreted on "
            f"{config.placement.platform}: exact, and slow; `auto` is not"
        )
    if decode_rows < rollout.decode.batch_rows:
        notes.append(
            f"{decode_rows} of rollout.decode.batch_rows={rollout.decode.batch_rows} rows hold "
            "completions; the rest is decoded in vain"
        )
    if batches % rollout.workers:
        notes.append(
            f"{batches} decode batches do not divide by rollout.workers={rollout.workers}: some "
            "workers wait for others"
        )
    return tuple(notes)


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
