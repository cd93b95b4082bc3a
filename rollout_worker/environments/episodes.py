"""The episodes of one group: turns of the engine and answers of environments, until all have ended.

Token for token: a turn is sampled from all tokens of the episode so far, and what the environment
says is encoded alone, as the chat template continues the conversation, and appended. Nothing that
was sampled is ever encoded again, but in the prompt of a new record (`episode.py`).

Every completion of a group plays the same game: reset gets the same item and seed, and must return
the same messages, which are the group's prompt. Nothing here waits, touches a device, or knows the
processes: `prompt_tasks.py` steps the engine, and asks for what is to be decoded next.
"""

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.tokenizer import Tokenizer
from rollout_worker.engine.decode_request import DecodeRequest, FinishedRow
from rollout_worker.environments.environment_pool import EnvironmentFailed, EnvironmentPool
from rollout_worker.environments.episode import Episode
from rollout_worker.environments.turn_values import ASSISTANT, Said, Turn
from rollout_worker.rewards.reward_pool import Score
from services.wire.messages import FinishReason

_TURN_STREAM = 2**31 - 2
"""Folded into the key of later turns, so that none repeats a draw of a first one."""
_SAMPLED = ""
"""Text of a turn of the model where only what follows it is rendered."""


def seed_of(key_data: np.ndarray, prompt_id: int, epoch: int) -> int:
    """The seed that reset gets: of all completions of a prompt the same, below 2**63."""
    text = f"{key_data.tolist()}/{prompt_id}/{epoch}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


@functools.lru_cache(maxsize=1024)
def _turn_key(key: tuple[int, int], turn: int) -> np.ndarray:
    bits = jnp.array(key, jnp.uint32)
    stream = jax.random.fold_in(jax.random.wrap_key_data(bits, impl="threefry2x32"), _TURN_STREAM)
    return np.asarray(jax.random.key_data(jax.random.fold_in(stream, turn)))


class _Answer(NamedTuple):
    """What an environment said, as the model reads it."""

    token_ids: np.ndarray
    written: str | None = None
    """As `Episode` has it, with this."""
    is_new_record: bool = False


