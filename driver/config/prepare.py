"""Checks everything that a run needs before it starts: what every run does first, and all that
`--dry-run` does.
"""

import dataclasses
import datetime
import os
import subprocess
import sys
from collections.abc import Sequence

from driver.config.load_config import ConfigError
from driver.config.plan import asked_devices, checked, derive, format_plan
from driver.config.plural import counted
from driver.config.run_config import RunConfig
from driver.config.shell_switches import check_xla_flags, cpu_devices, overridden
from driver.errors import RunError
from models.config import ModelConfig
from models.files.checkpoint import check_model_files, read_model_config
from models.tokenizer import Tokenizer, load_tokenizer
from rollout_worker.config import MOST_WORKERS, DataConfig, SourceConfig, WorkersConfig
from rollout_worker.data.data_digests import DataDigests, digest_data
from rollout_worker.data.prompts import PromptSet, count_shared
from rollout_worker.data.training_set import TrainingSet, load_source, load_training, order_of
from rollout_worker.engine_setup import stop_automaton
from rollout_worker.rewards.composition import Composition
from rollout_worker.rewards.gold_answers import find_unjudged, needs_answer
from rollout_worker.rewards.processes.reward_process import Allowance
from rollout_worker.rewards.reward_pool import ScoreRequest, validate_functions
from rollout_worker.worker_records import WorkerInfo
from services.trajectories.data_order import DataOrder

_POLICY_LOSS_S = 120.0
_SHOWN_GOLDS = 3
_SHOWN_CHARACTERS = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """What `prepare` found out."""

    text: str
    """The report of --dry-run."""
    order: DataOrder
    """Of the prompts of data.train that fit."""
    held_out: int
    """Prompts of data.eval that fit; 0 without one."""
    data: DataDigests
    """Every process must read the same."""
    model: ModelConfig
    moment: datetime.datetime
    """The time that the chat template reads, in every process of the run."""

    def check_worker(self, info: WorkerInfo, data: DataConfig) -> None:
        """Checks that a worker reads the data that the driver reads.

        Raises:
            RunError: naming worker, host, what differs, and its source.
        """
        different = info.data.differences(self.data)
        if not different:
            return
        section = different[0].rpartition(" ")[2]
        given = {"data.eval": [data.eval], "data.train": data.train_sources}.get(section)
        if given is None:  # one of several training sources
            given = [data.train_sources[int(section.rpartition(".")[2])]]
        sources = ", ".join(str(source and source.source) for source in given)
        raise RunError(
            f"{info.name} on {info.host} reads other {' and '.join(different)} than the driver "
            f"({section}.source={sources}): every host needs the same data, "
            "tokenizer and packages; copy them from the driver's host"
        )


