"""The learner's half of the canary, a check that a worker samples with the published weights.

A fixed set of probe tokens is scored here from the parameters that are published, and by the worker
from the weights that it received; different scores show an error on the way.

The probe runs on the learner's mesh with the train step's own gathers and head, from the master
weights rounded as the wire rounds them, so that it also shows errors on the way out: in the cast,
the copy to the host, the publication.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from learner.update.head import HeadPlan, PolicyHead
from learner.update.sharding import make_embed, make_gather
from models.adapter import has_adapter
from models.config import ModelConfig
from models.probe import ProbeScores, policy_probe, probe_direction, score_probe
from models.transformer import Params
from services.wire.messages import Canary


def make_canary(
    mesh: Mesh,
    specs: Params,
    config: ModelConfig,
    *,
    head: HeadPlan,
    compute_dtype: jnp.dtype,
    wire_dtype: np.dtype,
    adapter_scale: float = 1.0,
) -> Callable[[Params], ProbeScores]:
    """Builds `canary(params) -> ProbeScores`, the same on every device.

    Args:
        head: as in the train step; its temperature is replaced by 1.
        wire_dtype: what parameters are published as.
        adapter_scale: as `make_gather` has it.
    """
    # XLA may drop a cast that is reversed at once; it keeps reduce_precision. Where the
    # compute dtype is the narrower one, its own cast is the same rounding.
    wire = jnp.finfo(wire_dtype)
    rounds = wire.bits < jnp.finfo(compute_dtype).bits
    kept = partial(jax.lax.reduce_precision, exponent_bits=wire.nexp, mantissa_bits=wire.nmant)
    rounded = lambda tree: jax.tree.map(kept, tree) if rounds else tree
    whole = make_gather(specs, compute_dtype, adapter_scale)
    gather = lambda name, tree: rounded(whole(name, tree))
    look_up_cut = make_embed(specs, compute_dtype)
    embed = None
    if look_up_cut is not None:
        # Looking up is exact, so that rounding may wait: only few rows are looked up.
        embed = lambda tree, ids: rounded(look_up_cut(tree, ids))
    policy_head = PolicyHead(head._replace(temperature=1.0), mesh, specs, gather)

    def score_tokens(params, hidden_BTD, ids_BT):
        params = {policy_head.name: rounded(params[policy_head.name])}
        every = jnp.ones(ids_BT.shape, bool)
        return policy_head.scores(params, hidden_BTD, ids_BT, every).logprob

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs, P(), P()),
        out_specs=ProbeScores(P(), P()),
        check_vma=False,
    )
    def scored(params, token_ids_BT, direction_TD):
        return score_probe(
            params,
            config,
            token_ids_BT,
            direction_TD,
            compute_dtype=compute_dtype,
            operand_dtype=compute_dtype,
            score_tokens=score_tokens,
            gather=gather,
            embed=embed,
        )

    adapter = has_adapter(specs)
    token_ids = policy_probe(head.valid_vocab or config.vocab_size, adapter=adapter)
    direction = probe_direction(token_ids.shape[1], config.hidden_size)
    return jax.jit(lambda params: scored(params, token_ids, direction))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredProbe:
    """The probe under one policy version; the scores may still be on their way."""

    scores: ProbeScores
    valid_vocab: int
    """That of `make_canary`."""
    precision: str
    adapter: bool = False
    """Whether the policy has one."""

    def record(self) -> Canary:
        """What travels with the manifest; waits for the scores."""
        logprobs, fingerprints = jax.device_get(self.scores)
        return Canary(
            token_ids=policy_probe(self.valid_vocab, adapter=self.adapter),
            logprobs=np.asarray(logprobs),
            fingerprints=np.asarray(fingerprints),
            precision=self.precision,
        )
