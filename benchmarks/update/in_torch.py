"""The same update by the model of transformers and the optimiser of torch, on the CPU."""

from typing import Any

import numpy as np

from benchmarks.update.work import Work, draw
from learner.config import AlgorithmConfig, OptimizerConfig
from learner.objective.advantages import AdvantageRule


class TorchUpdate:
    """Clipped policy gradient of a batch, mean over its tokens, clip by norm, AdamW."""

    def __init__(self, work: Work):
        import torch
        import transformers

        self._torch, self._work = torch, work
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(work.model), dtype=torch.float32
        )
        self._model = model.train()
        optimizer = OptimizerConfig(learning_rate=work.learning_rate)
        self._clip_norm = optimizer.clip_norm
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        batch = draw(work, model.config.vocab_size)
        reward = batch.rewards_B.reshape(work.groups, work.group_size)
        centred = reward - reward.mean(axis=1, keepdims=True)
        eps = AdvantageRule("group_norm").eps
        advantage = (centred / (centred.std(axis=1, keepdims=True) + eps)).reshape(-1, 1)
        self._ids = torch.from_numpy(batch.token_ids_BT.astype(np.int64))
        self._advantage = torch.from_numpy(advantage.astype(np.float32))
        with torch.no_grad():
            self._old = torch.cat([self._logprobs(rows) for rows in self._microbatches()])

    def step(self) -> float:
        """Makes one update; returns the gradient's norm before the clip."""
        torch = self._torch
        self._optimizer.zero_grad()
        for rows in self._microbatches():
            self._loss(rows).backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
        self._optimizer.step()
        return float(norm)

    def _microbatches(self) -> list[slice]:
        rows = max(1, self._work.microbatch_tokens // self._work.row_tokens)
        return [slice(start, start + rows) for start in range(0, self._work.rows, rows)]

    def _loss(self, rows: slice) -> Any:
        algorithm, advantage = AlgorithmConfig(), self._advantage[rows]
        ratio = (self._logprobs(rows) - self._old[rows]).exp()
        clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
        gain = self._torch.minimum(ratio * advantage, clipped * advantage)
        return -gain.sum() / (self._work.rows * self._work.completion_tokens)

    def _logprobs(self, rows: slice) -> Any:
        """Of the completion's tokens, float32 [B, C]."""
        torch, C, ids = self._torch, self._work.completion_tokens, self._ids[rows]
        with torch.autocast("cpu", torch.bfloat16, enabled=self._work.dtype == "bfloat16"):
            # Nothing is padded, and only the completion's tokens need logits.
            logits = self._model(ids, use_cache=False, logits_to_keep=C + 1).logits[:, :-1]
        logits = logits.float()
        return logits.gather(2, ids[:, -C:, None])[..., 0] - logits.logsumexp(dim=2)
