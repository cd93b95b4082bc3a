"""The core of a rollout worker: leases in, scored groups out, under one policy version.

It says which prompts begin under which policy, and makes groups and evaluations of them; how their
completions come about is in `prompt_tasks.py`. It opens no socket and knows no Ray: `loop.py`
decides when a group begins, `actor.py` connects the process.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from models.tokenizer import Tokenizer
from models.transformer import Params
from rollout_worker.canary import CanaryCheck
from rollout_worker.data.prompts import Prompt
from rollout_worker.engine.decode_request import DecodeRequest, FinishedRow, SamplingSettings
from rollout_worker.engine.engine import Engine, EngineCounts
from rollout_worker.environments.environment_pool import EnvironmentPool
from rollout_worker.environments.environment_use import EnvironmentUse
from rollout_worker.environments.episodes import EpisodeGroup
from rollout_worker.evaluation.held_out import HeldOut
from rollout_worker.evaluation.idle_share import IdleShare
from rollout_worker.leased_group import LeasedGroup
from rollout_worker.policy.live_weights import LiveWeights, WeightDigestMismatch, WholeModel
from rollout_worker.prompt_tasks import PromptTask, PromptTasks, ScoredGroup
from rollout_worker.rewards.reward_pool import RewardPool, Score
from rollout_worker.rewards.spending import Spending
from rollout_worker.worker_records import EngineUse, EvalItem
from services.process.phase_clock import PhaseClock
from services.wire.messages import NO_VERSION, Completion, Group, WeightManifest

EVAL_STREAM = 2**31 - 1
"""Folded into the run's key for evaluation, so that it never repeats a training draw."""


