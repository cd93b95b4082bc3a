"""What of the data a run cannot use, or is probably not meant, before the run starts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from driver.config.load_config import ConfigError
from driver.config.plan import checked
from driver.config.run_config import RunConfig
from driver.config.wording import counted
from rollout_worker.config.data_config import DataConfig, SourceConfig
from rollout_worker.config.reward_config import RewardFunctionConfig
from rollout_worker.data.lazy_sequences import LazySequence, chained
from rollout_worker.data.prompts import PromptSet, count_shared
from rollout_worker.data.training_set import TrainingSet
from rollout_worker.rewards.gold_answers import find_unjudged, needs_answer
from rollout_worker.rewards.processes.reward_process import Allowance
from rollout_worker.rewards.reward_pool import ScoreRequest
from rollout_worker.rewards.scorer_trial import try_scorer
from services.trajectories.data_order import DataOrder

_SHOWN_GOLDS = 3
_SHOWN_CHARACTERS = 40
_NO_ANSWER = "I do not know."
_TRIAL_S = 30.0
"""Bound on a call of a scorer in its trial: a server that is not up yet holds up no start."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgedSet:
    """Prompts that were read, and the functions that score them."""

    key: str
    """How messages name it."""
    source: SourceConfig
    read: PromptSet
    functions: tuple[RewardFunctionConfig, ...]


def judged_sets(
    config: RunConfig, train: TrainingSet, held_out: Sequence[PromptSet]
) -> list[JudgedSet]:
    """Those of training, then the held-out ones."""
    keys, sources = train_keys(config.data), config.data.train_sources
    functions = config.reward.functions
    return [
        JudgedSet(key=key, source=source, read=read, functions=functions)
        for key, source, read in zip(keys, sources, train.sets, strict=True)
    ] + [
        JudgedSet(key=one.key, source=one.source, read=read, functions=one.reward.functions)
        for one, read in zip(config.held_out_sets, held_out, strict=True)
    ]


def check_golds(config: RunConfig, sets: Sequence[JudgedSet]) -> list[str]:
    """Finds gold answers that a scorer cannot judge.

    Returns:
        what is to be noted, where a part of a set cannot be judged.

    Raises:
        ConfigError: where all of a set cannot be judged.
    """
    for one in sets:
        _check_answered(one)
    notes = []
    different: list[tuple[str, dict[str, Any]]] = []
    for function in (function for one in sets for function in one.functions):
        scorer = (function.name, function.params)
        if scorer in different:
            continue
        different.append(scorer)
        judged = [
            one for one in sets if scorer in [(each.name, each.params) for each in one.functions]
        ]
        notes += _unjudged(config, function, judged)
    return notes


def try_scorers(config: RunConfig, sets: Sequence[JudgedSet]) -> list[str]:
    """Tries scorers of the user on the first prompt that each scores: with its answer as a
    completion, and with one that is no answer.

    Not of a run that goes on: it has scored with them.

    Returns:
        what is to be noted, where a scorer failed for both.

    Raises:
        ConfigError: where what it returned is no reward.
    """
    notes = []
    tried: list[tuple[str, dict[str, Any]]] = []
    for one in sets if not config.run.resume else ():
        for function in one.functions:
            if (function.name, function.params) in tried or not one.read.prompts:
                continue
            tried.append((function.name, function.params))
            prompt = one.read.prompts[0]
            texts = (prompt.answer or _NO_ANSWER, _NO_ANSWER)
            place = one.source.place_of(prompt.prompt_id - one.read.first_id)
            about = f"{function.name}, tried on {one.key}, {place}"
            failed = checked(
                try_scorer,
                function,
                [ScoreRequest(text, prompt.answer, prompt.question, prompt.item) for text in texts],
                timeout_s=min(config.reward.timeout_s, _TRIAL_S),
                allowance=Allowance.of(config.reward),
                about=about,
            )
            if failed:
                notes.append(
                    f"{about}: it failed for {texts[0][-_SHOWN_CHARACTERS:]!r} and for "
                    f"{_NO_ANSWER!r}: {failed}. A completion for which it fails has no reward and "
                    "does not train"
                )
    return notes


