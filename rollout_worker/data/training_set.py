"""The prompts that a run trains on and those held out: of every source, one after the other."""

import dataclasses
import functools
from collections.abc import Sequence, Sized

from rollout_worker.config.data_config import DataConfig, SourceConfig
from rollout_worker.data.lazy_sequences import chained
from rollout_worker.data.prompts import ChatTokenizer, Prompt, PromptSet, load_prompts
from services.trajectories.data_order import DataOrder, OrderedSource


@dataclasses.dataclass(frozen=True)
class TrainingSet:
    """The prompts of all training sources."""

    sets: tuple[PromptSet, ...]
    """Of each source; the ids of a later one go on where those of the one before end."""

    @functools.cached_property
    def prompts(self) -> Sequence[Prompt]:
        """Of all sources, in the order that `DataOrder` counts positions in."""
        return chained([one.prompts for one in self.sets])

    def __len__(self) -> int:
        return len(self.prompts)


def load_training(
    data: DataConfig, *, tokenizer: ChatTokenizer, max_prompt_tokens: int
) -> TrainingSet:
    """Reads every training source and encodes its prompts.

    Raises:
        ValueError: as `load_prompts`, naming the source.
    """
    read = [
        _load_source(source, data, tokenizer=tokenizer, max_prompt_tokens=max_prompt_tokens)
        for source in data.train_sources
    ]
    return TrainingSet(_joined(read, data.train_names))


def load_held_out(
    data: DataConfig, *, tokenizer: ChatTokenizer, max_prompt_tokens: int
) -> tuple[PromptSet, ...]:
    """Reads every held-out set and encodes its prompts.

    Raises:
        ValueError: as `load_prompts`, naming the set.
    """
    read = []
    for source, key in zip(data.eval_sources, data.eval_keys, strict=True):
        try:
            read.append(
                _load_source(source, data, tokenizer=tokenizer, max_prompt_tokens=max_prompt_tokens)
            )
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
    return _joined(read, data.eval_names)


def _load_source(
    source: SourceConfig, data: DataConfig, *, tokenizer: ChatTokenizer, max_prompt_tokens: int
) -> PromptSet:
    """Reads one source by the rules of the whole section; raises as `load_prompts`."""
    return load_prompts(
        source,
        tokenizer=tokenizer,
        system_prompt=data.system_prompt,
        question_template=data.question_template,
        max_prompt_tokens=max_prompt_tokens,
    )


def _joined(read: Sequence[PromptSet], names: Sequence[str]) -> tuple[PromptSet, ...]:
    """The prompts of all sources, with ids and names by which they differ if there are several."""
    if len(read) < 2:
        return tuple(read)
    joined: list[PromptSet] = []
    for one, name in zip(read, names, strict=True):
        joined.append(one.as_part(name, first_id=joined[-1].next_id if joined else 0))
    return tuple(joined)


def order_of(data: DataConfig, sets: Sequence[Sized], *, seed: int) -> DataOrder:
    """The order in which a run takes what it trains on.

    Args:
        sets: the prompts, or examples, of each source.
    """
    return DataOrder(
        seed,
        tuple(
            OrderedSource(name=name, count=len(read), weight=weight)
            for name, weight, read in zip(data.train_names, data.train_weights, sets, strict=True)
        ),
    )
