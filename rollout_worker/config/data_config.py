"""Which prompts a run trains on and is evaluated on, and how they become chat messages."""

import math
import posixpath
import re
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from rollout_worker.data.procedural import MAX_ITEMS, PREFIX
from services.process.config_section import Section


class SourceConfig(Section):
    """One set of prompts."""

    source: str
    """`reasoning_gym:<task>`, a path ending in .jsonl or .parquet, an HF dataset id, or a folder
    with an HF dataset: files of its splits, or what `save_to_disk` wrote. It may be larger than
    memory: each process reads it once, row by row, and keeps what it has encoded in a file in the
    folder for temporary files (TMPDIR)."""
    split: str = "train"
    """Split of an HF dataset; other sources ignore it."""
    subset: str | None = None
    """Configuration name of an HF dataset, such as `main` of openai/gsm8k."""
    streaming: bool = False
    """Rows of an HF dataset are fetched as they are read, without a download of the whole split; it
    needs `size`. The rows, their order and what a resume compares are those without it."""
    size: int | None = Field(default=None, ge=1, le=10**9)
    """At most this many items; required for reasoning_gym, which has no end."""
    skip: int = Field(default=0, ge=0, le=10**9)
    """Items left out at the start of the source, to keep it apart from another split."""
    seed: int = Field(default=0, ge=0)
    """Seed of a reasoning_gym task; other sources ignore it."""
    params: dict[str, Any] = Field(default={})
    """Parameters of a reasoning_gym task, such as `{min_terms: 2}`."""
    question_field: str | None = None
    """Field of an item that holds the question, as text or as a list of messages; null takes the
    first of `question`, `prompt` and `messages` that is there."""
    answer_field: str | None = None
    """Field of an item that holds the reference answer. null takes the first of `answer`,
    `solution` and `reward_model.ground_truth` that is not empty, and none is needed where no scorer
    reads it."""

    @property
    def suggested_name(self) -> str:
        """The task, or the last part of path or id, with the characters that a name may have."""
        last = self.source.removeprefix(PREFIX).rstrip("/").rpartition("/")[2]
        if not self.is_procedural:
            last = last.removesuffix(".jsonl").removesuffix(".parquet")
        return re.sub(r"[^A-Za-z0-9._-]", "-", last) or "source"

    @property
    def is_procedural(self) -> bool:
        """Whether a reasoning_gym task makes the items."""
        return self.source.startswith(PREFIX)

    @property
    def is_dataset(self) -> bool:
        """Whether the library `datasets` reads it."""
        return not self.is_procedural and not self.source.endswith((".jsonl", ".parquet"))

    def place_of(self, index: int) -> str:
        """How messages name the record with this index, such as `line 3`."""
        if self.is_procedural:
            return f"item {index}"
        return f"line {index + 1}" if self.source.endswith(".jsonl") else f"row {index}"

    @model_validator(mode="after")
    def _check(self):
        if self.params and not self.is_procedural:
            raise ValueError(
                f"params={self.params} belong to a {PREFIX}<task> source, but source is "
                f"{self.source!r}: remove params"
            )
        if self.streaming and not self.is_dataset:
            raise ValueError(
                f"streaming=true is for HF datasets, but source is {self.source!r}, which is read "
                "item by item anyway: remove streaming"
            )
        if self.streaming and self.size is None:
            raise ValueError(
                f"streaming=true of {self.source} needs size: an epoch is a shuffle of all prompts "
                "of a source, so that their number has to be known when a run starts, and a stream "
                "has no length: set size to the number of rows to train on"
            )
        last = self.skip + (self.size or 0)
        if self.is_procedural and last > MAX_ITEMS:
            raise ValueError(
                f"skip + size = {last} items of {self.source}, but at most {MAX_ITEMS} are made, "
                "since all prompts are loaded at the start: lower size or skip"
            )
        return self


