"""Checks everything that supervised training needs before it starts: all that `--dry-run` does.

Touches no device: what it needs of the model are its config and headers.
"""

import dataclasses
import datetime
import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from fractions import Fraction

from driver.config.load_config import ConfigError
from driver.config.plan import FLOAT32_BYTES, checked, moment_bytes
from driver.config.prepare import check_messages
from driver.config.shell_switches import check_xla_flags, cpu_devices
from driver.config.wording import counted, say_bytes
from driver.sft.sft_config import SftConfig
from kernels import choose
from kernels.packed_attention.ops import plan_attention
from learner.objective.batching import TrainSequence, row_buckets
from learner.sft.sequences import train_sequence
from learner.update.mesh import mesh_shape
from models.config import ModelConfig
from models.files.checkpoint import check_model_files, expected_shapes, read_model_config
from models.load_tokenizer import load_tokenizer
from models.tokenizer import Tokenizer
from rollout_worker.config.data_config import SourceConfig
from rollout_worker.data.examples import Example, ExampleSet, load_examples
from rollout_worker.data.lazy_sequences import chained
from rollout_worker.data.training_set import order_of
from services.trajectories.data_order import DataOrder


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftPlan:
    """What `plan_training` found out."""

    text: str
    """The report of --dry-run."""
    steps: int
    sequences_per_step: int
    order: DataOrder
    """Of the examples of data.train that fit."""
    train: Sequence[Example]
    """Of every source, one source after the other."""
    held_out: dict[str, Sequence[Example]]
    """Of each set of data.eval, by the name of its metric."""
    tokenizer: Tokenizer
    moment: datetime.datetime
    """The time that the chat template reads."""
    marks: dict[str, str]
    """What a resume must keep; see KEPT."""

    def batch(self, step: int) -> list[TrainSequence]:
        """What a step trains on; a function of the step, counted from 1, alone."""
        count = self.sequences_per_step
        indices = range((step - 1) * count, step * count)
        return [_sequence(self.train[self.order.prompt_at(index)[1]]) for index in indices]

    def held_out_sequences(self) -> dict[str, list[TrainSequence]]:
        """Each set of data.eval, by the name of its metric."""
        return {name: [_sequence(one) for one in its] for name, its in self.held_out.items()}


KEPT = {
    "seed": "run.seed",
    "mixture": "data.train, its sources and their weights,",
    "records": "data.train (file, fields, system prompt, templates, tokenizer, batch.max_tokens)",
    "sequences_per_step": "batch.sequences_per_step",
    "shuffle": "batch.shuffle",
    "model": "model.path",
    "optimizer": "learner.optimizer.name",
}
"""Mark -> the configuration keys that decide it."""


def plan_training(config: SftConfig, moment: datetime.datetime | None = None) -> SftPlan:
    """Checks model files, tokenizer and records, and derives the sizes.

    Args:
        moment: the time that the chat template reads, with its time zone; None is now.

    Raises:
        ConfigError: for whatever of these cannot work.
    """
    check_xla_flags(os.environ)
    moment = moment or datetime.datetime.now().astimezone().replace(microsecond=0)
    path = config.model.path
    model = checked(read_model_config, path, about=f"model.path={path}")
    loss_impl = _check_geometry(config, model)
    checked(check_model_files, path, about=f"model.path={path}")
    tokenizer = checked(
        load_tokenizer,
        path,
        tokenizer=config.model.tokenizer,
        chat_template=config.model.chat_template,
        stop_tokens=config.model.stop_tokens,
        moment=moment,
        template_args=config.data.template_args,
        tools=config.data.tools,
        about="model",
    )
    notes = checked(check_messages, config.data, tokenizer)
    sources = list(zip(_train_keys(config), config.data.train_sources, strict=True))
    train = [_load(config, key, source, tokenizer) for key, source in sources]
    evaluated = list(zip(config.data.eval_keys, config.data.eval_sources, strict=True))
    held_out = [_load(config, key, source, tokenizer) for key, source in evaluated]
    order = dataclasses.replace(
        order_of(config.data, train, seed=config.run.seed), shuffled=config.batch.shuffle
    )
    steps = _steps(config, order.count)
    if config.learner.optimizer.warmup_steps >= steps:
        raise ConfigError(
            f"learner.optimizer.warmup_steps={config.learner.optimizer.warmup_steps} must be below "
            f"the {counted(steps, 'step')} of the training: lower it, or train longer"
        )
    both = zip([*sources, *evaluated], [*train, *held_out], strict=True)
    read = [(key, source, one) for (key, source), one in both]
    notes += _notes(read, train)
    if tokenizer.template.reads_clock:
        notes.append(f"the chat template reads the clock, which stands at {moment}")
    drawn = steps * config.batch.sequences_per_step
    lines = [
        f"sft {config.run.name}: {counted(steps, 'step')} of "
        f"{counted(config.batch.sequences_per_step, 'record')}, "
        f"{drawn / order.count:.2f} epochs of {counted(order.count, 'record')}, seed "
        f"{config.run.seed}, platform {config.placement.platform}",
        f"model: {path}, {model.model_type} of {counted(model.num_layers, 'layer')}, "
        f"{_parameters(model):,} parameters, vocabulary {model.vocab_size:,}",
        f"tokenizer: {tokenizer.vocab_size:,} tokens, stop ids "
        f"{', '.join(map(str, sorted(tokenizer.stop_ids)))}, pad id {tokenizer.pad_id}",
        *(_describe(config, *one) for one in read),
        _describe_update(config, model, train, loss_impl),
        *(f"note: {note}" for note in notes),
    ]
    return SftPlan(
        text="\n".join(lines),
        steps=steps,
        sequences_per_step=config.batch.sequences_per_step,
        order=order,
        train=chained([one.examples for one in train]),
        held_out={
            f"eval/{name}/loss" if name else "eval/loss": one.examples
            for name, one in zip(config.data.eval_names, held_out, strict=True)
        },
        tokenizer=tokenizer,
        moment=moment,
        marks=_marks(config, model, order, train),
    )


