"""Child processes that run environments, and the score of an episode.

An episode belongs to one child, which runs many episodes at once. Each call is a job of a scorer
thread (`rewards/processes/scorer_thread.py`) and says all that the model has said so far. So a
child that dies or is killed loses nothing: the next call plays its episode again in another child,
and only the episode whose call was the cause ends with an error.
"""

import concurrent.futures
import itertools
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_worker.config.environment_config import ENVIRONMENT_REWARD, EnvironmentConfig
from rollout_worker.config.reward_config import RewardConfig, RewardFunctionConfig
from rollout_worker.environments.environment_use import EnvironmentUse, UseMeter
from rollout_worker.environments.turn_values import BadTurn, Said, Turn, digest_of, parse_turn
from rollout_worker.rewards.composition import Composition
from rollout_worker.rewards.processes.reward_process import (
    START_TIMEOUT_S,
    Allowance,
    RewardProcess,
)
from rollout_worker.rewards.processes.scorer_output import ScorerOutput
from rollout_worker.rewards.processes.scorer_thread import (
    STANDSTILL_S,
    Job,
    JobQueue,
    Outcome,
)
from rollout_worker.rewards.processes.scorer_threads import ScorerThreads
from rollout_worker.rewards.reward_pool import Score
from rollout_worker.rewards.reward_values import ValueNames
from rollout_worker.rewards.spending import SpendingAccount

CHILD = "rollout_worker.environments.environment_child"
ERROR = "environment_error"
"""How the error of an episode begins that its environment could not end."""


class EnvironmentFailed(Exception):
    """An environment failed; the episode ends with this text."""


class EnvironmentPool:
    """Runs the environments of one configuration in a fixed number of processes."""

    def __init__(
        self,
        environment: EnvironmentConfig,
        reward: RewardConfig,
        *,
        account: SpendingAccount | None = None,
        temperature: float = 1.0,
        stop_strings: Sequence[str] = (),
    ):
        """Starts the processes and waits until each has loaded the class.

        Args:
            reward: says how many processes, what they get, and what the reward of an episode
                weighs.
            account: as the one of a reward pool; environments spend nothing.
            temperature, stop_strings: of training, which agents of OpenAI's client may ask for.

        Raises:
            ValueError: if the class cannot be loaded.
            RuntimeError: if a child dies at its start or takes too long.
        """
        self._environment = environment
        self.account = account or SpendingAccount()
        self._value_names = ValueNames()
        self._composition = Composition.of(reward.functions, reward.combine)
        allowance, output = allowance_of(environment, reward), ScorerOutput()
        sampling = {"temperature": temperature, "stop_strings": list(stop_strings)}
        self._numbers = itertools.count()
        self._meter = UseMeter()
        self._threads = ScorerThreads(
            "environment",
            lambda: _process(environment, allowance, output, sampling),
            timeout_s=environment.timeout_s,
            start_timeout_s=START_TIMEOUT_S,
            account=self.account,
        )
        try:
            threads, kinds = self._threads.start(reward.processes)
        except BaseException:
            self.close()
            raise
        self.tools = kinds[environment.name].tools
        """JSON schemas of the functions that it offers to the model."""
        self.wants_tokens = kinds[environment.name].wants_tokens
        """Whether what is said to it has tokens beside the text."""
        # A lane for each: what an episode has heard so far is in one process.
        for thread in threads:
            lane = JobQueue(in_flight=reward.in_flight, patience_s=STANDSTILL_S)
            self._threads.serve([thread], lane)

    @property
    def environment(self) -> EnvironmentConfig:
        """As configured."""
        return self._environment

    @property
    def scored(self) -> int:
        """Calls of environments that have ended, since the start."""
        return self._threads.scored

    def take_use(self) -> EnvironmentUse:
        """Calls and episodes since the last call of this; for any thread."""
        return self._meter.take_use()

    def begin_episode(self, item: Mapping[str, Any], seed: int) -> "Conversation":
        """Has an environment begin; its first answer is what reset returns.

        Args:
            item: the record of the source; JSON values only.
        """
        number, lanes = next(self._numbers), self._threads.lanes
        lane = lanes[number % len(lanes)]
        return Conversation(f"e{number}", lane, self._environment.name, item, seed, self._meter)

    def score_of(self, reward: float, error: str, numbers: Mapping[str, float]) -> Score:
        """The score of an episode.

        Args:
            reward: of all its steps together.
            error: why it could not be ended; empty where it was.
            numbers: of its `info`, by name, as `Conversation.numbers`.
        """
        if error:
            return Score({}, math.nan, f"{ERROR}: {error}")
        named = {f"{ENVIRONMENT_REWARD}/{name}": value for name, value in numbers.items()}
        rewards = {ENVIRONMENT_REWARD: reward} | self._value_names.known(ENVIRONMENT_REWARD, named)
        try:
            return Score(rewards, self._composition.total(rewards), "")
        except ValueError as problem:
            return Score(rewards, math.nan, str(problem))

    def close(self) -> None:
        """Ends the threads and kills the children; safe to call twice."""
        self._threads.close()