class MixedSource(SourceConfig):
    """One of several training sources."""

    weight: float = Field(default=1.0, allow_inf_nan=True)
    """Its share of the prompts that are drawn, relative to the weights of the other sources."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+$")
    """In logs and metrics; null takes the task, or the last part of path or id."""

    @property
    def label(self) -> str:
        """The name, or the one that the source suggests."""
        return self.name or self.suggested_name

    @field_validator("weight")
    @classmethod
    def _check_weight(cls, weight: float) -> float:
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(
                f"a weight must be a finite number above 0, got {weight}: correct it, or remove "
                "the source"
            )
        return weight

    @property
    def content(self) -> tuple:
        """What decides the records: equal for two sources that are the same."""
        read = self.model_dump(exclude={"weight", "name", "source", "streaming"})
        ignored = ("split", "subset") if self.is_procedural else ("seed", "params")
        is_file = not self.is_procedural and not self.is_dataset
        for key in (*ignored, "split", "subset") if is_file else ignored:
            del read[key]
        source = posixpath.normpath(self.source) if is_file else self.source
        return (source, *(repr(value) for value in read.values()))


class EvalSource(SourceConfig):
    """One of several held-out sets. A key that is null here is as in `eval`."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+$")
    """In logs and in the names of metrics; null takes the task, or the last part of path or id."""
    scorer: str | None = None
    """A scorer, as `reward.functions.name`: its reward decides what is right, and no other scorer
    runs on this set. null takes reward.functions, of which the first decides."""
    scorer_params: dict[str, Any] = Field(default={})
    """Keyword arguments of that scorer; none takes those that it has in reward.functions."""
    samples_per_prompt: int | None = Field(default=None, ge=1, le=65_536)
    """Completions of each prompt."""
    temperature: float | None = Field(default=None, ge=0, le=100)
    """0 is greedy."""
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    """Only the k most likely tokens are drawn; 0 is off."""
    top_p: float | None = Field(default=None, ge=1e-9, le=1)
    """Only the most likely tokens that together have this probability; 1 is off."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Only tokens at least this fraction as likely as the most likely one; 0 is off."""
    pass_k: tuple[int, ...] | None = None
    """Values of k for which pass@k is reported."""
    correct_from: float | None = Field(default=None, allow_inf_nan=False)
    """The reward from which a completion is right."""

    OF_EVAL: ClassVar = (
        *("samples_per_prompt", "temperature", "top_k", "top_p", "min_p"),
        *("pass_k", "correct_from"),
    )
    """Keys that stand in `eval` too."""

    @property
    def label(self) -> str:
        """The name, or the one that the source suggests."""
        return self.name or self.suggested_name

    @property
    def own_rules(self) -> dict[str, Any]:
        """What it sets of the keys of `eval`."""
        found = {key: getattr(self, key) for key in self.OF_EVAL}
        return {key: value for key, value in found.items() if value is not None}

    @model_validator(mode="after")
    def _check_scorer(self):
        if self.scorer_params and self.scorer is None:
            raise ValueError(
                f"scorer_params={self.scorer_params} need scorer, the name of the function that "
                "gets them: set it, or remove scorer_params"
            )
        return self


TAKEN_NAMES = ("accuracy", "paired", "reward")

"""Second parts of the names of metrics of evaluations."""


def _one_or_several(value: Any) -> str:
    if value is None:
        return "[none]"
    return "[several]" if isinstance(value, list | tuple) else "[one]"


class CurriculumConfig(Section):
    """Skips training prompts for a while whose groups had equal rewards: what is always right, or
    always wrong, teaches nothing. curriculum.jsonl of the run's folder records what is skipped.
    """

    skip_after: int = Field(default=2, ge=1, le=1000)
    """Groups of equal rewards in a row after which a prompt is skipped."""
    epochs: int = Field(default=1, ge=1, le=1000)
    """Epochs of its source for which it is skipped. Then one group of it is made; if its rewards
    are equal again, it is skipped again."""
    most: float = Field(default=0.5, gt=0, lt=1)
    """Largest share of the prompts of a source that are skipped at a time."""