def prepare(config: RunConfig, moment: datetime.datetime | None = None) -> Prepared:
    """Checks model files, tokenizer, prompts and reward functions, and derives the sizes.

    Touches no device: what it needs of the model are its config and headers.

    Args:
        moment: the time that the chat template reads, with its time zone; None is now.

    Raises:
        ConfigError: for whatever of these cannot work.
    """
    check_xla_flags(os.environ)
    moment = moment or datetime.datetime.now().astimezone().replace(microsecond=0)
    path = config.model.path
    model = checked(read_model_config, path, about=f"model.path={path}")
    plan = derive(config, model, asked_devices(config, cpu_devices(os.environ)))
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
    notes = checked(_check_messages, config, tokenizer)
    checked(stop_automaton, tokenizer, config.rollout.stop_strings, about="rollout.stop_strings")
    allowance = Allowance.of(config.reward)
    checked(
        validate_functions, config.reward.functions, allowance=allowance, about="reward.functions"
    )
    if ":" in config.algorithm.policy_loss:
        _try_policy_loss(config.algorithm.policy_loss)
    longest = config.rollout.max_prompt_tokens
    train = checked(
        load_training,
        config.data,
        tokenizer=tokenizer,
        max_prompt_tokens=longest,
        about="data.train",
    )
    held_out = None
    if config.data.eval is not None:
        held_out = checked(
            load_source,
            config.data.eval,
            config.data,
            tokenizer=tokenizer,
            max_prompt_tokens=longest,
            about="data.eval",
        )
    order = order_of(config.data, train, seed=config.run.seed)
    notes += _check_golds(config, train, held_out)
    read = list(zip(_train_keys(config.data), train.sets, strict=True))
    notes += _chat_notes(config, [*read, *([("data.eval", held_out)] if held_out else [])])
    notes += overridden(os.environ)
    unset = [name for name in config.reward.environment if name not in os.environ]
    if unset:
        notes.append(
            f"reward.environment names {', '.join(unset)}, not set here: scorers get variables of "
            "the process that they run in; on a cluster, set them before `ray start` on every host"
        )
    if tokenizer.template.reads_clock:
        notes.append(f"the chat template reads the clock, which stands at {moment} in this run")
    lines = [
        f"run {config.run.name}: {counted(config.run.steps, 'step')}, seed {config.run.seed}, "
        f"platform {config.placement.platform}, {_say_workers(config.rollout.workers)}",
        f"model: {path}, {model.model_type} of {counted(model.num_layers, 'layer')}, "
        f"{plan.parameters:,} parameters, vocabulary {model.vocab_size:,}",
        f"tokenizer: {tokenizer.vocab_size:,} tokens, stop ids "
        f"{', '.join(map(str, sorted(tokenizer.stop_ids)))}, pad id {tokenizer.pad_id}",
        *_describe_train(config, train, order),
    ]
    if config.data.eval is not None and held_out is not None:
        lines.append(_describe(config, "data.eval", config.data.eval, held_out))
        for where, read in zip(_train_keys(config.data), train.sets, strict=True):
            if shared := count_shared(read, held_out):
                lines.append(f"note: also in {where}: {counted(shared, 'prompt')} of data.eval")
    rewards = Composition.of(config.reward.functions, config.reward.combine)
    lines += [f"note: {note}" for note in notes]
    lines += [f"reward: {rewards}", format_plan(plan)]
    return Prepared(
        text="\n".join(lines),
        order=order,
        held_out=0 if held_out is None else len(held_out),
        data=digest_data(train.sets, held_out),
        model=model,
        moment=moment,
    )


def _check_messages(config: RunConfig, tokenizer: Tokenizer) -> list[str]:
    """Checks that the chat template shows all that a prompt consists of; what is to be noted."""
    tokenizer.template.check_arguments()
    if config.data.system_prompt:
        tokenizer.template.check_system_prompt(config.data.system_prompt)
    unknown = tokenizer.template.check_generation_prompt()
    notes = [unknown] if unknown else []
    texts = {
        "data.system_prompt": config.data.system_prompt or "",
        "data.question_template": config.data.question_template,
    }
    for key, text in texts.items():
        if spelled := tokenizer.special_tokens_in(text):
            notes.append(
                f"{key} spells {', '.join(map(repr, dict.fromkeys(spelled)))}, which reaches the "
                "model as ordinary text: special tokens come from the chat template "
                "(model.chat_template) only"
            )
    return notes


def _try_policy_loss(name: str) -> None:
    """Tries out a user's policy loss in a process of its own: it is foreign code, and JAX would
    take the devices of this host.

    Raises:
        ConfigError: with what is wrong with it.
    """
    command = [sys.executable, "-m", "learner.objective.own_policy_loss", name]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_POLICY_LOSS_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"algorithm.policy_loss={name}: it took over {_POLICY_LOSS_S:g} s for 30 tokens: "
            "correct the function"
        ) from None
    if tried.returncode:
        _, found, problem = tried.stderr.rpartition(f"algorithm.policy_loss={name}: ")
        if not found:  # it ended the process
            lines = tried.stderr.strip().splitlines()
            problem = lines[-1] if lines else f"it ended with {tried.returncode}"
        raise ConfigError(f"algorithm.policy_loss={name}: {problem.strip()}")


