"""Checks everything that a run needs before it starts: what every run does first, and all that
`--dry-run` does.
"""

import bisect
import dataclasses
import datetime
import hashlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from driver.config.checks.data_checks import (
    chat_notes,
    check_golds,
    curriculum_notes,
    judged_sets,
    overlap_notes,
    train_keys,
    try_scorers,
)
from driver.config.checks.policy_loss_trial import try_policy_loss
from driver.config.checks.reachable_rewards import correctness_notes
from driver.config.checks.unread_settings import unread_settings
from driver.config.load_config import ConfigError
from driver.config.plan import asked_devices, checked, derive, format_plan
from driver.config.run_config import RunConfig
from driver.config.sections.evaluation import HeldOutSet
from driver.config.shell_switches import check_xla_flags, cpu_devices, overridden
from driver.config.wording import counted
from driver.errors import RunError
from learner.first_adapter import check_first_adapter
from learner.teacher import TeacherFiles, check_teacher
from models.adapter import AdapterShape
from models.config import ModelConfig
from models.files.checkpoint import check_model_files, read_model_config
from models.files.fingerprint import fingerprint
from models.files.hf_folder import ADAPTER
from models.load_tokenizer import load_tokenizer
from models.tokenizer import Tokenizer
from rollout_worker.config.data_config import DataConfig, SourceConfig
from rollout_worker.config.rollout_config import MOST_WORKERS, WorkersConfig
from rollout_worker.data.data_digests import DataDigests, digest_data
from rollout_worker.data.prompts import PromptSet, count_shared
from rollout_worker.data.training_set import (
    TrainingSet,
    load_held_out,
    load_training,
    order_of,
)
from rollout_worker.engine_setup import stop_automaton
from rollout_worker.environments.environment_pool import validate_environment
from rollout_worker.rewards.code.code_tests import CODE_STARTS_S, TOTAL_S
from rollout_worker.rewards.code.sandbox import confinement_problem, describe_protections
from rollout_worker.rewards.composition import Composition
from rollout_worker.rewards.processes.reward_process import Allowance
from rollout_worker.rewards.reward_pool import validate_functions
from rollout_worker.worker_records import WorkerInfo
from services.trajectories.data_order import DataOrder