class EpisodeGroup:
    """The episodes of one prompt, one for each sample of a request."""

    phase = "environment"
    """Of the ledger, for the time beside the engine's."""

    def __init__(
        self,
        request: DecodeRequest,
        item: Mapping[str, Any],
        pool: EnvironmentPool,
        tokenizer: Tokenizer,
        *,
        max_prompt_tokens: int,
        waits_for_all: bool = False,
        now: Callable[[], float] = time.monotonic,
    ):
        """Has every environment begin.

        Args:
            request: its prompt is that of the record, `max_new_tokens` bounds a whole episode.
            item: the record.
            max_prompt_tokens: bound on what reset returns.
            waits_for_all: whatever `environment.close_at_least` says.
            now: in seconds, from any moment on.
        """
        self._request = request
        self._pool = pool
        self._tokenizer = tokenizer
        self._settings = pool.environment
        self._max_prompt_tokens = max_prompt_tokens
        self._begun = False
        self._waits_for_all = waits_for_all or pool.environment.close_at_least is None
        self._now, self._began_s = now, now()
        seed = seed_of(request.key_data, request.prompt_id, request.epoch)
        self._episodes = {
            sample: Episode(sample, pool.begin_episode(item, seed), request.max_new_tokens)
            for sample in request.samples
        }
        self.prompt_token_ids = request.token_ids
        """Of the group, once it has begun: what reset returned."""
        self.in_engine: set[str] = set()
        """Ids of the requests whose rows have not all ended."""
        self._rows_left: dict[str, int] = {}

    @property
    def done(self) -> bool:
        """Whether every episode has ended."""
        return all(episode.ended is not None for episode in self._episodes.values())

    @property
    def decoded(self) -> bool:
        """The same: rewards come with the answers."""
        return self.done

    @property
    def has_answers(self) -> bool:
        """Whether environments have answered since requests were taken last."""
        asking = [e.conversation.call.done() for e in self._episodes.values() if e.asks]
        return any(asking) if self._begun else all(asking)

    @property
    def calls(self) -> list[Future]:
        """Calls of environments that have not ended."""
        calls = (e.conversation.call for e in self._episodes.values() if e.asks)
        return [call for call in calls if not call.done()]

    def take_requests(self) -> list[DecodeRequest]:
        """What is to be decoded next, after the answers that have come since.

        Raises:
            RuntimeError: if a process of environments cannot be replaced, or the pool was closed.
        """
        if not self._begun:
            found = [] if self.calls else self._begin()
        else:
            asking = [e for e in self._episodes.values() if e.asks and e.conversation.call.done()]
            found = [request for e in asking if (request := self._go_on(e)) is not None]
        for request in found:
            self.in_engine.add(request.request_id)
            self._rows_left[request.request_id] = len(request.samples)
        return found

    def drop_late(self) -> list[str]:
        """Ends the episodes that the group waits for no longer, by `environment.close_at_least`.

        What the model was at in them is not recorded; a group with one that has no turn waits.

        Returns:
            the requests that are to be aborted.
        """
        after_s, least = self._settings.close_after_s, self._settings.close_at_least
        if self._waits_for_all or least is None or self._now() - self._began_s < after_s:
            return []
        late = [episode for episode in self._episodes.values() if episode.ended is None]
        ended = sum(e.ended is not None and not e.error for e in self._episodes.values())
        if ended < least or not late or not all(episode.rows for episode in late):
            return []
        error = (
            f"its group closed with {ended} of {len(self._episodes)} after {after_s:g} s "
            f"(environment.close_at_least={least})"
        )
        decoding = [episode for episode in late if not episode.asks]
        requests = [self._turn_name(episode) for episode in decoding]
        for episode in decoding:
            episode.drop_turn()
        for episode in late:
            episode.end(FinishReason.ABORTED, error)
            episode.asks = False
        self.in_engine.difference_update(requests)
        return requests

    def add_row(self, row: FinishedRow) -> None:
        """Takes a turn of the model, and has the environment answer it."""
        self._rows_left[row.request_id] -= 1
        if not self._rows_left[row.request_id]:
            self.in_engine.remove(row.request_id)
        episode = self._episodes[row.sample_index]
        episode.rows.append(row)
        if episode.error:
            episode.ended = FinishReason.ABORTED
        elif row.finish_reason is FinishReason.ABORTED or self._is_full(episode):
            episode.end(row.finish_reason)
        else:
            said = self._said(episode, row)
            text = _SAMPLED
            if episode.written is not None:
                text = said.text
                episode.written += text
            episode.messages.append({"role": ASSISTANT, "content": text})
            episode.conversation.say(said)
            episode.asks = True

    def abandon(self) -> None:
        """Ends what has not ended, for no result."""
        for episode in self._episodes.values():
            if episode.ended is None:
                episode.end(FinishReason.ABORTED)

    def completions(self) -> list[FinishedRow]:
        """The episodes as completions, in the order of their samples; all have ended."""
        return [e.whole(self._request.request_id) for e in self._episodes.values()]

    def scores(self) -> list[Score]:
        """Of the same."""
        return [
            self._pool.score_of(e.reward, e.error, e.conversation.numbers)
            for e in self._episodes.values()
        ]

    def _turn_name(self, episode: Episode) -> str:
        """Id of the request of its next turn, or of the one that is decoded."""
        return f"{self._request.request_id}/{episode.sample_index}.{len(episode.rows)}"

    def _is_full(self, episode: Episode) -> bool:
        """Whether its last turn was cut off by the limit of the episode, and not by its own."""
        last = episode.rows[-1]
        return last.finish_reason is FinishReason.LENGTH and len(last.token_ids) >= episode.room

    def _said(self, episode: Episode, row: FinishedRow) -> Said:
        text = self._tokenizer.decode_completion(row.token_ids)
        if not self._pool.wants_tokens:
            return Said(text)
        before = episode.answers[-1] if episode.answers else self.prompt_token_ids
        ids, logprobs = row.token_ids.tolist(), row.logprobs.tolist()
        is_new_record = episode.starts[-1:] == [len(episode.answers) - 1]
        reason = row.finish_reason.value
        return Said(text, before.tolist(), ids, logprobs, reason, is_new_record)

    def _begin(self) -> list[DecodeRequest]:
        """First turns, once every reset has ended.

        An episode that cannot begin draws one token, so that its record is one as any other.
        """
        self._begun = True
        first: Turn | None = None
        for episode in self._episodes.values():
            episode.asks = False
            try:
                turn = episode.conversation.answer()
                if first is None:
                    self.prompt_token_ids = self._encoded_prompt(turn)
                    first = turn
                elif turn.asked != first.asked:
                    raise EnvironmentFailed(
                        f"reset: it returned {_shown(turn)} for the item and seed for which it "
                        f"returned {_shown(first)} to another completion of the group: both must "
                        "be the same"
                    )
                episode.messages = list(turn.messages)
                if self._settings.history == "new_record" and turn.token_ids is None:
                    episode.written = self._tokenizer.template.render(
                        turn.messages, add_generation_prompt=True
                    )
            except EnvironmentFailed as failure:
                episode.error = str(failure)
                episode.conversation.end()
        good = [sample for sample, episode in self._episodes.items() if not episode.error]
        failed = [sample for sample, episode in self._episodes.items() if episode.error]
        requests = []
        if good and first is not None:
            requests.append(self._request_for(good, _limit(first, self._request.max_new_tokens)))
        if failed:
            requests.append(self._request_for(failed, 1))
        return requests

    def _encoded_prompt(self, turn: Turn) -> np.ndarray:
        try:
            ids = self._given_ids(turn)
            if ids is None:
                ids = np.array(self._tokenizer.encode_chat(turn.messages), np.int32)
        except ValueError as error:
            raise EnvironmentFailed(f"reset: {error}") from None
        if len(ids) > self._max_prompt_tokens:
            raise EnvironmentFailed(
                f"reset: its messages have {len(ids)} tokens, at most "
                f"rollout.max_prompt_tokens={self._max_prompt_tokens} are taken"
            )
        return ids

    def _request_for(self, samples: Sequence[int], max_new_tokens: int) -> DecodeRequest:
        return dataclasses.replace(
            self._request,
            request_id=f"{self._request.request_id}/{samples[0]}.0",
            token_ids=self.prompt_token_ids,
            samples=tuple(samples),
            max_new_tokens=max_new_tokens,
            episode=self._request.request_id,
        )

    def _go_on(self, episode: Episode) -> DecodeRequest | None:
        """The next turn of an episode whose environment has answered; None where it has ended."""
        episode.asks = False
        try:
            turn = episode.conversation.answer()
            answer = self._encoded_answer(episode, turn)
        except EnvironmentFailed as failure:
            episode.end(FinishReason.ABORTED, str(failure))
            return None
        episode.reward += turn.reward
        turns, most = len(episode.rows), self._request.max_new_tokens
        read = answer.token_ids
        if not answer.is_new_record:
            read = np.concatenate([episode.read_after(self.prompt_token_ids), read])
        # A record may be as long as the prompt and a completion.
        room = min(most, len(self.prompt_token_ids) + most - len(read))
        if turn.done:
            episode.end(FinishReason.STOP)
        elif turns == self._settings.max_turns or room < 1:
            episode.end(FinishReason.LENGTH)
        else:
            episode.messages += turn.messages
            episode.written, episode.room = answer.written, room
            episode.add_answer(answer.token_ids, is_new_record=answer.is_new_record)
            first, second = self._request.key_data.tolist()
            return dataclasses.replace(
                self._request,
                request_id=self._turn_name(episode),
                token_ids=read,
                samples=(episode.sample_index,),
                max_new_tokens=_limit(turn, room),
                key_data=_turn_key((first, second), turns),
                episode=self._request.request_id,
            )
        return None

    def _encoded_answer(self, episode: Episode, turn: Turn) -> _Answer:
        if turn.done:
            return _Answer(np.zeros(0, np.int32))
        try:
            if (given := self._given_ids(turn)) is not None:
                return _Answer(given)
            last_id = int(episode.rows[-1].token_ids[-1])
            if episode.written is not None:
                ids, written, is_new_record = self._tokenizer.encode_next_turn(
                    episode.messages, turn.messages, written=episode.written, last_id=last_id
                )
                return _Answer(np.array(ids, np.int32), written, is_new_record)
            ids = self._tokenizer.encode_after_turn(
                episode.messages[:-1],
                turn.messages,
                last_id=last_id,
                history=self._settings.history,
            )
        except ValueError as error:
            raise EnvironmentFailed(f"step {len(episode.rows)}: {error}") from None
        return _Answer(np.array(ids, np.int32))

    def _given_ids(self, turn: Turn) -> np.ndarray | None:
        """What the model reads next, where it was given as token ids."""
        if turn.token_ids is None:
            return None
        if max(turn.token_ids) >= self._tokenizer.vocab_size:
            raise ValueError(
                f"token id {max(turn.token_ids)} is none of the tokenizer's, which has "
                f"{self._tokenizer.vocab_size}"
            )
        return np.array(turn.token_ids, np.int32)


def _limit(turn: Turn, left: int) -> int:
    """Tokens of the model's next turn at most."""
    return left if turn.max_tokens is None else min(left, turn.max_tokens)


def _shown(turn: Turn) -> str:
    """What it asks for."""
    limit = "" if turn.max_tokens is None else f" with max_tokens={turn.max_tokens}"
    return f"{turn.token_ids or turn.messages!r:.200}{limit}"
