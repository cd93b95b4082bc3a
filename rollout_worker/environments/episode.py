"""One episode: what was sampled and what was answered so far, and the completion that it becomes.

It is one sequence of tokens, or several records: where the chat template writes earlier turns in
another way than they were sampled (`environment.history: new_record`), the whole conversation as it
is written then takes the place of all before, and the model goes on from that.
"""

import dataclasses
import itertools

import numpy as np

from rollout_worker.engine.decode_request import FinishedRow
from rollout_worker.environments.environment_pool import Conversation
from rollout_worker.environments.turn_values import Message
from services.wire.messages import FinishReason

_NONE = np.zeros(0, np.int32)


@dataclasses.dataclass(eq=False)
class Episode:
    """One completion of a group."""

    sample_index: int
    conversation: Conversation
    room: int
    """Tokens that its next turn, or the one that is decoded, may have at most, whatever limit of
    its own that turn has."""
    messages: list[Message] = dataclasses.field(default_factory=list)
    """Of the conversation; the texts of the model's turns are there only where `written` is."""
    written: str | None = None
    """The conversation as text, as far as it was read and sampled; only for new records."""
    rows: list[FinishedRow] = dataclasses.field(default_factory=list)
    """Turns of the model."""
    answers: list[np.ndarray] = dataclasses.field(default_factory=list)
    """Token ids between them; where a record begins, all that the next turn read."""
    starts: list[int] = dataclasses.field(default_factory=list)
    """Places of answers with which a record begins."""
    reward: float = 0.0
    error: str = ""
    ended: FinishReason | None = None
    asks: bool = True
    """Whether a call of the environment is under way."""

    @property
    def segments(self) -> list[np.ndarray]:
        """Token ids after the prompt, of the model and of the environment in turn."""
        turns = (row.token_ids for row in self.rows)
        both = itertools.zip_longest(turns, self.answers)
        return [part for pair in both for part in pair if part is not None]

    @property
    def token_ids(self) -> np.ndarray:
        """All tokens after the prompt."""
        return np.concatenate([_NONE, *self.segments])

    def read_after(self, prompt_token_ids: np.ndarray) -> np.ndarray:
        """All tokens of the record that goes on.

        Args:
            prompt_token_ids: of the group.
        """
        if not self.starts:
            return np.concatenate([prompt_token_ids, self.token_ids])
        return np.concatenate(self.segments[2 * self.starts[-1] + 1 :])

    def add_answer(self, token_ids: np.ndarray, *, is_new_record: bool) -> None:
        """Has the next turn go on with these tokens, or from these alone."""
        if is_new_record:
            self.starts.append(len(self.answers))
        self.answers.append(token_ids)

    def drop_turn(self) -> None:
        """Gives up the turn that is decoded, with the answer before it."""
        del self.answers[-1]
        if self.starts[-1:] == [len(self.answers)]:
            del self.starts[-1]

    def end(self, reason: FinishReason, error: str = "") -> None:
        """Ends it; its environment is closed."""
        self.ended, self.error = reason, error
        self.conversation.end()

    def whole(self, request_id: str) -> FinishedRow:
        """All turns as one completion."""
        assert self.ended is not None and len(self.answers) == len(self.rows) - 1
        lengths = tuple(map(len, self.segments))
        return FinishedRow(
            request_id=request_id,
            sample_index=self.sample_index,
            token_ids=self.token_ids,
            logprobs=np.concatenate([row.logprobs for row in self.rows]),
            versions=np.concatenate([row.versions for row in self.rows]),
            finish_reason=self.ended,
            segment_tokens=lengths if self.answers else (),
            record_starts=tuple(2 * place + 1 for place in self.starts),
        )
