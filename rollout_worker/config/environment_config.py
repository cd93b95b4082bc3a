"""What answers the model in episodes of several turns."""

from typing import Any, Literal

from pydantic import Field

from services.process.config_section import Section


class EnvironmentConfig(Section):
    """An environment that answers the model, turn by turn (docs/environments.md).

    An episode is what follows a prompt: turns of the model, which train, and answers of the
    environment, which do not. Its processes are as many as `reward.processes`, each with
    `reward.in_flight` calls at once, and `reward.environment` names variables that they get.
    """

    name: str
    """A class: `package.module:Class`, or an async function in its place; or one of a file, as
    `deploy/demo/guessing.py:Guessing`."""
    params: dict[str, Any] = Field(default={})
    """Keyword arguments of the class, or of the function behind `policy` and `item`."""
    max_turns: int = Field(default=8, ge=1, le=1000)
    """Turns of the model. An episode that the environment has not ended by then counts as
    truncated, as one does whose tokens, those of the environment included, reach
    rollout.max_completion_tokens."""
    timeout_s: float = Field(default=10.0, ge=0.01, le=3600)
    """Wall-clock bound of one reset or step. Past it the call is cancelled, or its process killed,
    and the episode ends with an `environment_error`."""
    memory_gb: float | None = Field(default=None, ge=0.5, le=1e6)
    """Memory of one child process, in GiB, as `reward.memory_gb`."""
    close_at_least: int | None = Field(default=None, ge=2, le=65_536)
    """Episodes with which a group is complete once `close_after_s` have passed, where the others
    wait for a slow environment or go on and on. These have an `environment_error` that says so, and
    count in no statistics of their group. null waits for all; evaluations do so always. A run that
    closes groups is not the same when it is repeated."""
    close_after_s: float = Field(default=60.0, ge=0.01, le=86_400)
    """Since the group began."""
    history: Literal["as_rendered", "keep", "new_record"] = "as_rendered"
    """What a turn continues where the chat template writes earlier turns of the assistant in
    another way than they were sampled, such as without their reasoning. `as_rendered` refuses
    such a template before the run starts; `keep` goes on from exactly the tokens that were
    sampled; `new_record` goes on from what the template writes, and trains the episode as several
    sequences."""


ENVIRONMENT_REWARD = "environment"

"""In reward.functions: the reward of an episode, the sum of those of its steps."""
