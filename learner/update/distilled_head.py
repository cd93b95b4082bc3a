"""The policy's head beside a teacher's: gradients of a loss that holds the divergence from it.

The teacher is frozen, and may have another width and depth; its head has the policy's rows
(learner/teacher.py), cut as the policy's are. So where the policy's head stays cut by rows, the
tokens of both models are gathered, and each device works on the same part of the vocabulary in
both. Neither model's logits ever exist whole: `logits` becomes `fast`. It is XLA on any platform.

Dimension key:
    B: rows of this device
    T: token slots of a row
    N: tokens, B x T of this device or of all shards
    D: width of the policy
    E: width of the teacher
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels import choose
from kernels.linear_distillation import schedule
from kernels.linear_distillation.xla import TokensAndHead
from kernels.linear_objective.reference import Objective
from kernels.token_logprob.reference import TokenLogprob
from learner.objective.batching import MicroBatch
from learner.update.head import LOGITS, HeadPlan, PolicyHead
from learner.update.mesh import SHARDS
from learner.update.sharding import cut_by_rows, make_gather, param_specs
from models.config import ModelConfig
from models.transformer import Params, flat, head_weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherPlan:
    """A teacher on the learner's mesh; static while a step is compiled."""

    config: ModelConfig
    """With the policy's rows of the vocabulary."""
    specs: Params
    """PartitionSpec of each of its parameters."""
    coef: float
    """Weight of the divergence."""
    top_k: int | None
    """As `linear_distillation` has it."""


def teacher_specs(params: Params, policy_specs: Params, shards: int) -> Params:
    """PartitionSpec of each parameter of a teacher, its head cut by rows where the policy's is.

    Args:
        params: arrays or shape structs of the teacher, with the policy's rows, layers stacked.
    """
    specs = param_specs(params, shards)
    if cut_by_rows(policy_specs[_head_name(policy_specs)]["weight"]):
        specs[_head_name(specs)]["weight"] = P(SHARDS, None)
    return specs


class DistilledHead(PolicyHead):
    """The head of a policy on one mesh, beside that of its teacher."""

    def __init__(
        self,
        plan: HeadPlan,
        mesh: Mesh,
        specs: Params,
        compute_dtype: jnp.dtype,
        teacher: TeacherPlan,
        teacher_states: Callable[[Params, MicroBatch], jax.Array],
    ):
        """Args:
        plan, specs: of the policy.
        teacher_states: the teacher's hidden states, [B, T, E] in compute_dtype.
        """
        chunked = "fast" if plan.schedule == LOGITS else plan.schedule
        plan = plan._replace(schedule=chunked, impl=choose.XLA)
        super().__init__(plan, mesh, specs, make_gather(specs, compute_dtype))
        self._coef = teacher.coef
        self._top_k = teacher.top_k
        self._teacher_gather = make_gather(teacher.specs, compute_dtype)
        self._teacher_states = teacher_states

    def distilled_gradients(
        self,
        params: Params,
        hidden_BTD: jax.Array,
        ids_BT: jax.Array,
        active_BT: jax.Array,
        data: Any,
        objective: Objective,
        accumulated: Params,
        batch: MicroBatch,
        teacher_params: Params,
    ) -> tuple[TokenLogprob, jax.Array, jax.Array, jax.Array]:
        """As `gradients`, of objective + coef x weight x KL(policy || teacher) of each token.

        Returns:
            scores; the divergence, float32 [B, T], nats, with zeros where a token is not active;
            and the two gradients.
        """
        before_VD = accumulated[self.name]["weight"]
        teacher_BTE = self._teacher_states(teacher_params, batch)
        tokens = (hidden_BTD, teacher_BTE, ids_BT, active_BT, data, self._coef * batch.weights)
        hidden_ND, teacher_NE, ids_N, active_N, data, weight_N = self._collected(
            jax.tree.map(flat, tokens)
        )
        found = schedule.value_and_gradients(
            TokensAndHead(hidden_ND, self._rows(params, hidden_ND.dtype)),
            TokensAndHead(teacher_NE, self._teacher_rows(teacher_params, teacher_NE.dtype)),
            ids_N,
            active_N,
            data,
            objective,
            weight_N,
            self._options,
            top_k=self._top_k,
            head_grad_VD=before_VD if self._adds_in_place else None,
        )
        scores, divergence_BT = self._own((found.scores, found.divergence_T), ids_BT.shape)
        gradients = self._landed(found.hidden_TD, found.head_VD, hidden_BTD, before_VD)
        return scores, divergence_BT, *gradients

    def _teacher_rows(self, params, dtype):
        if not self._by_rows:
            return head_weight(params, self._teacher_gather)
        return params[_head_name(params)]["weight"].astype(dtype)


def _head_name(tree: Params) -> str:
    return "lm_head" if "lm_head" in tree else "embed_tokens"
