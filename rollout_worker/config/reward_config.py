"""What scores completions, and the bounds on it."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rollout_worker.config.data_config import EvalSource, SourceConfig
from services.process.config_section import Section


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