def _check_geometry(config: SftConfig, model: ModelConfig) -> str:
    """Checks the sizes that need no data; returns which implementation computes the loss."""
    platform, mesh = config.placement.platform, config.learner.mesh
    if platform == "cpu":  # how many there are of another is known where they are
        devices = cpu_devices(os.environ)
        checked(
            mesh_shape,
            data=mesh.data,
            fsdp=mesh.fsdp,
            context=mesh.context,
            devices=devices,
        )
    if config.batch.max_tokens > model.max_position_embeddings:
        raise ConfigError(
            f"batch.max_tokens={config.batch.max_tokens} positions, but the model at model.path "
            f"was trained for max_position_embeddings={model.max_position_embeddings}: lower "
            "batch.max_tokens"
        )
    attention = config.learner.attention
    checked(plan_attention, attention, platform, about=f"learner.attention={attention}")
    loss_impl = config.learner.loss_impl
    return checked(choose.resolve, loss_impl, platform, about=f"learner.loss_impl={loss_impl}")


def _load(config: SftConfig, key: str, source: SourceConfig, tokenizer: Tokenizer) -> ExampleSet:
    return checked(
        load_examples,
        source,
        config.data,
        tokenizer=tokenizer,
        max_tokens=config.batch.max_tokens,
        about=key,
    )


def _steps(config: SftConfig, records: int) -> int:
    if config.run.steps is not None:
        return config.run.steps
    epochs = Fraction(str(1.0 if config.run.epochs is None else config.run.epochs))
    return math.ceil(epochs * records / config.batch.sequences_per_step)


def _train_keys(config: SftConfig) -> list[str]:
    """How messages name each training source."""
    if not isinstance(config.data.train, tuple):
        return ["data.train"]
    return [f"data.train.{place} ({name})" for place, name in enumerate(config.data.train_names)]


def _notes(
    read: Sequence[tuple[str, SourceConfig, ExampleSet]],
    train: Sequence[ExampleSet],
) -> Iterator[str]:
    """What works, but is probably not meant."""
    for key, _, one in read:
        if one.open_ended:
            yield (
                f"{key}: {one.open_ended:,} of {counted(len(one), 'record')} have a turn that "
                "trains without a stop token at its end, so that the model learns no end there: "
                "have the chat template (model.chat_template) write one"
            )
    seen = {_content(example) for one in train for example in one.examples}
    for key, _, one in read[len(train) :]:
        if shared := sum(_content(example) in seen for example in one.examples):
            yield f"also in data.train: {counted(shared, 'record')} of {key}"


def _content(example: Example) -> int:
    return hash(example.token_ids.tobytes())


def _describe(config: SftConfig, key: str, source: SourceConfig, one: ExampleSet) -> str:
    text = f"{key}: {counted(len(one), 'record')} from {source.source}"
    if one.overlong:
        text += (
            f", {one.overlong:,} left out with more than batch.max_tokens="
            f"{config.batch.max_tokens} tokens (the longest has {one.longest:,})"
        )
    return f"{text}; {counted(one.tokens, 'token')}, of which {one.trained_tokens:,} train"


def _describe_update(
    config: SftConfig, model: ModelConfig, train: Sequence[ExampleSet], loss_impl: str
) -> str:
    learner = config.learner
    longest = max(len(example.token_ids) for one in train for example in one.examples) - 1
    row_tokens = min(b for b in row_buckets(learner.longest_row) if b >= longest)
    shared_by = learner.mesh.context
    devices = "a device" if shared_by == 1 else f"for each {shared_by} devices, which share them"
    each_bytes = 2 * FLOAT32_BYTES + moment_bytes(learner.optimizer)
    state = say_bytes(each_bytes * _parameters(model))
    return (
        f"update: micro-batches of up to {learner.longest_row // row_tokens:,} rows x "
        f"{row_tokens:,} tokens {devices}; {learner.optimizer.name}, lm_head={learner.lm_head} by "
        f"{loss_impl}; weights, gradients and moments {state} over the devices of "
        "learner.mesh.fsdp and context, without activations"
    )


def _parameters(model: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in expected_shapes(model).values())


def _marks(
    config: SftConfig, model: ModelConfig, order: DataOrder, train: Sequence[ExampleSet]
) -> dict[str, str]:
    records = hashlib.sha256()
    for one in train:
        for example in one.examples:
            for array in (example.token_ids, example.trains):
                records.update(len(array).to_bytes(8, "little") + array.tobytes())
    shape = json.dumps(dataclasses.asdict(model), sort_keys=True)
    return {
        "seed": str(config.run.seed),
        "mixture": json.dumps(order.mixture()),
        "records": records.hexdigest(),
        "sequences_per_step": str(config.batch.sequences_per_step),
        "shuffle": str(config.batch.shuffle),
        "model": hashlib.sha256(shape.encode()).hexdigest(),
        "optimizer": config.learner.optimizer.name,
    }


def _sequence(example: Example) -> TrainSequence:
    return train_sequence(f"record {example.row}", example.token_ids, example.trains)
