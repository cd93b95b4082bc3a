"""The prompts that a run trains on: those of every source, one source after the other."""

import dataclasses
import functools

from rollout_worker.config import DataConfig, SourceConfig
from rollout_worker.data.prompts import ChatTokenizer, Prompt, PromptSet, load_prompts
from services.trajectories.data_order import DataOrder, OrderedSource


@dataclasses.dataclass(frozen=True)
class TrainingSet:
    """The prompts of all training sources."""

    sets: tuple[PromptSet, ...]
    """Of each source; the ids of a later one go on where those of the one before end."""

    @functools.cached_property
    def prompts(self) -> tuple[Prompt, ...]:
        """Of all sources, in the order that `DataOrder` counts positions in."""
        return tuple(prompt for one in self.sets for prompt in one.prompts)

    def __len__(self) -> int:
        return len(self.prompts)


def load_training(
    data: DataConfig, *, tokenizer: ChatTokenizer, max_prompt_tokens: int
) -> TrainingSet:
    """Reads every training source and encodes its prompts.

    Raises:
        ValueError: as `load_prompts`, naming the source.
    """
    sets: list[PromptSet] = []
    for source, name in zip(data.train_sources, data.train_names, strict=True):
        read = load_source(source, data, tokenizer=tokenizer, max_prompt_tokens=max_prompt_tokens)
        if len(data.train_sources) > 1:
            read = _as_part(read, name, first_id=sets[-1].next_id if sets else 0)
        sets.append(read)
    return TrainingSet(tuple(sets))


def load_source(
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


def _as_part(read: PromptSet, name: str, *, first_id: int) -> PromptSet:
    """The prompts of a source as those of one among several."""
    prompts = tuple(
        dataclasses.replace(prompt, prompt_id=first_id + prompt.prompt_id, source=name)
        for prompt in read.prompts
    )
    return dataclasses.replace(
        read, prompts=prompts, first_id=first_id, next_id=first_id + read.next_id
    )


def order_of(data: DataConfig, train: TrainingSet, *, seed: int) -> DataOrder:
    """The order in which a run takes these prompts."""
    return DataOrder(
        seed,
        tuple(
            OrderedSource(name=name, count=len(read), weight=weight)
            for name, weight, read in zip(
                data.train_names, data.train_weights, train.sets, strict=True
            )
        ),
    )