class Conversation:
    """One episode as the worker sees it: what the model said, and what was answered."""

    def __init__(
        self,
        name: str,
        lane: JobQueue,
        environment: str,
        item: Mapping[str, Any],
        seed: int,
        meter: UseMeter,
    ):
        self._name = name
        self._lane = lane
        self._environment = environment
        self._item = item
        self._seed = seed
        self._said: list[Said] = []
        self._heard: list[str] = []
        self._ended = False
        self._meter = meter
        meter.count_episodes(1)
        self.numbers: dict[str, float] = {}
        """Sums of the numbers in `info`, over the steps so far."""
        self.call = self._ask()
        """The call that was begun last."""

    def say(self, said: Said) -> None:
        """Begins the next step, with what the model said; the call before must have ended."""
        self._said.append(said)
        self.call = self._ask()

    def answer(self) -> Turn:
        """What the environment answered to the last call, which must be done.

        Raises:
            EnvironmentFailed: if it failed; with what it did and how.
            RuntimeError: if a child that died cannot be replaced, or the pool was closed.
        """
        outcome = self.call.result(timeout=0)
        what = f"step {len(self._said)}" if self._said else "reset"
        if outcome.errors:
            self._count_end()
            raise EnvironmentFailed(f"{what}: {outcome.errors[self._environment]}")
        try:
            turn = parse_turn(outcome.answer or {})
        except BadTurn as error:
            raise EnvironmentFailed(f"{what}: {error}") from None
        self._heard.append(digest_of(turn))
        for name, value in turn.numbers.items():
            self.numbers[name] = self.numbers.get(name, 0.0) + value
        if turn.done:
            self._count_end()
        return turn

    def end(self) -> None:
        """Closes the environment, unless it has ended by itself; nothing waits for it."""
        if not self._ended:
            self._count_end()
            self._ask(ends=True)

    def _count_end(self) -> None:
        self._ended = True
        self._meter.count_episodes(-1)

    def _ask(self, *, ends: bool = False) -> concurrent.futures.Future[Outcome]:
        call = {
            "episode": self._name,
            "seed": self._seed,
            "item": dict(self._item),
            "said": [said._asdict() for said in self._said],
            "heard": list(self._heard),
            "ends": ends,
        }
        job = Job((self._environment,), ("",), "", "", call, ends_another=ends)
        if not ends:
            job.future.add_done_callback(self._meter.begin_call())
        self._lane.jobs.put(job)
        return job.future


def allowance_of(environment: EnvironmentConfig, reward: RewardConfig) -> Allowance:
    """What a child process with environments gets of its host."""
    return Allowance(memory_gb=environment.memory_gb, environment=reward.environment)


def validate_environment(
    environment: EnvironmentConfig, reward: RewardConfig
) -> tuple[dict[str, Any], ...]:
    """Checks name, methods, parameters and tools of an environment in a child process that then
    ends.

    Returns:
        JSON schemas of the functions that it offers to the model.

    Raises:
        ValueError: if it cannot be loaded, with the reason and what to do.
        RuntimeError: if loading it kills the child or takes too long.
    """
    child = _process(environment, allowance_of(environment, reward), None)
    child.wait_ready(START_TIMEOUT_S)
    child.kill()
    return child.kinds[environment.name].tools


def _process(
    environment: EnvironmentConfig,
    allowance: Allowance,
    output: ScorerOutput | None,
    sampling: Mapping[str, Any] = types.MappingProxyType({}),
) -> RewardProcess:
    given = {"params": environment.params, "sampling": dict(sampling)}
    function = RewardFunctionConfig(name=environment.name, params=given)
    return RewardProcess([function], allowance, output, CHILD)