def _unjudged(
    config: RunConfig, function: RewardFunctionConfig, sets: Sequence[JudgedSet]
) -> list[str]:
    """The same for one function and the sets that it scores."""
    prompts = chained([one.read.prompts for one in sets])

    def gold(index: int) -> ScoreRequest:
        prompt = prompts[index]
        return ScoreRequest("", prompt.answer, prompt.question, prompt.item)

    reasons = checked(
        find_unjudged,
        function.name,
        LazySequence(len(prompts), gold),
        timeout_s=config.reward.timeout_s,
        params=function.params,
        allowance=Allowance.of(config.reward),
        about="reward.functions",
    )
    notes, start = [], 0
    for one in sets:
        indices = range(start, start + len(one.read))
        start += len(one.read)
        found = [index for index in indices if index in reasons]
        if not found:
            continue
        named = [
            f"{one.source.place_of(prompts[index].prompt_id - one.read.first_id)}, answer "
            f"{prompts[index].answer[-_SHOWN_CHARACTERS:]!r}: {reasons[index]}"
            for index in found[:_SHOWN_GOLDS]
        ]
        if len(found) > _SHOWN_GOLDS:
            named.append(f"and {len(found) - _SHOWN_GOLDS:,} more")
        text = (
            f"{one.key}: {function.name} cannot judge {len(found):,} of {len(indices):,} "
            f"gold answers of {one.source.source}, so that their completions get no reward but an "
            f"error: {'; '.join(named)}"
        )
        if len(found) == len(indices):
            raise ConfigError(f"{text}. Choose another scorer, or correct answer_field or file")
        notes.append(text)
    return notes


def _check_answered(one: JudgedSet) -> None:
    """Checks that records have an answer where a scorer needs one.

    Raises:
        ConfigError: naming the scorer and the first record without one.
    """
    source, read = one.source, one.read
    needing = [function.name for function in one.functions if needs_answer(function.name)]
    if not needing or read.procedural or not read.unanswered:
        return
    first = next(prompt for prompt in read.prompts if not prompt.answer)
    place = source.place_of(first.prompt_id - read.first_id)
    raise ConfigError(
        f"{one.key}: {', '.join(needing)} needs an answer, but {read.unanswered:,} of "
        f"{len(read):,} records of {source.source} have none, the first in {place} with the fields "
        f"{sorted(first.item)}: set the source's answer_field, add the answers, or choose "
        "scorers that need none"
    )


def chat_notes(config: RunConfig, sets: Sequence[tuple[str, PromptSet]]) -> list[str]:
    """What of the configuration does not apply to records that bring messages."""
    notes, data = [], config.data
    for where, read in sets:
        if read.with_system and data.system_prompt is not None:
            notes.append(
                f"{where}: {read.with_system:,} of {counted(len(read), 'prompt')} have a system "
                "message of their own, which takes the place of data.system_prompt"
            )
        if read.chats and data.question_template != "{question}":
            notes.append(
                f"{where}: {read.chats:,} of {counted(len(read), 'prompt')} are messages, to which "
                "data.question_template does not apply"
            )
    return notes


def overlap_notes(data: DataConfig, train: TrainingSet) -> list[str]:
    """What is in several training sources at once."""
    notes, keys = [], train_keys(data)
    for last, read in enumerate(train.sets):
        for first, before in enumerate(train.sets[:last]):
            if shared := count_shared(before, read):
                notes.append(
                    f"{keys[last]}: {shared:,} of {counted(len(read), 'prompt')} have a question "
                    f"of {keys[first]}, and are drawn by the weights of both sources: remove them "
                    "from one, or keep the sources apart by skip and size"
                )
    return notes


def curriculum_notes(config: RunConfig, train: TrainingSet, order: DataOrder) -> list[str]:
    """Whether the run is too short for its curriculum to skip anything."""
    curriculum = config.data.curriculum
    if curriculum is None:
        return []
    taken = order.draws_before(config.run.steps * config.rollout.prompts_per_step)
    epochs = max(drawn / len(read) for drawn, read in zip(taken, train.sets, strict=True))
    if epochs > curriculum.skip_after:
        return []
    return [
        f"data.curriculum skips a prompt after skip_after={curriculum.skip_after} groups of equal "
        f"rewards, but the run has {epochs:.2f} epochs at most of a source, so that it skips "
        "nothing: raise run.steps, or lower skip_after"
    ]


def train_keys(data: DataConfig) -> list[str]:
    """How messages name each training source."""
    if not isinstance(data.train, tuple):
        return ["data.train"]
    return [f"data.train.{place} ({name})" for place, name in enumerate(data.train_names)]