_TEACHER = "algorithm.distillation.teacher"
_SHOWN_PLACES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """What `prepare` found out."""

    text: str
    """The report of --dry-run."""
    order: DataOrder
    """Of the prompts of data.train that fit."""
    held_out: tuple[int, ...]
    """Prompts of each set of data.eval that fit."""
    data: DataDigests
    """Every process must read the same."""
    model: ModelConfig
    moment: datetime.datetime
    """The time that the chat template reads, in every process of the run."""
    teacher: TeacherFiles | None = None
    """Of algorithm.distillation."""
    adapter: AdapterShape | None = None
    """Of learner.lora."""
    base_digest: str | None = None
    """Of the files of the model and of the first adapter, where an adapter trains."""
    places: tuple[tuple[str, SourceConfig, Sequence[int]], ...]
    """Of each training source: how messages name it, itself, and the indices of its prompts."""
    left_out: tuple[dict[str, Any], ...]
    """Prompts with too many tokens, as dropped.jsonl has them."""

    def place_of(self, position: int) -> str:
        """Names the place of a training prompt in the data.

        Args:
            position: in the list of the prompts of all sources.
        """
        which = bisect.bisect_right(self.order.starts, position) - 1
        key, source, indices = self.places[which]
        index = indices[position - self.order.starts[which]]
        return f"{key}: {source.source}, {source.place_of(index)}"

    def check_worker(self, info: WorkerInfo, data: DataConfig) -> None:
        """Checks that a worker reads the data that the driver reads.

        Raises:
            RunError: naming worker, host, what differs, and its source.
        """
        different = info.data.differences(self.data)
        if not different:
            return
        section = different[0].rpartition(" ")[2]
        _, which, *only = section.split(".")  # a number where it is one of several
        given = data.train_sources if which == "train" else data.eval_sources
        if only:
            given = [given[int(only[0])]]
        sources = ", ".join(source.source for source in given)
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
    devices = asked_devices(config, cpu_devices(os.environ))
    plan = derive(config, model, devices, _read_teacher_config(config))
    checked(check_model_files, path, about=f"model.path={path}")
    teacher = _check_teacher(config, model)
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
    notes = unread_settings(config) + correctness_notes(config)
    notes += checked(check_messages, config.data, tokenizer)
    checked(stop_automaton, tokenizer, config.rollout.stop_strings, about="rollout.stop_strings")
    if config.environment is None:
        _load_scorers(config)
    else:
        tools = checked(
            validate_environment, config.environment, config.reward, about="environment.name"
        )
        offering = checked(tokenizer.with_tools, tools, about="environment.name")
        checked(offering.template.check_history, config.environment.history)
    if ":" in config.algorithm.policy_loss:
        try_policy_loss(config.algorithm.policy_loss)
    longest = config.rollout.max_prompt_tokens
    train = checked(
        load_training,
        config.data,
        tokenizer=tokenizer,
        max_prompt_tokens=longest,
        about="data.train",
    )
    held_out = checked(load_held_out, config.data, tokenizer=tokenizer, max_prompt_tokens=longest)
    order = order_of(config.data, train.sets, seed=config.run.seed)
    sets = judged_sets(config, train, held_out)
    if config.environment is None:
        notes += check_golds(config, sets) + try_scorers(config, sets)
    notes += chat_notes(config, [(one.key, one.read) for one in sets])
    notes += overlap_notes(config.data, train)
    notes += curriculum_notes(config, train, order)
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
    for one, read in zip(config.held_out_sets, held_out, strict=True):
        lines.append(_describe_held_out(config, one, read))
        for where, trained in zip(train_keys(config.data), train.sets, strict=True):
            if shared := count_shared(trained, read):
                lines.append(f"note: also in {where}: {counted(shared, 'prompt')} of {one.key}")
    rewards = [config.reward, *(one.reward for one in config.held_out_sets)]
    scorers = [scorer for reward in rewards for scorer in reward.functions]
    said = [_say_sandbox(config, one.params) for one in scorers if one.name == "code_tests"]
    notes += dict.fromkeys(said)
    composition = Composition.of(config.reward.functions, config.reward.combine)
    lines += [f"note: {note}" for note in notes]
    if config.environment is not None:
        lines.append(
            f"environment: {config.environment.name}, at most "
            f"{counted(config.environment.max_turns, 'turn')} and "
            f"{counted(config.rollout.max_completion_tokens, 'token')} "
            f"{'an episode' if config.records_per_completion == 1 else 'a record'}"
        )
    lines += [f"reward: {composition}", format_plan(plan)]
    return Prepared(
        text="\n".join(lines),
        order=order,
        held_out=tuple(map(len, held_out)),
        data=digest_data(train.sets, held_out),
        model=model,
        moment=moment,
        teacher=teacher,
        adapter=plan.adapter,
        base_digest=_digest_base(config, model),
        places=tuple((one.key, one.source, one.read.indices) for one in sets[: len(train.sets)]),
        left_out=tuple(
            {
                "why": f"{tokens} tokens, more than rollout.max_prompt_tokens={longest}",
                "where": f"{one.key}: {one.source.source}, {one.source.place_of(index)}",
            }
            for one in sets
            for index, tokens in one.read.left_out
        ),
    )


def _digest_base(config: RunConfig, model: ModelConfig) -> str | None:
    """Checks the adapter to start from, if any.

    Returns:
        a digest of the files of the model, and of that adapter; None where the model trains.

    Raises:
        ConfigError: if it cannot be started from.
    """
    lora = config.learner.lora
    if lora is None:
        return None
    checked(check_first_adapter, lora, model, about="learner.lora")
    digest = checked(fingerprint, config.model.path)
    if lora.init_from is None:
        return digest
    first = pathlib.Path(lora.init_from, ADAPTER).read_bytes()
    return f"{digest} {hashlib.sha256(first).hexdigest()}"


