"""The language model's head inside the train step: scores of the tokens, and gradients of a loss.

It runs under `shard_map`, with this device's tokens and its shard of the head. Where the head is
cut by rows (the vocabulary), `fast` and `lean` leave it so: the tokens of all its shards
are gathered instead, which are far fewer bytes than the matrix, and the gradient of the rows
is formed on the device that keeps it. Otherwise, and for `logits`, the head is gathered whole.

Dimension key:
    B: rows of this device
    T: token slots of a row
    N: tokens, B x T of this device or of all shards
    D: model width
    V: vocabulary (rows of the head)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kernels.linear_objective import schedule
from kernels.linear_objective.reference import Objective
from kernels.linear_objective.schedule import HeadOptions
from kernels.token_logprob.ops import TokenLogprob, token_logprob
from learner.update.mesh import AXES, SHARDS
from learner.update.sharding import cut_by_rows, is_sharded
from models.transformer import Gather, Params, flat, head_weight, logits

LOGITS = "logits"
"""The schedule that has the logits of a micro-batch whole, in float32."""


class HeadPlan(NamedTuple):
    """How the head is computed; static while a step is compiled."""

    schedule: str
    """`logits`, `fast` or `lean`."""
    impl: str
    """One of `kernels.choose.IMPLEMENTATIONS`."""
    temperature: float
    valid_vocab: int | None


class PolicyHead:
    """The head of one model on one mesh."""

    def __init__(self, plan: HeadPlan, mesh: Mesh, specs: Params, gather: Gather):
        """Args:
        specs: PartitionSpec of every parameter.
        gather: makes parameters whole, in the compute dtype (learner/update/sharding.py).
        """
        self.name = "lm_head" if "lm_head" in specs else "embed_tokens"
        """The top-level tree of the parameters that holds the head."""
        self._plan = plan
        self._gather = gather
        self._spec = specs[self.name]["weight"]
        self._by_rows = plan.schedule != LOGITS and cut_by_rows(self._spec)
        # Copies of the parameters see different tokens: their sums meet before they are added to
        # what is the same on all of them.
        self._adds_in_place = self._by_rows and mesh.shape["data"] == 1

    def scores(
        self, params: Params, hidden_BTD: jax.Array, ids_BT: jax.Array, active_BT: jax.Array
    ) -> TokenLogprob:
        """Logprob, logsumexp and entropy of each token; float32 [B, T]."""
        if self._plan.schedule == LOGITS:
            return self._score_logits(hidden_BTD, self._whole(params), ids_BT)
        tokens = jax.tree.map(flat, (hidden_BTD, ids_BT, active_BT))
        hidden_ND, ids_N, active_N = self._collected(tokens)
        head_VD = self._rows(params, hidden_ND.dtype)
        scores = schedule.score(hidden_ND, head_VD, ids_N, active_N, self._options)
        return self._own(scores, ids_BT.shape)

    def gradients(
        self,
        params: Params,
        hidden_BTD: jax.Array,
        ids_BT: jax.Array,
        active_BT: jax.Array,
        data: Any,
        objective: Objective,
        accumulated: Params,
    ) -> tuple[TokenLogprob, jax.Array, jax.Array]:
        """Scores of the tokens and gradients of the objective's sum over the active ones.

        Args:
            data: pytree of [B, T], for the objective.
            accumulated: this device's shard of the gradients so far, float32.

        Returns:
            scores, float32 [B, T], with zeros where a token is not active (`logits` scores all);
            the gradient in hidden [B, T, D]; and the shard of the head's accumulated gradient with
            that of all devices added, float32.
        """
        before_VD = accumulated[self.name]["weight"]
        if self._plan.schedule == LOGITS:
            scores, d_hidden_BTD, d_head_VD = self._logits_gradients(
                params, hidden_BTD, ids_BT, active_BT, data, objective
            )
            return scores, d_hidden_BTD, before_VD + self._reduced(d_head_VD)
        found = self._chunked(
            params,
            (hidden_BTD, ids_BT, active_BT, data),
            objective,
            head_grad_VD=before_VD if self._adds_in_place else None,
        )
        assert found.head_VD is not None
        scores = self._own(found.scores, ids_BT.shape)
        return scores, *self._landed(found.hidden_TD, found.head_VD, hidden_BTD, before_VD)

    def hidden_gradients(
        self,
        params: Params,
        hidden_BTD: jax.Array,
        ids_BT: jax.Array,
        active_BT: jax.Array,
        data: Any,
        objective: Objective,
    ) -> tuple[TokenLogprob, jax.Array]:
        """The first two of `gradients`, where the head does not train."""
        if self._plan.schedule == LOGITS:
            scores, d_hidden_BTD, _ = self._logits_gradients(
                params, hidden_BTD, ids_BT, active_BT, data, objective
            )
            return scores, d_hidden_BTD
        tokens = (hidden_BTD, ids_BT, active_BT, data)
        found = self._chunked(params, tokens, objective, frozen_head=True)
        scores = self._own(found.scores, ids_BT.shape)
        return scores, self._landed_hidden(found.hidden_TD, hidden_BTD)

    def _chunked(self, params: Params, tokens: Any, objective: Objective, **how: Any):
        """`schedule.value_and_gradients` of the tokens that this device works on."""
        hidden_ND, ids_N, active_N, data = self._collected(jax.tree.map(flat, tokens))
        head_VD = self._rows(params, hidden_ND.dtype)
        return schedule.value_and_gradients(
            hidden_ND, head_VD, ids_N, active_N, data, objective, self._options, **how
        )

    @property
    def _options(self) -> HeadOptions:
        return HeadOptions(
            schedule=self._plan.schedule,
            impl=self._plan.impl,
            temperature=self._plan.temperature,
            valid_vocab=self._plan.valid_vocab,
            vocab_axis=SHARDS if self._by_rows else None,
        )

    def _rows(self, params, dtype):
        """The rows of the head that this device works on."""
        return params[self.name]["weight"].astype(dtype) if self._by_rows else self._whole(params)

    def _whole(self, params):
        return head_weight(params, self._gather)

    def _collected(self, tokens):
        """The tokens that meet this device's rows: those of all shards, or its own."""
        if not self._by_rows:
            return tokens
        return jax.tree.map(lambda each: jax.lax.all_gather(each, SHARDS, tiled=True), tokens)

    def _own(self, scores, shape):
        """This device's part of what `_collected` brought together."""
        B, T = shape
        start = jax.lax.axis_index(SHARDS) * (B * T) if self._by_rows else 0
        own = lambda each: jax.lax.dynamic_slice_in_dim(each, start, B * T).reshape(shape)
        return jax.tree.map(own, scores)

    def _landed(self, d_hidden_ND, head_grad_VD, hidden_BTD, before_VD):
        """The gradient in this device's own hidden states, and its shard of the head's so far."""
        if not self._adds_in_place:
            head_grad_VD = before_VD + self._reduced(head_grad_VD)
        return self._landed_hidden(d_hidden_ND, hidden_BTD), head_grad_VD

    def _landed_hidden(self, d_hidden_ND, hidden_BTD):
        if self._by_rows:
            d_hidden_ND = jax.lax.psum_scatter(d_hidden_ND, SHARDS, tiled=True)
        return d_hidden_ND.reshape(hidden_BTD.shape).astype(hidden_BTD.dtype)

    def _reduced(self, d_head_VD):
        """The sum over all devices of a local gradient, cut as the parameter is."""
        if not self._by_rows:
            if not is_sharded(self._spec):
                return jax.lax.psum(d_head_VD, AXES)
            axis = self._spec.index(SHARDS)
            d_head_VD = jax.lax.psum_scatter(d_head_VD, SHARDS, scatter_dimension=axis, tiled=True)
        return jax.lax.psum(d_head_VD, "data")

    def _score_logits(self, hidden_BTD, head_VD, ids_BT):
        return token_logprob(
            logits(hidden_BTD, head_VD),
            ids_BT,
            temperature=self._plan.temperature,
            valid_vocab=self._plan.valid_vocab,
            impl=self._plan.impl,
            minor="vocab",
        )

    def _logits_gradients(self, params, hidden_BTD, ids_BT, active_BT, data, objective):
        head_VD = self._whole(params)
        scored = lambda hidden_BTD, head_VD: self._score_logits(hidden_BTD, head_VD, ids_BT)
        scores, pull = jax.vjp(scored, hidden_BTD, head_VD)

        def summed(logprob_BT, entropy_BT):
            loss_BT = objective(logprob_BT, entropy_BT, data)
            return jnp.where(active_BT, loss_BT, 0.0).sum()

        d_logprob_BT, d_entropy_BT = jax.grad(summed, argnums=(0, 1))(
            scores.logprob, scores.entropy
        )
        d_hidden_BTD, d_head_VD = pull(
            TokenLogprob(d_logprob_BT, jnp.zeros_like(d_logprob_BT), d_entropy_BT)
        )
        return scores, d_hidden_BTD, d_head_VD.astype(jnp.float32)
