"""The core of a rollout worker: leases in, scored groups out, under one policy version.

It holds the engine, the prompts and the books of what is being decoded and scored. It opens no
socket and knows no Ray: `actor.py` moves what comes and goes.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np

from models.files.checkpoint import from_named
from models.tokenizer import Tokenizer
from rollout_worker.canary import Canary
from rollout_worker.completing import Completed, Completing
from rollout_worker.config import RolloutConfig
from rollout_worker.data.prompts import Prompt, PromptSet
from rollout_worker.engine.decode_request import FinishedRow, Request, SamplingSettings
from rollout_worker.engine.engine import Engine
from rollout_worker.engine_setup import STOP_STRINGS_SET
from rollout_worker.rewards.reward_pool import RewardPool, Score
from services.process.phase_clock import PhaseClock
from services.weights.digest import tree_digest
from services.wire.messages import Completion, FinishReason, Group, Lease, WeightManifest

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


@dataclasses.dataclass(frozen=True)
class _Begun:
    """A group in the making."""

    lease: Lease
    policy_version: int
    weight_digest: str
    clock_s: dict[str, float]
    """Seconds by phase of the clock when it was taken."""


class CanaryFailed(RuntimeError):
    """A probe has other logprobs here than at the learner, under the same weights."""


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
        canary: Canary | None = None,
    ):
        """Args:
        canary: proves every version that comes with scores of a probe.
        """
        self._name = name
        self._run_id = run_id
        key = jax.random.key(seed)
        self._train_key = _key_data(key)
        self._eval_key = _key_data(jax.random.fold_in(key, EVAL_STREAM))
        self._rollout = rollout
        self._engine = engine
        self._tokenizer = tokenizer
        self._train = train
        self._held_out = held_out
        self._clock = clock
        self._canary = canary
        self._completing = Completing(
            engine, rewards, clock, lambda row: self.text(row.token_ids, row.finish_reason)
        )
        self._begun: dict[str, _Begun] = {}
        """The groups in the making, by request id."""
        self.policy_version = -1
        """-1 until the first weights arrive."""
        self.weight_digest = ""
        self.canary_gap = math.nan
        """Largest gap of a logprob between learner and worker on the probe, in nats."""

    def swap(self, manifest: WeightManifest, named: Mapping[str, np.ndarray | jax.Array]) -> None:
        """Puts a fetched policy version on the device and makes it the current one, or does
        nothing at all.

        Until the digest is known to be right, the older copy lies beside the new one.

        Raises:
            ValueError: if tensors are missing, extra or wrongly shaped.
            WeightDigestMismatch: if what lies on the device is not what was published.
            CanaryFailed: if the same weights give other logprobs here than at the learner.
        """
        layout = self._engine.spec.layout
        tree = from_named(named, layout.published, stacked=False)
        params = jax.block_until_ready(layout.to_inference(tree))
        dtypes = {name: array.dtype for name, array in named.items()}
        _, digest = tree_digest(layout.from_inference(params, dtypes))
        if digest != manifest.digest:
            raise WeightDigestMismatch(
                f"{self._name}: live weights of version {manifest.policy_version} have digest "
                f"{digest}, published was {manifest.digest}"
            )
        if self._canary is not None and manifest.canary is not None:
            result = self._canary.check(params, manifest.canary)
            self.canary_gap = result.gap_max
            if not result.passed:
                raise CanaryFailed(
                    f"{self._name}: the canary of policy version {manifest.policy_version} fails "
                    f"at {result.first_layer}: {result.gaps} (weights.canary_bound)"
                )
        self._engine.swap(params, manifest.policy_version)
        self.policy_version = manifest.policy_version
        self.weight_digest = digest

    @property
    def held(self) -> frozenset[tuple[str, int]]:
        """Group id and attempt of the leases that were taken and are not complete."""
        leases = [begun.lease for begun in self._begun.values()]
        return frozenset((lease.group_id, lease.attempt) for lease in leases)

    @property
    def decoding(self) -> bool:
        """Whether a group is not decoded, so that a swap would change the policy under it."""
        return self._completing.decoding

    def take(self, leases: Sequence[Lease]) -> None:
        """Starts groups under the current policy version, beside those that are in the making.

        Args:
            leases: of groups that are not held.
        """
        leased = {_request_id(lease): lease for lease in leases}
        prompts = {name: self._train.prompts[lease.position] for name, lease in leased.items()}
        sampling = SamplingSettings(temperature=self._rollout.temperature)
        self._completing.submit(
            [
                self._request(
                    request_id,
                    prompts[request_id],
                    epoch=lease.epoch,
                    samples=self._rollout.completions_per_prompt,
                    key_data=self._train_key,
                    sampling=sampling,
                )
                for request_id, lease in leased.items()
            ],
            prompts,
        )
        for request_id, lease in leased.items():
            self._begun[request_id] = _Begun(
                lease, self.policy_version, self.weight_digest, self._clock.total()
            )

    def advance(self, wait_s: float | None = None) -> list[Group]:
        """One turn of the engine; returns the groups that are complete now, in any order.

        Args:
            wait_s: as `Completing.advance` takes it.
        """
        return [self._group(done) for done in self._completing.advance(None, wait_s)]

    def give_up(self, held: Iterable[tuple[str, int]]) -> None:
        """Ends groups that nobody waits for, named as `held` names them."""
        gone = {f"{group_id}/{attempt}" for group_id, attempt in held} & self._begun.keys()
        self._completing.give_up(gone)
        for request_id in gone:
            del self._begun[request_id]

    def rollout(self, leases: Sequence[Lease]) -> Iterator[Group]:
        """Samples and scores groups; each is yielded as soon as it is complete, in any order.

        The device goes on decoding while the caller has a group. Whoever stops iterating ends
        what is left.

        Args:
            leases: of different groups, any number.
        """
        self.give_up(self.held)  # of what a call left that failed, which is nobody's
        self.take(leases)
        try:
            while self.held:
                yield from self.advance()
        finally:
            self.give_up(self.held)

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
        self._completing.give_up(self._completing.pending, "eval")
        self._completing.submit(requests, prompts)
        items = {}
        try:
            while self._completing.pending:
                for done in self._completing.advance("eval"):
                    prompt = prompts[done.request_id]
                    scored = zip(done.rows, done.pending.wait(), strict=True)
                    items[done.request_id] = [self._item(prompt, row, one) for row, one in scored]
        finally:
            self._completing.give_up(self._completing.pending, "eval")
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

    def _group(self, done: Completed) -> Group:
        begun = self._begun.pop(done.request_id)
        lease = begun.lease
        prompt = self._train.prompts[lease.position]
        versions = {int(version) for row in done.rows for version in row.versions}
        assert versions == {begun.policy_version}, (lease.group_id, versions, begun.policy_version)
        after = self._clock.total()
        phase_s = {phase: after[phase] - begun.clock_s[phase] for phase in after}
        return Group(
            run_id=self._run_id,
            group_id=lease.group_id,
            attempt=lease.attempt,
            prompt_id=prompt.prompt_id,
            epoch=lease.epoch,
            policy_version=begun.policy_version,
            weight_digest=begun.weight_digest,
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


def _request_id(lease: Lease) -> str:
    """A lease that was given up leaves its id in the engine for a moment: attempts differ."""
    return f"{lease.group_id}/{lease.attempt}"


def _key_data(key: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(key))
