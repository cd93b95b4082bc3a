"""Shares of an evaluation, which are completed while the worker has nothing else to do."""

import collections
import concurrent.futures
import threading
from collections.abc import Sequence

from rollout_worker.worker_records import EvalItem, EvalRequest


class IdleShare:
    """Some prompts of an evaluation, which may be put aside and gone on with.

    A prompt that was put aside begins anew, with the same draws.
    """

    def __init__(self, request: EvalRequest):
        self.request = request
        self._items: dict[int, list[EvalItem]] = {}
        self._done: concurrent.futures.Future[list[EvalItem]] = concurrent.futures.Future()

    @property
    def left(self) -> list[int]:
        """Positions that are not completed."""
        return [place for place in self.request.positions if place not in self._items]

    def add_items(self, position: int, items: Sequence[EvalItem]) -> None:
        """Adds the completions of a prompt; the last prompt ends the share."""
        self._items[position] = list(items)
        if not self.left:
            every = [one for place in self.request.positions for one in self._items[place]]
            self._done.set_result(every)

    @property
    def ended(self) -> bool:
        """Whether it is complete, or was cancelled."""
        return self._done.done()

    def cancel(self) -> None:
        """Ends it without a result, since no process waits for one."""
        if not self.ended:
            self._done.set_result([])

    def fail(self, error: BaseException) -> None:
        """Ends it with the failure of the worker."""
        if not self.ended:
            self._done.set_exception(error)

    def wait(self) -> list[EvalItem]:
        """Its completions, in the order of positions and samples; none if it was cancelled."""
        return self._done.result()


class ShareQueue:
    """The shares of one worker; any thread may add one, and the working thread ends them."""

    def __init__(self):
        self._lock = threading.Lock()
        self._shares: collections.deque[IdleShare] = collections.deque()
        self._closed = False

    def __bool__(self) -> bool:
        return bool(self._shares)

    def put(self, share: IdleShare) -> None:
        """Adds a share; one that comes after the end is cancelled."""
        with self._lock:
            if self._closed:
                share.cancel()
            else:
                self._shares.append(share)

    def first(self, kept_version: int) -> IdleShare | None:
        """The share to go on with; those of versions that are not kept are cancelled."""
        with self._lock:
            while self._shares:
                share = self._shares[0]
                if share.request.policy_version != kept_version:
                    share.cancel()
                if not share.ended:
                    return share
                self._shares.popleft()
        return None

    def close(self, error: BaseException | None = None) -> None:
        """Ends all shares, with the failure of the worker if there is one."""
        with self._lock:
            self._closed = True
            for share in self._shares:
                share.cancel() if error is None else share.fail(error)
            self._shares.clear()