class CanaryFailed(RuntimeError):
    """A probe has other logprobs here than at the learner, under the same weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """What is drawn for a prompt; an evaluation has its own count and distribution."""

    completions: int
    sampling: SamplingSettings
    max_prompt_tokens: int
    """Bound on what an environment begins with."""
    max_new_tokens: int
    """Of a completion; of an episode the environment's tokens as well."""
    stop_set: int
    """Of the engine's stop automaton."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Policy:
    """A verified policy on the device."""

    version: int
    digest: str
    params: Params


class RolloutWorker:
    """Turns prompts and a policy version into scored groups."""

    def __init__(
        self,
        *,
        name: str,
        run_id: str,
        seed: int,
        settings: GroupSettings,
        engine: Engine,
        tokenizer: Tokenizer,
        rewards: RewardPool | EnvironmentPool,
        train: Sequence[Prompt],
        held_out: Sequence[HeldOut],
        clock: PhaseClock,
        canary: CanaryCheck | None = None,
        weights: LiveWeights | None = None,
    ):
        """Args:
        rewards: of training: scorers, or environments.
        weights: how versions come to the devices; None takes them as whole models.
        canary: checks every version that comes with the learner's scores of a probe.
        """
        self._name = name
        self._run_id = run_id
        key = jax.random.key(seed)
        self._train_key = _key_data(key)
        self._eval_key = _key_data(jax.random.fold_in(key, EVAL_STREAM))
        self._settings = settings
        self._engine = engine
        self._tokenizer = tokenizer
        self._train = train
        self._held_out = held_out
        self._clock = clock
        self._canary = canary
        self._weights = WholeModel(engine.spec.layout) if weights is None else weights
        self._rewards = rewards
        self._pools = {rewards, *(one.rewards for one in held_out)}
        self._tasks = PromptTasks(engine, clock)
        """What is under way: groups, or a part of an evaluation."""
        self._request_numbers = itertools.count()
        self.policy_version = -1
        """-1 until the first weights arrive."""
        self.weight_digest = ""
        self._swaps = 0
        self._counts = EngineCounts()
        """Of the engine, as `take_engine_use` reported last."""
        self._current: _Policy | None = None
        """Of `policy_version`."""
        self._kept: _Policy | None = None
        """An older one, or the current one, for an evaluation."""
        self._loaded: _Policy | None = None
        """That of the two which the engine has."""
        self._keep = NO_VERSION
        self._share: IdleShare | None = None
        """What is being evaluated beside training."""
        self.canary_gap = math.nan
        """Largest gap of a logprob between learner and worker on the probe, in nats."""

    def swap_policy(
        self, manifest: WeightManifest, named: Mapping[str, np.ndarray | jax.Array]
    ) -> None:
        """Puts a fetched policy version on the device, verifies it and makes it the current one.

        If that fails, the old version stays: both copies are on the device until the digest is
        verified.

        Raises:
            ValueError: if tensors are missing, extra or wrongly shaped.
            WeightDigestMismatch: if the arrays on the device are not the published ones.
            CanaryFailed: if the same weights give other logprobs here than at the learner.
        """
        params = self._weights.place(named)
        digest = self._weights.digest(params, named)
        if digest != manifest.digest:
            raise WeightDigestMismatch(
                f"{self._name}: live weights of version {manifest.policy_version} have digest "
                f"{digest}, published was {manifest.digest}"
            )
        if self._canary is not None and manifest.canary is not None:
            result = self._canary.check_policy(params, manifest.canary)
            self.canary_gap = result.gap_max
            if not result.passed:
                raise CanaryFailed(
                    f"{self._name}: the canary of policy version {manifest.policy_version} fails "
                    f"at {result.first_layer}: {result.gaps} (weights.canary_bound)"
                )
        policy = _Policy(manifest.policy_version, digest, params)
        self._load(policy)
        self._current = policy
        self.policy_version, self.weight_digest = policy.version, policy.digest
        if policy.version == self._keep:
            self._kept = policy
        self._swaps += 1

    def _load(self, policy: _Policy | None) -> None:
        """Has the engine sample under a policy, which is on the device already."""
        assert policy is not None
        if self._loaded is not policy:
            with self._clock.phase("weights_swap"):
                self._engine.swap_policy(policy.params, policy.version)
            self._loaded = policy

    def keep_version(self, version: int) -> None:
        """Keeps a policy version beside the current one while later ones come, for an evaluation:
        the current one, or one that comes later. A version that was kept before is dropped.

        Args:
            version: NO_VERSION for none.
        """
        self._keep = version
        self._kept = self._current if self.policy_version == version else None
        if self._loaded is not self._current:
            self._load(self._current)

    @property
    def kept_version(self) -> int:
        """The version that is kept; NO_VERSION for none. For any thread."""
        kept = self._kept
        return NO_VERSION if kept is None else kept.version

    @property
    def progress(self) -> dict[str, int]:
        """What was done since the start; for any thread."""
        counts = self._engine.counts
        return {
            "tokens": counts.tokens,
            "prefills": counts.prefill_calls,
            "scored": sum(pool.scored for pool in self._pools),
            "swaps": self._swaps,
        }

    def take_spending(self) -> Spending:
        """What scorers have spent since the last call; for any thread."""
        return self._rewards.account.take_spending()

    def take_environment_use(self) -> EnvironmentUse:
        """What environments have done since the last call; for any thread."""
        pools = [pool for pool in self._pools if isinstance(pool, EnvironmentPool)]
        return sum((pool.take_use() for pool in pools), EnvironmentUse())

    def take_engine_use(self) -> EngineUse:
        """What the engine did since the last call, and what it keeps. For any thread."""
        engine, before = self._engine, self._counts
        now = self._counts = dataclasses.replace(engine.counts)
        several_turns = isinstance(self._rewards, EnvironmentPool)
        return EngineUse(
            tokens=now.tokens - before.tokens,
            slot_steps=now.slot_steps - before.slot_steps,
            prefilled_tokens=now.prefilled_tokens - before.prefilled_tokens,
            reused_tokens=now.reused_tokens - before.reused_tokens,
            parked=engine.parked if several_turns else None,
            parked_bytes=engine.parked_bytes,
        )

    def stop_spending(self, why: str) -> None:
        """Has scorers spend nothing more; their completions get an error instead."""
        self._rewards.account.stop(why)

    @property
    def busy(self) -> bool:
        """Whether a group that was begun is not complete."""
        return bool(self._tasks)

    @property
    def decoding(self) -> bool:
        """Whether a group is not decoded, so that a swap would change the policy under it.

        The other groups wait for their scores only.
        """
        return self._tasks.decoding

    def begin_groups(self, groups: Sequence[LeasedGroup]) -> None:
        """Starts groups under the current policy version, beside those that are under way.

        Raises:
            ValueError: if one does not fit the engine. None is begun then.
        """
        self._load(self._current)
        tasks = []
        for leased in groups:
            lease = leased.lease
            # Not the attempt: an aborted request keeps its id in the engine until its rows have
            # left their slots, and the same attempt may be leased again meanwhile.
            request_id = f"{lease.group_id}/{next(self._request_numbers)}"
            task = self._task(
                request_id,
                self._train[lease.position],
                epoch=lease.epoch,
                samples=self._settings.completions,
                key_data=self._train_key,
                sampling=self._settings.sampling,
                rewards=self._rewards,
                leased=leased,
            )
            tasks.append(task)
        self._tasks.begin(tasks)

    def advance(self, wait_s: float | None = None) -> list[LeasedGroup]:
        """One turn of the engine; returns the groups that are complete now, in any order.

        Args:
            wait_s: as `PromptTasks.advance` has it.
        """
        if self._share is None:
            return [self._complete(task) for task in self._tasks.advance(None, wait_s)]
        for task in self._tasks.advance("eval", wait_s):
            self._share.add_items(task.position, self._items(task))
        if self._share.ended:
            self._share = None
        return []

    def drop_cancelled(self) -> None:
        """Ends the groups that were cancelled; the others go on."""
        gone = [task for task in self._tasks if task.leased and task.leased.cancelled]
        if gone:
            self._tasks.abort(gone)

    def evaluate(
        self, which: int, positions: Sequence[int], *, samples: int, sampling: SamplingSettings
    ) -> list[EvalItem]:
        """Completes and scores held-out prompts; draws do not touch the training stream.

        Args:
            which: of the held-out sets.
            positions: places in that set, any number.

        Returns:
            one item per completion, in the order of positions and samples.
        """
        self._tasks.abort(self._tasks, "eval")  # of a call that failed
        self._load(self._current)
        tasks = self._held_out_tasks(which, positions, samples, sampling)
        self._tasks.begin(tasks)
        try:
            while self._tasks:
                self._tasks.advance("eval")
        finally:
            self._tasks.abort(self._tasks, "eval")
        return [item for task in tasks for item in self._items(task)]

    @property
    def evaluating(self) -> bool:
        """Whether a share of an evaluation is under way beside training."""
        return self._share is not None

    def begin_evaluation(self, share: IdleShare) -> None:
        """Starts what is left of a share under the version that is kept, which must be its own.

        Nothing else may be under way; `advance` completes it.
        """
        assert not self._tasks and self.kept_version == share.request.policy_version
        asked = share.request
        self._load(self._kept)
        self._tasks.begin(
            self._held_out_tasks(asked.held_out, share.left, asked.samples, asked.sampling)
        )
        self._share = share

    def pause_evaluation(self) -> None:
        """Puts the share aside; prompts that are not complete are left."""
        self._share = None
        self._tasks.abort(self._tasks, "eval")

    def _held_out_tasks(
        self, which: int, positions: Sequence[int], samples: int, sampling: SamplingSettings
    ) -> list[PromptTask]:
        held_out = self._held_out[which]
        tasks = []
        for place in positions:
            task = self._task(
                f"held out {which}/{place}/{next(self._request_numbers)}",
                held_out.prompts[place],
                epoch=0,
                samples=samples,
                key_data=self._eval_key,
                sampling=sampling,
                rewards=held_out.rewards,
            )
            task.held_out, task.position = held_out.name, place
            tasks.append(task)
        return tasks

    def _task(
        self,
        request_id: str,
        prompt: Prompt,
        *,
        epoch: int,
        samples: int,
        key_data: np.ndarray,
        sampling: SamplingSettings,
        rewards: RewardPool | EnvironmentPool,
        leased: LeasedGroup | None = None,
    ) -> PromptTask:
        request = DecodeRequest(
            request_id=request_id,
            token_ids=prompt.token_ids,
            prompt_id=prompt.prompt_id,
            epoch=epoch,
            samples=tuple(range(samples)),
            max_new_tokens=self._settings.max_new_tokens,
            key_data=key_data,
            sampling=sampling,
            stop_set=self._settings.stop_set,
        )
        group = (
            EpisodeGroup(
                request,
                prompt.item,
                rewards,
                self._tokenizer,
                max_prompt_tokens=self._settings.max_prompt_tokens,
                waits_for_all=leased is None,
            )
            if isinstance(rewards, EnvironmentPool)
            else ScoredGroup(request, prompt, rewards, self._tokenizer)
        )
        assert self._loaded is not None
        return PromptTask(
            request_id,
            prompt,
            group,
            self._loaded.version,
            self._loaded.digest,
            self._clock.total(),
            leased,
        )

    def _complete(self, task: PromptTask) -> LeasedGroup:
        """Makes the group of a task whose completions are scored."""
        leased = task.leased
        assert leased is not None
        lease = leased.lease
        rows, scores = task.group.completions(), task.group.scores()
        versions = {int(version) for row in rows for version in row.versions}
        assert versions == {task.policy_version}, (lease.group_id, versions, task.policy_version)
        after = self._clock.total()
        phase_s = {phase: after[phase] - task.clock_s[phase] for phase in after}
        leased.notes = tuple(score.notes for score in scores)
        leased.group = Group(
            run_id=self._run_id,
            group_id=lease.group_id,
            attempt=lease.attempt,
            prompt_id=task.prompt.prompt_id,
            epoch=lease.epoch,
            policy_version=task.policy_version,
            weight_digest=task.weight_digest,
            worker=self._name,
            prompt_token_ids=task.group.prompt_token_ids,
            completions=tuple(map(_completion, rows, scores)),
            phase_s={phase: seconds for phase, seconds in phase_s.items() if seconds > 0},
        )
        return leased

    def _items(self, task: PromptTask) -> list[EvalItem]:
        """The completions of a held-out prompt, in the order of samples."""
        scored = zip(task.group.completions(), task.group.scores(), strict=True)
        return [self._item(task, row, score) for row, score in scored]

    def _item(self, task: PromptTask, row: FinishedRow, score: Score) -> EvalItem:
        versions = {int(version) for version in row.versions}
        assert versions == {task.policy_version}, (task.position, versions, task.policy_version)
        prompt = task.prompt
        return EvalItem(
            set=task.held_out,
            prompt_id=prompt.prompt_id,
            sample_index=row.sample_index,
            question=prompt.question,
            answer=prompt.answer,
            completion=self._tokenizer.decode_completion(row.token_ids),
            completion_tokens=len(row.logprobs),
            finish_reason=row.finish_reason.value,
            rewards=score.rewards,
            total_reward=score.total,
            reward_error=score.error,
            notes=score.notes,
            policy_version=task.policy_version,
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
        segment_tokens=row.segment_tokens,
        record_starts=row.record_starts,
    )


def _key_data(key: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(key))
