"""How completions are sampled, by how many workers, and the engine of each."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_serializer, model_validator

from services.process.config_section import Section


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
    parked: int | None = Field(default=None, ge=0, le=65_536)
    """Episodes whose keys and values are kept from turn to turn, over all devices, so that a turn
    prefills its new tokens only. Each takes the memory of a slot. With fewer than a worker has
    begun, the oldest whose environment has not answered are given up for others, and prefilled anew
    at their next turn: that draws the same tokens, within rounding, so that logprobs depend in
    their last bits on how fast environments answer. null derives one for each episode that a worker
    may hold, 0 prefills every turn anew. Without an environment there are none."""
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
    held_per_slot: float = Field(default=1.25, ge=1, le=64)
    """Completions that a worker holds for each of its decode slots; at least one group more than
    fills them. Those beyond wait for a slot or, in episodes of several turns, for their
    environments: 1 + environment seconds / model seconds of a turn keep the slots busy."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion once it contains one, beside the stop tokens; it keeps them. A
    special token counts as the text that its vocabulary has for it."""
    ignore_stop_tokens: bool = False
    """Stop tokens are tokens like any other, and a completion goes on until max_completion_tokens
    or a stop string, in evaluations as well: for measurements and trials of a length."""
    decode: DecodeConfig = DecodeConfig()

    @property
    def completions_per_step(self) -> int:
        """Completions of one training step."""
        return self.prompts_per_step * self.completions_per_prompt

    @property
    def worker_groups(self) -> int:
        """Groups that a worker may hold: they fill its slots, and some wait for a slot."""
        filling = -(-self.decode.slots // self.completions_per_prompt)
        # Rounded, since products such as 20 * 1.15 may come out below a whole number.
        return max(filling + 1, int(round(filling * self.held_per_slot, 6)))

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
