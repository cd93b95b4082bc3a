"""The core of a rollout worker: leases in, scored groups out, under one policy version.

It holds the engine, the prompts and the live weights. It opens no socket and knows no Ray:
`actor.py` moves what comes and goes.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models.checkpoint import from_named, to_named
from models.config import ModelConfig
from models.tokenizer import Tokenizer
from models.transformer import Params
from rollout_worker.config import RolloutConfig
from rollout_worker.decode import Completions
from rollout_worker.engine import Engine, Request
from rollout_worker.prompts import Prompt, PromptSet
from rollout_worker.reward_pool import RewardPool, Score, ScoreRequest
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


class HostView:
    """A device array that is copied to the host when it is read, and not kept there.

    A JAX array keeps the host copy that numpy has once asked it for; that of a shard goes with
    the shard's own handle.
    """

    def __init__(self, array: jax.Array):
        self._array = array
        self.shape = array.shape
        self.dtype = array.dtype

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self._array.addressable_shards[0].data, dtype)


class WeightDigestMismatch(RuntimeError):
    """The arrays on the device are not the published ones."""


class RolloutWorker:
    """Turns prompts and a policy version into scored groups."""

    def __init__(
        self,
        *,
        name: str,
        run_id: str,
        seed: int,
        rollout: RolloutConfig,
        model: ModelConfig,
        engine: Engine,
        tokenizer: Tokenizer,
        rewards: RewardPool,
        train: PromptSet,
        held_out: PromptSet,
        clock: PhaseClock,
    ):
        self._name = name
        self._run_id = run_id
        self._key = jax.random.key(seed)
        self._rollout = rollout
        self._model = model
        self._engine = engine
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._train = train
        self._held_out = held_out
        self._clock = clock
        self._params: Params = {}
        self.policy_version = -1
        """-1 until the first weights arrive."""
        self.weight_digest = ""

    @property
    def compilations(self) -> int:
        return self._engine.compilations

    def swap(self, manifest: WeightManifest, named: Mapping[str, np.ndarray]) -> None:
        """Puts a fetched policy version on the device and makes it the current one, or does
        nothing at all.

        No KV entry survives: the engine keeps none between batches.

        Raises:
            ValueError: if tensors are missing, extra or wrongly shaped.
            WeightDigestMismatch: if what lies on the device is not what was published.
        """
        host = from_named(named, self._model, stacked=False)
        params = jax.block_until_ready(jax.device_put(host, self._engine.replicated))
        live = to_named(params, self._model)
        _, digest = tree_digest({name: HostView(leaf) for name, leaf in live.items()})
        if digest != manifest.digest:
            raise WeightDigestMismatch(
                f"{self._name}: live weights of version {manifest.policy_version} have digest "
                f"{digest}, published was {manifest.digest}"
            )
        self._params = params
        self.policy_version = manifest.policy_version
        self.weight_digest = digest

    def rollout(self, leases: Sequence[Lease]) -> list[Group]:
        """Samples and scores one decode batch of groups.

        Args:
            leases: at most as many as one batch of the engine takes.
        """
        G = self._rollout.completions_per_prompt
        prompts = [self._train.prompts[lease.position] for lease in leases]
        before = self._clock.peek()
        decoded = self._engine.generate(
            self._params,
            [
                Request(token_ids=p.token_ids, prompt_id=p.prompt_id, epoch=lease.epoch)
                for p, lease in zip(prompts, leases, strict=True)
            ],
            G,
            base_key=self._key,
            temperature=self._rollout.temperature,
        )
        scores = self._score(prompts, decoded, G)
        after = self._clock.peek()
        phase_s = {phase: after[phase] - before.get(phase, 0.0) for phase in after}
        return [
            Group(
                run_id=self._run_id,
                group_id=lease.group_id,
                attempt=lease.attempt,
                prompt_id=prompt.prompt_id,
                epoch=lease.epoch,
                policy_version=self.policy_version,
                weight_digest=self.weight_digest,
                worker=self._name,
                prompt_token_ids=prompt.token_ids,
                completions=tuple(
                    _completion(decoded, i * G + sample, sample, scores[i * G + sample])
                    for sample in range(G)
                ),
                phase_s={phase: seconds for phase, seconds in phase_s.items() if seconds > 0},
            )
            for i, (lease, prompt) in enumerate(zip(leases, prompts, strict=True))
        ]

    def evaluate(
        self, positions: Sequence[int], *, samples: int, temperature: float
    ) -> list[EvalItem]:
        """Completes and scores held-out prompts; draws do not touch the training stream.

        Args:
            positions: places in the held-out set, any number.
        """
        items = []
        batch = self._engine.batch_prompts(samples)
        for start in range(0, len(positions), batch):
            prompts = [self._held_out.prompts[i] for i in positions[start : start + batch]]
            decoded = self._engine.generate(
                self._params,
                [Request(token_ids=p.token_ids, prompt_id=p.prompt_id, epoch=0) for p in prompts],
                samples,
                base_key=jax.random.fold_in(self._key, EVAL_STREAM),
                temperature=temperature,
                account="eval",
            )
            scores = self._score(prompts, decoded, samples, account="eval")
            for row, score in enumerate(scores):
                prompt = prompts[row // samples]
                items.append(
                    EvalItem(
                        prompt_id=prompt.prompt_id,
                        sample_index=row % samples,
                        question=prompt.question,
                        answer=prompt.answer,
                        completion=self._text(decoded, row),
                        completion_tokens=int(decoded.length_B[row]),
                        finish_reason=_finish_reason(decoded, row).value,
                        rewards=score.rewards,
                        total_reward=score.total,
                        reward_error=score.error,
                        policy_version=self.policy_version,
                    )
                )
        return items

    def text(self, token_ids: np.ndarray, finish_reason: FinishReason) -> str:
        """A completion as people and scorers read it: without the stop token that ended it."""
        end = -1 if finish_reason is FinishReason.STOP else None
        return self._tokenizer.decode(token_ids[:end].tolist())

    def _text(self, decoded: Completions, row: int) -> str:
        tokens = decoded.tokens_BN[row, : decoded.length_B[row]]
        return self.text(tokens, _finish_reason(decoded, row))

    def _score(
        self,
        prompts: Sequence[Prompt],
        decoded: Completions,
        samples: int,
        account: str = "reward",
    ) -> list[Score]:
        requests = [
            ScoreRequest(
                completion=self._text(decoded, row),
                answer=prompts[row // samples].answer,
                prompt=prompts[row // samples].question,
                item=prompts[row // samples].item,
            )
            for row in range(len(decoded.length_B))
        ]
        with self._clock.phase(account):
            return self._rewards.score(requests)


def _finish_reason(decoded: Completions, row: int) -> FinishReason:
    return FinishReason.STOP if decoded.stopped_B[row] else FinishReason.LENGTH


def _completion(decoded: Completions, row: int, sample_index: int, score: Score) -> Completion:
    length = decoded.length_B[row]
    return Completion(
        sample_index=sample_index,
        token_ids=decoded.tokens_BN[row, :length].copy(),
        behavior_logprobs=decoded.logprobs_BN[row, :length].copy(),
        finish_reason=_finish_reason(decoded, row),
        rewards=score.rewards,
        total_reward=score.total,
        reward_error=score.error,
    )


def dtype_of(name: str) -> jnp.dtype:
    """The JAX dtype of a configuration's `bf16`, `f32`, `bfloat16` or `float32`."""
    return jnp.dtype({"bf16": "bfloat16", "f32": "float32"}.get(name, name))
