"""Requests on their way: decoded by the engine, then scored in child processes beside it.

Nothing here knows what a request is for. Whoever submits one gets all its completions back
together, from a later `advance`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from rollout_worker.data.prompts import Prompt
from rollout_worker.engine.decode_request import FinishedRow, Request
from rollout_worker.engine.engine import Engine
from rollout_worker.rewards.reward_pool import PendingScores, RewardPool, ScoreRequest
from services.process.phase_clock import PhaseClock


@dataclasses.dataclass(frozen=True, eq=False)
class Completed:
    """All completions of one request, in the order of their samples, and their scores."""

    request_id: str
    rows: list[FinishedRow]
    pending: PendingScores


class Completing:
    """The books of what is being decoded and scored."""

    def __init__(
        self,
        engine: Engine,
        rewards: RewardPool,
        clock: PhaseClock,
        text: Callable[[FinishedRow], str],
    ):
        """Args:
        text: a completion as scorers read it.
        """
        self._engine = engine
        self._rewards = rewards
        self._clock = clock
        self._text = text
        self._prompts: dict[str, Prompt] = {}
        self._rows: dict[str, list[FinishedRow]] = {}
        self._samples: dict[str, int] = {}
        self._scoring: list[Completed] = []

    @property
    def pending(self) -> frozenset[str]:
        """Ids of the requests that `advance` has not returned yet."""
        return frozenset([*self._rows, *(one.request_id for one in self._scoring)])

    @property
    def decoding(self) -> bool:
        """Whether a request is not decoded; the others wait for their scores only."""
        return bool(self._rows)

    def submit(self, requests: Sequence[Request], prompts: Mapping[str, Prompt]) -> None:
        """Takes requests in, beside those that are there.

        Args:
            prompts: by request id: what is asked and how an answer is scored.

        Raises:
            ValueError: if one does not fit the engine. None is taken then.
        """
        self._engine.submit(requests)
        for request in requests:
            self._rows[request.request_id] = []
            self._samples[request.request_id] = len(request.samples)
            self._prompts[request.request_id] = prompts[request.request_id]

    def advance(self, account: str | None = None, wait_s: float | None = None) -> list[Completed]:
        """One turn of the engine; returns the requests that are decoded and scored now.

        Args:
            account: ledger phase for its time, instead of those of its parts.
            wait_s: where nothing is left to decode: how long to wait for scores, None as long as
                the scorers' own bounds allow.
        """
        if self._rows:
            with self._clock.phase(account or "decode"):
                finished = self._engine.step(account)
            for row in finished:
                self._book(row, account)
        elif self._scoring:
            with self._clock.phase(account or "reward"):
                self._scoring[0].pending.wait_done(wait_s)
        ready = [one for one in self._scoring if one.pending.done]
        self._scoring = [one for one in self._scoring if one not in ready]
        return ready

    def give_up(self, request_ids: Iterable[str], account: str | None = None) -> None:
        """Ends requests that nobody waits for; the others go on.

        An engine that failed is left alone, so that its own error is what is heard of.
        """
        gone = set(request_ids)
        for request_id in gone & self._rows.keys():
            del self._rows[request_id], self._samples[request_id], self._prompts[request_id]
            self._engine.abort(request_id)
        self._scoring = [one for one in self._scoring if one.request_id not in gone]
        while not self._rows and self._engine.usable and self._engine.pending:
            with self._clock.phase(account or "decode"):
                self._engine.step(account)

    def _book(self, row: FinishedRow, account: str | None) -> None:
        rows = self._rows.get(row.request_id)
        if rows is None:
            return  # given up meanwhile
        rows.append(row)
        if len(rows) == self._samples[row.request_id]:
            self._start_scoring(row.request_id, account)

    def _start_scoring(self, request_id: str, account: str | None) -> None:
        rows, prompt = self._rows.pop(request_id), self._prompts.pop(request_id)
        del self._samples[request_id]
        rows.sort(key=lambda row: row.sample_index)
        with self._clock.phase(account or "reward"):
            pending = self._rewards.submit(
                [
                    ScoreRequest(
                        completion=self._text(row),
                        answer=prompt.answer,
                        prompt=prompt.question,
                        item=prompt.item,
                    )
                    for row in rows
                ]
            )
        self._scoring.append(Completed(request_id, rows, pending))
