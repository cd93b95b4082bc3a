"""Prompts whose completions are being made: decoded by the engine, then scored, or answered turn by
turn by environments.

A prompt's completions are a group of one of two kinds, which have the same methods: `ScoredGroup`
here, whose completions scorers score once all are decoded, and `EpisodeGroup`, whose environments
answer each turn. All groups share the engine; `worker.py` says which begin, and what becomes of
those that are complete.
"""

import concurrent.futures
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from models.tokenizer import Tokenizer
from rollout_worker.data.prompts import Prompt
from rollout_worker.engine.decode_request import DecodeRequest, FinishedRow
from rollout_worker.engine.engine import Engine
from rollout_worker.environments.episodes import EpisodeGroup
from rollout_worker.leased_group import LeasedGroup
from rollout_worker.rewards.reward_pool import PendingScores, RewardPool, Score, ScoreRequest
from services.process.phase_clock import PhaseClock


class ScoredGroup:
    """Completions of one turn, which are scored together once all are decoded."""

    phase = "reward"
    """Of the ledger, for the time beside the engine's."""
    has_answers = False
    """It has one request, which is there from the beginning."""

    def __init__(
        self, request: DecodeRequest, prompt: Prompt, rewards: RewardPool, tokenizer: Tokenizer
    ):
        self._request = request
        self._prompt = prompt
        self._rewards = rewards
        self._tokenizer = tokenizer
        self.in_engine: set[str] = set()
        """Ids of the requests whose rows have not all ended."""
        self._rows: list[FinishedRow] = []
        self._pending: PendingScores | None = None

    @property
    def prompt_token_ids(self) -> np.ndarray:
        """As the model saw it."""
        return self._request.token_ids

    @property
    def decoded(self) -> bool:
        """Whether all completions have ended."""
        return self._pending is not None

    @property
    def done(self) -> bool:
        """Whether all are scored."""
        return self._pending is not None and self._pending.done

    def drop_late(self) -> list[str]:
        """None: all completions end."""
        return []

    def take_requests(self) -> list[DecodeRequest]:
        """What is to be decoded; to be called once."""
        self.in_engine.add(self._request.request_id)
        return [self._request]

    def add_row(self, row: FinishedRow) -> None:
        """Takes a completion that has ended; the last one has all scored."""
        self._rows.append(row)
        if len(self._rows) < len(self._request.samples):
            return
        self.in_engine.clear()
        self._rows.sort(key=lambda row: row.sample_index)
        self._pending = self._rewards.submit(
            [
                ScoreRequest(
                    completion=self._tokenizer.decode_completion(row.token_ids),
                    answer=self._prompt.answer,
                    prompt=self._prompt.question,
                    item=self._prompt.item,
                )
                for row in self._rows
            ]
        )

    def wait_done(self, timeout_s: float | None) -> None:
        """Waits for the scores of what is decoded, as `PendingScores.wait_done`."""
        assert self._pending is not None
        self._pending.wait_done(timeout_s)

    def abandon(self) -> None:
        """Nothing: what is being scored ends by itself."""

    def completions(self) -> list[FinishedRow]:
        """In the order of their samples; all have ended."""
        return self._rows

    def scores(self) -> list[Score]:
        """Of the same; raises as `PendingScores.wait`."""
        assert self._pending is not None
        return self._pending.wait()


@dataclasses.dataclass(eq=False)
class PromptTask:
    """One prompt and the group of its completions."""

    request_id: str
    prompt: Prompt
    group: ScoredGroup | EpisodeGroup
    policy_version: int
    """Under which it began, and ends."""
    weight_digest: str
    clock_s: dict[str, float]
    """Seconds by phase of the clock when it began."""
    leased: LeasedGroup | None = None
    """None in an evaluation."""
    held_out: str = ""
    """Name of its held-out set."""
    position: int = -1
    """In that set."""


class PromptTasks:
    """The prompts that are under way, which share one engine."""

    def __init__(self, engine: Engine, clock: PhaseClock):
        self._engine = engine
        self._clock = clock
        self._tasks: dict[str, PromptTask] = {}
        """By request id, in the order in which they began."""

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __iter__(self):
        return iter(list(self._tasks.values()))

    @property
    def decoding(self) -> bool:
        """Whether one is not decoded; the others wait for their scores only."""
        return not all(task.group.decoded for task in self)

    def begin(self, tasks: Sequence[PromptTask]) -> None:
        """Starts prompts beside those that are under way.

        Raises:
            ValueError: if one does not fit the engine. None is begun then.
        """
        self._engine.submit_requests(
            [request for task in tasks for request in task.group.take_requests()]
        )
        self._tasks |= {task.request_id: task for task in tasks}

    def advance(self, account: str | None, wait_s: float | None = None) -> list[PromptTask]:
        """One turn of the engine; returns the prompts that are complete now, which are under way no
        more.

        Args:
            account: ledger phase for its time, instead of `prefill`, `decode` and those of groups.
            wait_s: where there is nothing to decode and none is complete: how long to wait for
                scores and environments; None as long as their own bounds allow.
        """
        self._take_answers(account)
        self._drop_late()  # after the answers: what has ended meanwhile counts, and is kept
        if self.decoding and self._engine.pending:
            with self._clock.phase(account or "decode"):
                finished = self._engine.step(account)
            self._add_rows(finished, account)
        elif self._tasks and not self._done:
            self._wait(account, wait_s)
        done = self._done
        for task in done:
            self._forget(task)
        return done

    def abort(self, tasks: Iterable[PromptTask], account: str | None = None) -> None:
        """Ends prompts whose result no caller wants; the others go on.

        An engine that failed is left alone, so that the error which is reported is its own.
        """
        for task in tasks:
            task.group.abandon()
            for request_id in task.group.in_engine:
                self._engine.abort_request(request_id)
            self._forget(task)
        while not self.decoding and self._engine.usable and self._engine.pending:
            with self._clock.phase(account or "decode"):
                self._engine.step(account)

    def _forget(self, task: PromptTask) -> None:
        del self._tasks[task.request_id]
        self._engine.end_episode(task.request_id)

    @property
    def _done(self) -> list[PromptTask]:
        return [task for task in self if task.group.done]

    def _drop_late(self) -> None:
        """Ends the episodes that their groups wait for no longer."""
        for task in self:
            for request_id in task.group.drop_late():
                self._engine.abort_request(request_id)

    def _take_answers(self, account: str | None) -> None:
        """Gives the engine the turns whose environments have answered."""
        for task in self:
            if task.group.has_answers:
                with self._clock.phase(account or task.group.phase):
                    self._engine.submit_requests(task.group.take_requests())

    def _add_rows(self, rows: Sequence[FinishedRow], account: str | None) -> None:
        """Gives rows to their groups; those of prompts which were ended meanwhile have none."""
        if not rows:
            return
        groups = {request: task.group for task in self for request in task.group.in_engine}
        taken = [(group, row) for row in rows if (group := groups.get(row.request_id))]
        if taken:
            with self._clock.phase(account or taken[0][0].phase):  # all groups are of one kind
                for group, row in taken:
                    group.add_row(row)

    def _wait(self, account: str | None, wait_s: float | None) -> None:
        """Waits for the scores of the first group, or until one of all environments answers."""
        groups = [task.group for task in self]
        calls = [
            call for group in groups if isinstance(group, EpisodeGroup) for call in group.calls
        ]
        with self._clock.phase(account or groups[0].phase):
            if calls:
                concurrent.futures.wait(calls, wait_s, concurrent.futures.FIRST_COMPLETED)
            elif isinstance(groups[0], ScoredGroup):
                groups[0].wait_done(wait_s)