def _load_scorers(config: RunConfig) -> None:
    allowance = Allowance.of(config.reward)
    checked(
        validate_functions, config.reward.functions, allowance=allowance, about="reward.functions"
    )
    for one in config.held_out_sets:
        if one.reward != config.reward:
            checked(
                validate_functions,
                one.reward.functions,
                allowance=allowance,
                about=f"{one.key}: scorer",
            )


def _read_teacher_config(config: RunConfig) -> ModelConfig | None:
    distillation = config.algorithm.distillation
    if distillation is None:
        return None
    return checked(read_model_config, distillation.teacher, about=_TEACHER)


def _check_teacher(config: RunConfig, model: ModelConfig) -> TeacherFiles | None:
    """Checks the files of the teacher, if there is one.

    Raises:
        ConfigError: with what is wrong with it.
    """
    distillation = config.algorithm.distillation
    if distillation is None:
        return None
    return checked(
        check_teacher,
        distillation,
        model_path=config.model.path,
        tokenizer=config.model.tokenizer,
        model=model,
        sequence_tokens=config.sequence_tokens,
        about=_TEACHER,
    )


def check_messages(data: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """Checks that the chat template shows all that a prompt consists of.

    Returns:
        what is to be noted.

    Raises:
        ValueError: naming what it leaves out.
    """
    tokenizer.template.check_arguments()
    if data.system_prompt:
        tokenizer.template.check_system_prompt(data.system_prompt)
    unknown = tokenizer.template.check_generation_prompt()
    notes = [unknown] if unknown else []
    texts = {
        "data.system_prompt": data.system_prompt or "",
        "data.question_template": data.question_template,
    }
    for key, text in texts.items():
        if spelled := tokenizer.special_tokens_in(text):
            notes.append(
                f"{key} spells {', '.join(map(repr, dict.fromkeys(spelled)))}, which reaches the "
                "model as ordinary text: special tokens come from the chat template "
                "(model.chat_template) only"
            )
    return notes


def _say_sandbox(config: RunConfig, params: Mapping[str, Any]) -> str:
    """One line on what protects this host from the code of completions.

    Raises:
        ConfigError: if the scorer is ended before its tests have had their time.
    """
    total_s, timeout_s = params.get("total_s", TOTAL_S), config.reward.timeout_s
    if total_s + CODE_STARTS_S > timeout_s:
        raise ConfigError(
            f"code_tests gives the tests of a completion total_s={total_s:g} s, but "
            f"reward.timeout_s={timeout_s:g} ends it, with an error instead of a reward for what "
            f"takes its time: set timeout_s to at least {total_s + CODE_STARTS_S:g}, or lower "
            "params.total_s"
        )
    confined = params.get("sandbox", "required") == "required" or not confinement_problem()
    return f"code_tests runs the code of completions with {describe_protections(confined)}"


def _say_workers(workers: WorkersConfig) -> str:
    text = f"{counted(workers.at_start, 'rollout worker')}"
    if (workers.min, workers.max) != (1, MOST_WORKERS):
        text += f", {workers.min} to {workers.max} ({workers.policy})"
    return text


def _describe_train(config: RunConfig, train: TrainingSet, order: DataOrder) -> list[str]:
    """One line for each training source."""
    taken = order.draws_before(config.run.steps * config.rollout.prompts_per_step)
    lines = []
    for place, (where, source) in enumerate(
        zip(train_keys(config.data), config.data.train_sources, strict=True)
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
        first = [
            f"{source.place_of(index)} with {tokens:,}"
            for index, tokens in prompts.left_out[:_SHOWN_PLACES]
        ]
        more = ", and others: see dropped.jsonl" if prompts.overlong > len(first) else ""
        text += f" ({', '.join(first)}{more})"
    return text


def _describe_held_out(config: RunConfig, one: HeldOutSet, prompts: PromptSet) -> str:
    text = _describe(config, one.key, one.source, prompts)
    text += f", {one.used_prompts(len(prompts)):,} evaluated"
    if one.name:
        text += f" by {one.scorer}, {counted(one.rules.samples_per_prompt, 'completion')} of each"
        text += f" at temperature {one.rules.temperature:g}"
    return text
