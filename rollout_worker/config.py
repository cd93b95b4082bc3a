"""What a rollout worker needs: prompts (`data`), decoding (`rollout`) and scoring (`reward`)."""

import math
import posixpath
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_serializer,
    model_validator,
)

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


class DecodeConfig(Section):
    """The decode engine of each worker; its slow settings are there for honest A/B runs."""

    loop: Literal["while", "python"] = "while"
    """`python` has the host look at every token."""
    attention: Literal["auto", "bf16", "f32", "pallas"] = "auto"
    """Of a new token over the cache: XLA with operands in bfloat16 or float32, or the Pallas
    kernel, with operands in compute_dtype. `auto` is the kernel on a TPU where it takes the head
    size, else XLA in compute_dtype, on a CPU in float32. Scores, softmax and sums are float32 in
    all of them."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of activations and matrix products."""
    slots: int = Field(default=64, ge=1, le=65_536)
    """Completions decoded at once by a worker, over all its devices; a slot whose completion has
    ended takes the next one."""
    tensor: int = Field(default=1, ge=1, le=4096)
    """Devices over which one copy of the model is sharded. A worker has devices / tensor such
    copies, its lanes, and the slots are divided among them."""
    segment_tokens: int = Field(default=64, ge=1, le=4096)
    """Most tokens that are drawn in a slot before the host receives them."""
    prefill_tokens: int = Field(default=512, ge=32, le=2**20)
    """Prompt tokens of one prefill call of a lane, padding included: a longer prompt takes
    several, and decoding goes on between them."""
    prefixes: int | None = Field(default=None, ge=1, le=65_536)
    """Prompts that are kept prefilled while their completions wait for a slot, over all devices;
    null derives half of the slots."""
    cache_tokens: int | None = Field(default=None, ge=1, le=2**24)
    """KV columns of a slot at most; null derives max_prompt_tokens + max_completion_tokens."""
    invariant: bool = False
    """Keeps the cache as wide as it may become, so that the behaviour logprobs of a completion
    are the same to the last bit whatever else its worker decodes. Caches of up to 384 columns and
    those of the Pallas kernel have one width anyway; a wider one costs attention over all its
    columns in every token step."""
    compile_budget: int | None = Field(default=None, ge=1, le=100_000)
    """Programs that a worker may compile; null derives the number that the sizes can need."""
    over_budget: Literal["warn", "error"] = "warn"
    """Whether one program more is a warning or an error."""


MOST_STOP_STRINGS = 64
MOST_STOP_CHARACTERS = 256


MOST_WORKERS = 4096
MOST_STALENESS = 64


