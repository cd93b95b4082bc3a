"""The core of a rollout worker: leases in, scored groups out, under one policy version.

It holds the engine, the prompts and the books of what is being decoded and scored. It opens no
socket and knows no Ray: `actor.py` moves what comes and goes.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np

from models.checkpoint import from_named
from models.tokenizer import Tokenizer
from rollout_worker.config import RolloutConfig
from rollout_worker.engine import Engine
from rollout_worker.prompts import Prompt, PromptSet
from rollout_worker.requests import FinishedRow, Request, SamplingSettings
from rollout_worker.reward_pool import PendingScores, RewardPool, Score, ScoreRequest
from rollout_worker.setup import STOP_STRINGS_SET
from services.digest import tree_digest
from services.messages import Completion, FinishReason, Group, Lease, WeightManifest
from services.phase_clock import PhaseClock

EVAL_STREAM = 2**31 - 1
"""Folded into the run's key for evaluation, so that it never repeats a training draw."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalItem:
    """One held-out completion, as it stands in eval.jsonl."""

    prompt_id: int
    sample_index: int
    question: str
    answer: str
    completion: str
    completion_tokens: int
    finish_reason: str
    rewards: dict[str, float]
    total_reward: float
    reward_error: str
    policy_version: int


class WeightDigestMismatch(RuntimeError):
    """The arrays on the device are not the published ones."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Completed:
    """All completions of one request, in the order of their samples, and their scores."""

    request_id: str
    rows: list[FinishedRow]
    pending: PendingScores


class RolloutWorker:
    """Turns prompts and a policy version into scored groups."""

    def __init__(
        self,
        *,
        name: str,
        run_id: str,
        seed: int,
        rollout: RolloutConfig,
        engine: Engine,
        tokenizer: Tokenizer,
        rewards: RewardPool,
        train: PromptSet,
        held_out: PromptSet,
        clock: PhaseClock,
    ):
        self._name = name
        self._run_id = run_id
        key = jax.random.key(seed)
        self._train_key = _key_data(key)
        self._eval_key = _key_data(jax.random.fold_in(key, EVAL_STREAM))
        self._rollout = rollout
        self._engine = engine
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._train = train
        self._held_out = held_out
        self._clock = clock
        self.policy_version = -1
        """-1 until the first weights arrive."""
        self.weight_digest = ""

    def swap(self, manifest: WeightManifest, named: Mapping[str, np.ndarray]) -> None:
        """Puts a fetched policy version on the device and makes it the current one, or does
        nothing at all.

        Until the digest is known to be right, the older copy lies beside the new one.

        Raises:
            ValueError: if tensors are missing, extra or wrongly shaped.
            WeightDigestMismatch: if what lies on the device is not what was published.
        """
        layout = self._engine.spec.layout
        host = from_named(named, layout.published, stacked=False)
        params = jax.block_until_ready(layout.to_inference(host))
        dtypes = {name: array.dtype for name, array in named.items()}
        _, digest = tree_digest(layout.from_inference(params, dtypes))
        if digest != manifest.digest:
            raise WeightDigestMismatch(
                f"{self._name}: live weights of version {manifest.policy_version} have digest "
                f"{digest}, published was {manifest.digest}"
            )
        self._engine.swap(params, manifest.policy_version)
        self.policy_version = manifest.policy_version
        self.weight_digest = digest

    def rollout(self, leases: Sequence[Lease]) -> Iterator[Group]:
        """Samples and scores groups; each is yielded as soon as it is complete, in any order.

        The device goes on decoding while the caller has a group. Whoever stops iterating ends
        what is left.

        Args:
            leases: of different groups, any number.
        """
        before = self._clock.peek()
        leased = {lease.group_id: lease for lease in leases}
        prompts = {name: self._train.prompts[lease.position] for name, lease in leased.items()}
        requests = [
            self._request(
                group_id,
                prompt,
                epoch=leased[group_id].epoch,
                samples=self._rollout.completions_per_prompt,
                key_data=self._train_key,
                sampling=SamplingSettings(temperature=self._rollout.temperature),
            )
            for group_id, prompt in prompts.items()
        ]
        for done in self._complete(requests, prompts):
            yield self._group(leased[done.request_id], prompts[done.request_id], done, before)

    def evaluate(
        self, positions: Sequence[int], *, samples: int, sampling: SamplingSettings
    ) -> list[EvalItem]:
        """Completes and scores held-out prompts; draws do not touch the training stream.

        Args:
            positions: places in the held-out set, any number.

        Returns:
            one item per completion, in the order of positions and samples.
        """
        prompts = {f"held out {place}": self._held_out.prompts[place] for place in positions}
        requests = [
            self._request(
                request_id,
                prompt,
                epoch=0,
                samples=samples,
                key_data=self._eval_key,
                sampling=sampling,
            )
            for request_id, prompt in prompts.items()
        ]
        items = {}
        for done in self._complete(requests, prompts, account="eval"):
            prompt = prompts[done.request_id]
            scored = zip(done.rows, done.pending.wait(), strict=True)
            items[done.request_id] = [self._item(prompt, row, score) for row, score in scored]
        return [item for request_id in prompts for item in items[request_id]]

    def text(self, token_ids: np.ndarray, finish_reason: FinishReason) -> str:
        """A completion as people and scorers read it: without the stop token that ended it.

        A stop string that ended it stays.
        """
        ended = finish_reason is FinishReason.STOP and token_ids[-1] in self._tokenizer.stop_ids
        return self._tokenizer.decode(token_ids[: -1 if ended else None].tolist())

    def _request(
        self,
        request_id: str,
        prompt: Prompt,
        *,
        epoch: int,
        samples: int,
        key_data: np.ndarray,
        sampling: SamplingSettings,
    ) -> Request:
        return Request(
            request_id=request_id,
            token_ids=prompt.token_ids,
            prompt_id=prompt.prompt_id,
            epoch=epoch,
            samples=tuple(range(samples)),
            max_new_tokens=self._rollout.max_completion_tokens,
            key_data=key_data,
            sampling=sampling,
            stop_set=STOP_STRINGS_SET if self._rollout.stop_strings else 0,
        )

    def _complete(
        self, requests: Sequence[Request], prompts: Mapping[str, Prompt], account: str | None = None
    ) -> Iterator[_Completed]:
        """Requests as they are decoded and scored; scoring goes on while the device decodes.

        Args:
            account: ledger phase for all of it, instead of those of its parts.
        """
        unfinished: dict[str, list[FinishedRow]] = {one.request_id: [] for one in requests}
        samples = {one.request_id: len(one.samples) for one in requests}
        scoring: list[_Completed] = []
        self._drain(account)  # of what a call left that failed, which is nobody's
        self._engine.submit(requests)
        try:
            while unfinished or scoring:
                if not unfinished:
                    with self._clock.phase(account or "reward"):
                        scoring[0].pending.wait()
                for row in self._step(account) if unfinished else ():
                    rows = unfinished[row.request_id]
                    rows.append(row)
                    if len(rows) == samples[row.request_id]:
                        del unfinished[row.request_id]
                        scoring.append(self._start_scoring(prompts, rows, account))
                ready = [one for one in scoring if one.pending.done]
                scoring = [one for one in scoring if one not in ready]
                yield from ready
        finally:
            self._give_up(unfinished, account)

    def _step(self, account: str | None) -> list[FinishedRow]:
        # What the host does here itself, it does while the device decodes.
        with self._clock.phase(account or "decode"):
            return self._engine.step(account)

    def _start_scoring(
        self, prompts: Mapping[str, Prompt], rows: list[FinishedRow], account: str | None
    ) -> _Completed:
        request_id = rows[0].request_id
        prompt = prompts[request_id]
        rows.sort(key=lambda row: row.sample_index)
        with self._clock.phase(account or "reward"):
            pending = self._rewards.submit(
                [
                    ScoreRequest(
                        completion=self.text(row.token_ids, row.finish_reason),
                        answer=prompt.answer,
                        prompt=prompt.question,
                        item=prompt.item,
                    )
                    for row in rows
                ]
            )
        return _Completed(request_id, rows, pending)

    def _give_up(self, unfinished: Iterable[str], account: str | None) -> None:
        """Leaves an engine without rows that nobody waits for.

        One that failed is left alone, so that its own error is what is heard of.
        """
        for request_id in unfinished:
            self._engine.abort(request_id)
        self._drain(account)

    def _drain(self, account: str | None) -> None:
        while self._engine.usable and self._engine.pending:
            self._step(account)

    def _group(
        self, lease: Lease, prompt: Prompt, done: _Completed, before: Mapping[str, float]
    ) -> Group:
        versions = {int(version) for row in done.rows for version in row.versions}
        assert versions == {self.policy_version}, (lease.group_id, versions, self.policy_version)
        after = self._clock.peek()
        phase_s = {phase: after[phase] - before.get(phase, 0.0) for phase in after}
        return Group(
            run_id=self._run_id,
            group_id=lease.group_id,
            attempt=lease.attempt,
            prompt_id=prompt.prompt_id,
            epoch=lease.epoch,
            policy_version=self.policy_version,
            weight_digest=self.weight_digest,
            worker=self._name,
            prompt_token_ids=prompt.token_ids,
            completions=tuple(map(_completion, done.rows, done.pending.wait())),
            phase_s={phase: seconds for phase, seconds in phase_s.items() if seconds > 0},
        )

    def _item(self, prompt: Prompt, row: FinishedRow, score: Score) -> EvalItem:
        return EvalItem(
            prompt_id=prompt.prompt_id,
            sample_index=row.sample_index,
            question=prompt.question,
            answer=prompt.answer,
            completion=self.text(row.token_ids, row.finish_reason),
            completion_tokens=len(row.token_ids),
            finish_reason=row.finish_reason.value,
            rewards=score.rewards,
            total_reward=score.total,
            reward_error=score.error,
            policy_version=self.policy_version,
        )


def _completion(row: FinishedRow, score: Score) -> Completion:
    return Completion(
        sample_index=row.sample_index,
        token_ids=row.token_ids,
        behavior_logprobs=row.logprobs,
        finish_reason=row.finish_reason,
        rewards=score.rewards,
        total_reward=score.total,
        reward_error=score.error,
    )


def _key_data(key: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(key))