def _check_golds(config: RunConfig, train: TrainingSet, held_out: PromptSet | None) -> list[str]:
    """Finds gold answers that a scorer cannot judge.

    Returns:
        what is to be noted, where a part of a set cannot be judged.

    Raises:
        ConfigError: where all of a set cannot be judged.
    """
    sets = list(zip(_train_keys(config.data), config.data.train_sources, train.sets, strict=True))
    if config.data.eval is not None and held_out is not None:
        sets.append(("data.eval", config.data.eval, held_out))
    for where, source, read in sets:
        _check_answered(config, where, source, read)
    prompts = [prompt for _, _, read in sets for prompt in read.prompts]
    golds = [ScoreRequest("", one.answer, one.question, one.item) for one in prompts]
    notes = []
    for function in config.reward.functions:
        reasons = checked(
            find_unjudged,
            function.name,
            golds,
            timeout_s=config.reward.timeout_s,
            params=function.params,
            allowance=Allowance.of(config.reward),
            about="reward.functions",
        )
        start = 0
        for which, source, read in sets:
            indices = range(start, start + len(read))
            start += len(read)
            found = [index for index in indices if index in reasons]
            if not found:
                continue
            named = [
                f"{source.place_of(prompts[index].prompt_id - read.first_id)}, answer "
                f"{prompts[index].answer[-_SHOWN_CHARACTERS:]!r}: {reasons[index]}"
                for index in found[:_SHOWN_GOLDS]
            ]
            if len(found) > _SHOWN_GOLDS:
                named.append(f"and {len(found) - _SHOWN_GOLDS:,} more")
            text = (
                f"{which}: {function.name} cannot judge {len(found):,} of {len(indices):,} "
                f"gold answers of {source.source}, so that their completions get no reward but an "
                f"error: {'; '.join(named)}"
            )
            if len(found) == len(indices):
                raise ConfigError(f"{text}. Choose another scorer, or correct answer_field or file")
            notes.append(text)
    return notes


def _check_answered(config: RunConfig, where: str, source: SourceConfig, read: PromptSet) -> None:
    """Checks that records have an answer where a scorer needs one.

    Raises:
        ConfigError: naming the scorer and the first record without one.
    """
    needing = [one.name for one in config.reward.functions if needs_answer(one.name)]
    lacking = [prompt for prompt in read.prompts if not prompt.answer]
    if not needing or not lacking or read.procedural:
        return
    first = source.place_of(lacking[0].prompt_id - read.first_id)
    raise ConfigError(
        f"{where}: {', '.join(needing)} needs an answer, but {len(lacking):,} of {len(read):,} "
        f"records of {source.source} have none, the first in {first} with the fields "
        f"{sorted(lacking[0].item)}: set the source's answer_field, add the answers, or choose "
        "scorers that need none"
    )


def _chat_notes(config: RunConfig, sets: Sequence[tuple[str, PromptSet]]) -> list[str]:
    """What of the configuration does not apply to records that bring messages."""
    notes = []
    for where, read in sets:
        own = sum(prompt.has_system for prompt in read.prompts)
        if own and config.data.system_prompt is not None:
            notes.append(
                f"{where}: {own:,} of {counted(len(read), 'prompt')} have a system message of "
                "their own, which takes the place of data.system_prompt"
            )
        chats = sum(prompt.is_chat for prompt in read.prompts)
        if chats and config.data.question_template != "{question}":
            notes.append(
                f"{where}: {chats:,} of {counted(len(read), 'prompt')} are messages, to which "
                "data.question_template does not apply"
            )
    return notes


def _say_workers(workers: WorkersConfig) -> str:
    text = f"{counted(workers.at_start, 'rollout worker')}"
    if (workers.min, workers.max) != (1, MOST_WORKERS):
        text += f", {workers.min} to {workers.max} ({workers.policy})"
    return text


def _train_keys(data: DataConfig) -> list[str]:
    """How messages name each training source."""
    if not isinstance(data.train, tuple):
        return ["data.train"]
    return [f"data.train.{place} ({name})" for place, name in enumerate(data.train_names)]


def _describe_train(config: RunConfig, train: TrainingSet, order: DataOrder) -> list[str]:
    """One line for each training source."""
    taken = order.draws_before(config.run.steps * config.rollout.prompts_per_step)
    lines = []
    for place, (where, source) in enumerate(
        zip(_train_keys(config.data), config.data.train_sources, strict=True)
    ):
        read = train.sets[place]
        share = f", {float(order.shares[place]):.4g} of what is drawn" if order.is_mixed else ""
        epochs = f"{taken[place] / len(read):.2f} epochs in the run"
        lines.append(f"{_describe(config, where, source, read)}{share}, {epochs}")
    return lines


def _describe(config: RunConfig, where: str, source: SourceConfig, prompts: PromptSet) -> str:
    text = f"{where}: {counted(len(prompts), 'prompt')} from {source.source}"
    if prompts.overlong:
        limit = config.rollout.max_prompt_tokens
        text += f", {prompts.overlong:,} left out with more than {limit} tokens"
    if where == "data.eval":
        used = min(config.eval.prompts or len(prompts), len(prompts))
        text += f", {used:,} evaluated"
    return text