class WorkersConfig(Section):
    """The number of rollout workers, and whether it changes during the run.

    A plain number n is short for n at the start, and any number from 1 to 4096 by
    `python -m driver.scale`.
    """

    plain: ClassVar[type] = int
    """Type that is accepted instead of the keys."""

    min: int = Field(ge=1, le=MOST_WORKERS)
    """Fewest workers."""
    max: int = Field(ge=1, le=MOST_WORKERS)
    """Most workers."""
    policy: Literal["fixed", "balance"] = "fixed"
    """`fixed`: only a person changes the number. `balance`: a worker is added while the learner
    waits for groups, and one is drained while the workers wait for the learner."""
    start: int | None = Field(default=None, ge=1, le=MOST_WORKERS)
    """Workers that the run starts with; null is min."""

    @property
    def at_start(self) -> int:
        """Workers that the run starts with."""
        return self.min if self.start is None else self.start

    @model_validator(mode="before")
    @classmethod
    def _from_plain(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        if value < 1:
            raise ValueError(f"{value} must be at least 1")
        if value > MOST_WORKERS:
            raise ValueError(f"{value} must be at most {MOST_WORKERS}")
        return {"min": 1, "max": MOST_WORKERS, "start": value}

    @model_validator(mode="after")
    def _check(self):
        if self.min > self.max:
            raise ValueError(
                f"min={self.min} is above max={self.max}: lower one or raise the other"
            )
        if not self.min <= self.at_start <= self.max:
            raise ValueError(
                f"start={self.start} must lie between min={self.min} and max={self.max}"
            )
        return self

    @model_serializer(mode="wrap")
    def _to_plain(self, serialise) -> int | dict[str, Any]:
        """A plain number if it is equivalent, so that a section is written as it was read."""
        if self == WorkersConfig.model_validate(self.at_start):
            return self.at_start
        return serialise(self)


class RolloutConfig(Section):
    """How prompts become groups of completions."""

    workers: WorkersConfig = WorkersConfig(min=1, max=MOST_WORKERS, start=2)
    prompts_per_step: int = Field(default=16, ge=1, le=1_000_000)
    """Groups of one training step."""
    completions_per_prompt: int = Field(default=8, ge=1, le=65_536)
    """The group. One completion has no other to be compared with: only `algorithm.advantage` `gae`
    and `batch_norm` train on it."""
    max_prompt_tokens: int = Field(default=512, ge=1, le=2**23)
    """Longer prompts are left out of the data."""
    max_completion_tokens: int = Field(default=1024, ge=1, le=2**23)
    """A completion ends here at the latest, with finish reason `length`."""
    temperature: float = Field(default=1.0, ge=0.01, le=100)
    """Of the sampled distribution; behaviour logprobs and the loss use the same."""
    max_staleness: int = Field(default=0, ge=0, le=MOST_STALENESS)
    """Oldest policy version trained on, in versions behind the current one. 0 is synchronous: the
    workers wait while the learner updates. Above it both work at once, and at most
    (max_staleness + 1) * prompts_per_step groups are under way, in the workers or waiting to be
    trained on. A group that is dropped, as for equal rewards under zero_variance=resample, gives
    its place to the next prompt."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion once it contains one, beside the stop tokens; it keeps them. A
    special token counts as the text that its vocabulary has for it."""
    decode: DecodeConfig = DecodeConfig()

    @property
    def completions_per_step(self) -> int:
        """Completions of one training step."""
        return self.prompts_per_step * self.completions_per_prompt

    @property
    def cache_tokens(self) -> int:
        """KV columns of a slot at most."""
        return self.decode.cache_tokens or self.max_prompt_tokens + self.max_completion_tokens

    @model_validator(mode="after")
    def _check(self):
        needed = self.max_prompt_tokens + self.max_completion_tokens
        if needed > self.cache_tokens:
            raise ValueError(
                f"max_prompt_tokens={self.max_prompt_tokens} + max_completion_tokens="
                f"{self.max_completion_tokens} = {needed} positions, but the KV cache holds "
                f"decode.cache_tokens={self.cache_tokens}: raise it or lower one of the two"
            )
        return self

    @model_validator(mode="after")
    def _check_stop_strings(self):
        if len(self.stop_strings) > MOST_STOP_STRINGS:
            raise ValueError(
                f"stop_strings has {len(self.stop_strings)} texts, at most {MOST_STOP_STRINGS} "
                "are watched for: give fewer"
            )
        for text in self.stop_strings:
            if not 1 <= len(text) <= MOST_STOP_CHARACTERS:
                raise ValueError(
                    f"stop_strings holds {text[:20]!r} of {len(text)} characters: each must have "
                    f"between 1 and {MOST_STOP_CHARACTERS}"
                )
        return self


class RewardFunctionConfig(Section):
    """One scorer and its weight in the total."""

    name: str
    """`gsm8k_answer`, `math_verify`, `exact`, `regex`, `multiple_choice`, `json_schema`, `format`,
    `reasoning_gym`, `code_tests`, `judge`, or `package.module:function`. With an environment it is
    `environment`, the sum of the rewards of its steps, and no other."""
    weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Factor of this reward in the total; 0 only logs it."""
    gate: float | None = Field(default=None, ge=-1e6, le=1e6)
    """Makes this function a gate, which is open from this reward on: where it is closed, the
    functions without a gate count in the total as if their reward was 0. A gate counts with its own
    reward and weight."""
    params: dict[str, Any] = Field(default={})
    """Keyword arguments of the scorer."""


class BudgetConfig(Section):
    """What `judge` may spend in the whole run, all workers and resumes together.

    Once one of these is reached, it is asked no more: each completion gets an error instead, and
    what is under way then, of a few seconds with several workers, is still paid for.
    """

    cost: float | None = Field(default=None, gt=0, le=1e12)
    """In the currency of its `prompt_price` and `completion_price`."""
    tokens: int | None = Field(default=None, ge=1, le=10**15)
    """Of its prompts and answers."""
    requests: int | None = Field(default=None, ge=1, le=10**12)
    """Those that are repeated after a failure included."""

    @property
    def bounded(self) -> bool:
        """Whether there is a bound."""
        return (self.cost, self.tokens, self.requests) != (None, None, None)


class RewardConfig(Section):
    """The scorers, and the bounds on the child processes that run them."""

    functions: tuple[RewardFunctionConfig, ...] = (RewardFunctionConfig(name="gsm8k_answer"),)
    combine: Literal["sum", "product"] = "sum"
    """The total of a completion is the sum, or the product, of its rewards, each with its
    weight."""
    timeout_s: float = Field(default=5.0, ge=0.01, le=3600)
    """Wall-clock bound of one completion's scoring, and of a group's by group scorers. Past it a
    plain scorer's process is killed, and an async call is cancelled."""
    processes: int = Field(default=1, ge=1, le=1024)
    """Child processes of each rollout worker. Where some scorers are async and some are not, each
    kind has as many."""
    in_flight: int = Field(default=32, ge=1, le=4096)
    """Completions, or groups, that async scorers have under way at once in a child process. A plain
    scorer has one."""
    memory_gb: float | None = Field(default=None, ge=0.5, le=1e6)
    """Memory of one child process, in GiB: a scorer that takes more fails, and nothing else. Each
    process that it starts has as much. null takes a quarter of the host's memory, at most 16."""
    environment: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...] = ()
    """Names of environment variables that scorers get beside the usual ones (PATH, HOME, LANG,
    TMPDIR, proxies, caches), such as OPENAI_API_KEY: they are foreign code, and no other variable
    reaches them."""
    budget: BudgetConfig = BudgetConfig()

    @model_validator(mode="after")
    def _check(self):
        names = [function.name for function in self.functions]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"reward.functions needs one or more different names, got {names}")
        if not any(function.weight for function in self.functions):
            raise ValueError(
                "the weights of reward.functions are all 0, so there is nothing to learn from: "
                "give at least one another weight"
            )
        gates = [function.name for function in self.functions if function.gate is not None]
        if gates and not any(one.weight for one in self.functions if one.gate is None):
            raise ValueError(
                f"reward.functions has the gates {gates}, but no other function with a weight for "
                "them to hold back: add one, or remove gate"
            )
        return self


