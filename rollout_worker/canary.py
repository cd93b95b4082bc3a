"""The rollout worker's half of the canary: scores the probe with the live inference copy.

It compiles a program of its own, which is not one of the engine's: the same model, layout and
dtypes as in prefill and decoding, without a cache.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.probe import (
    CanaryResult,
    ProbeScores,
    compare,
    precision,
    probe_direction,
    score_probe,
    whole_head,
)
from models.transformer import Params
from rollout_worker.engine.layout import embed
from rollout_worker.engine.slots import DecodeSpec, over_lanes
from services.process.phase_clock import PhaseClock
from services.wire.messages import Canary

BOUNDS = {"float32": 1e-3, "bfloat16": 2.0}
"""Default bound by the coarser precision of both sides, in nats.

Measured on SmolLM2-135M (30 layers) with correct weights, the largest gap of a logprob is 0.57 in
bfloat16, with either side in float32 or sharded over 3 devices, and 2e-6 if both are in float32; on
the demo's 3 layers 0.14 and 0. Two exchanged layers give 5 to 18 nats.
"""
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.15}
"""Of the fingerprints, likewise: with correct weights they differ by up to 0.055 in bfloat16."""


class CanaryCheck:
    """Scores the probe under a worker's parameters and compares the scores with the learner's."""

    def __init__(self, spec: DecodeSpec, clock: PhaseClock, *, bound: float | None = None):
        """Args:
        spec: of the engine that samples.
        clock: gets the seconds of `compile`.
        bound: largest gap of a logprob that passes, in nats; None takes the default of the dtypes.
        """
        self._spec = spec
        self._clock = clock
        self._bound = bound
        platform = spec.layout.mesh.devices.flat[0].platform
        self._precision = precision(spec.compute_dtype, platform)
        self._compiled: dict[tuple[int, ...], jax.stages.Compiled] = {}

    def check_policy(self, params: Params, published: Canary) -> CanaryResult:
        """Compares every lane's copy of the policy with the learner's; the worst one counts.

        Args:
            params: the live inference copy, made by the layout of `spec`.
            published: the learner's scores, from the manifest of this version.

        Raises:
            ValueError: if the probe is not for this model.
        """
        self._check_belongs(published)
        theirs = ProbeScores(published.logprobs, published.fingerprints)
        exact = self._precision == published.precision == "float32"
        coarser = "float32" if exact else "bfloat16"
        bound = BOUNDS[coarser] if self._bound is None else self._bound
        results = [
            compare(theirs, lane, bound=bound, tolerance=TOLERANCES[coarser])
            for lane in self._probe_scores(params, published.token_ids)
        ]
        failed = [result for result in results if not result.passed]
        return max(failed or results, key=lambda result: result.gap_max)

    def _probe_scores(self, params: Params, token_ids: np.ndarray) -> list[ProbeScores]:
        """The scores of each lane as numpy arrays.

        Args:
            token_ids: int32 [B, T], below the model's vocabulary.
        """
        program = self._compiled.get(token_ids.shape)
        if program is None:
            with self._clock.phase("compile"):
                program = self._compiled[token_ids.shape] = self._compile(token_ids.shape)
        scores = jax.device_get(program(params, token_ids))
        B = len(token_ids)
        return [
            ProbeScores(
                scores.logprob_BT[lane * B : (lane + 1) * B],
                scores.fingerprint_LB2[:, lane * B : (lane + 1) * B],
            )
            for lane in range(self._spec.lanes)
        ]

    def _compile(self, shape: tuple[int, ...]) -> jax.stages.Compiled:
        spec = self._spec
        direction = probe_direction(shape[1], spec.layout.config.hidden_size)
        # As in prefill: XLA:CPU has bfloat16 products of some shapes only.
        operand_dtype = jnp.dtype("float32") if spec.wide_cache else spec.attention_dtype

        def scored(params, token_ids_BT):
            return score_probe(
                params,
                spec.layout.config,
                token_ids_BT,
                direction,
                compute_dtype=spec.compute_dtype,
                operand_dtype=operand_dtype,
                product_dtype=jnp.dtype("float32"),
                embed=embed,
                score_tokens=whole_head(spec.valid_vocab),
            )

        by_sequence: Any = 0
        after_layers: Any = 1
        function = over_lanes(scored, spec, (None, None), ProbeScores(by_sequence, after_layers))
        with jax.set_mesh(spec.layout.mesh):
            return (
                jax.jit(function)
                .lower(spec.layout.abstract_params(), jax.ShapeDtypeStruct(shape, jnp.int32))
                .compile()
            )

    def _check_belongs(self, published: Canary) -> None:
        B, T = published.token_ids.shape
        layers, vocab = self._spec.layout.config.num_layers, self._spec.valid_vocab
        ids = published.token_ids
        if published.fingerprints.shape != (layers + 1, B, 2) or published.logprobs.shape != (
            B,
            T - 1,
        ):
            raise ValueError(
                f"a canary of {B} sequences of {T} tokens for {layers} layers has fingerprints "
                f"{[layers + 1, B, 2]} and logprobs {[B, T - 1]}, got "
                f"{list(published.fingerprints.shape)} and {list(published.logprobs.shape)}: is "
                "the learner's model another one?"
            )
        if ids.min() < 0 or ids.max() >= vocab:
            raise ValueError(
                f"a canary's ids must lie in 0..{vocab - 1}, got {ids.min()}..{ids.max()}: is the "
                "learner's tokenizer another one?"
            )