class DataConfig(Section):
    """Which prompts, and how they become chat messages."""

    train: Annotated[
        Annotated[SourceConfig, Tag("[one]")]
        | Annotated[tuple[MixedSource, ...], Tag("[several]")],
        Discriminator(_one_or_several),
    ]
    """One source, or a list of them to mix by weight. At every index of the run each has given its
    share of the prompts so far, give or take 1.7; its own come without repetition in each of its
    epochs. Weights may not change over a resume."""
    eval: Annotated[
        Annotated[SourceConfig, Tag("[one]")]
        | Annotated[tuple[EvalSource, ...], Tag("[several]")]
        | Annotated[None, Tag("[none]")],
        Discriminator(_one_or_several),
    ] = None
    """The held-out prompts: one set, or a list of sets, each with its name, scorer and sampling."""
    curriculum: CurriculumConfig | None = None
    system_prompt: str | None = None
    """First message of every prompt that does not bring a system message of its own; null sends
    none."""
    question_template: str = "{question}"
    """Text of the user message where the question is text; `{question}` is replaced. Messages stay
    as they are."""

    template_args: dict[str, Any] = Field(default={})
    """Arguments of the chat template, such as `{enable_thinking: false}`. One that it does not read
    is an error."""
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the functions that the chat template offers, such as `{type: function,
    function: {name: add, parameters: {...}}}`; a row of messages may bring other `tools`."""

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, tools: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        for place, tool in enumerate(tools):
            function = tool.get("function", tool)
            name = function.get("name") if isinstance(function, dict) else None
            if not (isinstance(name, str) and name.strip()):
                raise ValueError(
                    f"tool {place} is {str(tool)[:80]}, which names no function, so that the model "
                    "could not call it: write {type: function, function: {name: add, parameters: "
                    "{...}}}, or remove it"
                )
        return tools

    @property
    def train_sources(self) -> tuple[SourceConfig, ...]:
        """The training sources, in the order of their prompts."""
        return self.train if isinstance(self.train, tuple) else (self.train,)

    @property
    def train_weights(self) -> tuple[float, ...]:
        """Of each training source."""
        return tuple(o.weight if isinstance(o, MixedSource) else 1.0 for o in self.train_sources)

    @property
    def train_names(self) -> tuple[str, ...]:
        """Of each training source, all different."""
        return tuple(o.label if isinstance(o, MixedSource) else "train" for o in self.train_sources)

    @property
    def eval_sources(self) -> tuple[SourceConfig, ...]:
        """The held-out sets, in the order of their prompts; none without data.eval."""
        if self.eval is None:
            return ()
        return self.eval if isinstance(self.eval, tuple) else (self.eval,)

    @property
    def eval_names(self) -> tuple[str, ...]:
        """Of each held-out set, all different; empty for a set that is no list."""
        return tuple(o.label if isinstance(o, EvalSource) else "" for o in self.eval_sources)

    @property
    def eval_keys(self) -> tuple[str, ...]:
        """How messages name each held-out set."""
        if not isinstance(self.eval, tuple):
            return ("data.eval",) if self.eval else ()
        return tuple(f"data.eval.{place} ({name})" for place, name in enumerate(self.eval_names))

    @model_validator(mode="after")
    def _check_mixture(self):
        if not isinstance(self.train, tuple):
            return self
        if not self.train:
            raise ValueError("train=[] has no source: give at least one")
        for last, source in enumerate(self.train):
            for first, before in enumerate(self.train[:last]):
                both = f"train.{first} and train.{last}"
                if source.content == before.content:
                    raise ValueError(
                        f"{both} are the same source {source.source}: keep one of them, with the "
                        f"weight {before.weight + source.weight:g}"
                    )
                if source.label == before.label:
                    raise ValueError(
                        f"{both} are both called {source.label!r} in logs and metrics: give one "
                        "of them another `name`"
                    )
        return self

    @model_validator(mode="after")
    def _check_eval(self):
        if not isinstance(self.eval, tuple):
            return self
        if not self.eval:
            raise ValueError("eval=[] has no set: give at least one, or null for none")
        for last, name in enumerate(self.eval_names):
            if name in TAKEN_NAMES:
                raise ValueError(
                    f"eval.{last} is called {name!r}, which names metrics of eval/ already: give "
                    "it another `name`"
                )
            if name in self.eval_names[:last]:
                raise ValueError(
                    f"eval.{self.eval_names.index(name)} and eval.{last} are both called {name!r} "
                    "in logs and metrics: give one of them another `name`"
                )
        return self

    @model_validator(mode="after")
    def _check(self):
        if "{question}" not in self.question_template:
            raise ValueError(
                f"question_template must contain {{question}}, got {self.question_template!r}"
            )
        return self