class EnvironmentConfig(Section):
    """An environment that answers the model, turn by turn (docs/environments.md).

    An episode is what follows a prompt: turns of the model, which train, and answers of the
    environment, which do not. Its processes are as many as `reward.processes`, each with
    `reward.in_flight` calls at once, and `reward.environment` names variables that they get.
    """

    name: str
    """A class: `package.module:Class`, or a file, as
    `deploy/demo/guessing.py:Guessing`."""
    params: dict[str, Any] = Field(default={})
    """Keyword arguments of the class."""
    max_turns: int = Field(default=8, ge=1, le=1000)
    """Turns of the model. An episode that the environment has not ended by then counts as
    truncated, as one does whose tokens, those of the environment included, reach
    rollout.max_completion_tokens."""
    timeout_s: float = Field(default=10.0, ge=0.01, le=3600)
    """Wall-clock bound of one reset or step. Past it the call is cancelled, or its process killed,
    and the episode ends with an `environment_error`."""
    memory_gb: float | None = Field(default=None, ge=0.5, le=1e6)
    """Memory of one child process, in GiB, as `reward.memory_gb`."""
    history: Literal["as_rendered", "keep"] = "as_rendered"
    """What a turn continues where the chat template writes earlier turns of the assistant in
    another way than they were sampled, such as without their reasoning. `as_rendered` refuses
    such a template before the run starts; `keep` goes on from exactly the tokens that were
    sampled."""


ENVIRONMENT_REWARD = "environment"
"""In reward.functions: the reward of an episode, the sum of those of its steps."""


def held_out_reward(source: SourceConfig, reward: RewardConfig) -> RewardConfig:
    """The scorers of a held-out set, and the bounds on their processes.

    Args:
        reward: of the run. A set without a scorer of its own is scored as training is.
    """
    if not isinstance(source, EvalSource) or source.scorer is None:
        return reward
    params = source.scorer_params or next(
        (one.params for one in reward.functions if one.name == source.scorer), {}
    )
    function = RewardFunctionConfig(name=source.scorer, params=params)
    return reward.model_copy(update={"functions": (function,), "combine": "sum"})
