"""How many bytes a delta has after a real optimiser step.

    make smollm2
    python -m learner.delta_bench --model downloads/SmolLM2-135M-Instruct.Q4_1.gguf --lr 1e-6

Trains a model on random completions with random rewards: one Adam update after the other, each of
a published version of its own. What changes in bfloat16 is a matter of the learning rate and of
the weights' sizes, hardly of the data. Prints one row for each update.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels.token_logprob.reference import token_logprob
from learner.config import AlgorithmConfig, LearnerConfig, OptimizerConfig, TrainingSettings
from learner.core import LearnerCore
from models.files.checkpoint import LoadedModel, load_model
from models.transformer import forward, head_weight, logits, packed_attend
from services.process.phase_clock import PhaseClock
from services.weights.delta import apply_delta, encode_delta
from services.weights.digest import layout, tensor_bytes
from services.wire.messages import Completion, FinishReason, Group, TensorSpec

GROUP_SIZE = 4
PROMPT_TOKENS = 8
HEADER = (
    f"{'update':>6}{'elements':>13}{'changed':>10}{'full':>11}{'delta':>11}{'delta/full':>12}"
    f"{'encode':>9}{'apply':>9}  bits"
)


class DeltaRow(NamedTuple):
    """One update, as the wire has it."""

    elements: int
    changed: int
    full_bytes: int
    delta_bytes: int
    encode_s: float
    apply_s: float
    equal: bool

    def __str__(self) -> str:
        return (
            f"{self.elements:>13,}{self.changed / self.elements:>10.3%}"
            f"{self.full_bytes / 1e6:>8.1f} MB{self.delta_bytes / 1e6:>8.2f} MB"
            f"{self.delta_bytes / self.full_bytes:>12.3%}{self.encode_s:>7.2f} s"
            f"{self.apply_s:>7.2f} s  {'equal' if self.equal else 'DIFFERENT'}"
        )


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        loaded = load_model(arguments.model)
    except (ValueError, OSError) as error:
        print(f"delta_bench: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.model}: bfloat16, Adam at a learning rate of {arguments.lr:g}\n{HEADER}")
    rows = []
    for row in deltas(loaded, arguments):
        rows.append(row)
        print(f"{len(rows):>6}{row}", flush=True)
    worst = max(row.delta_bytes / row.full_bytes for row in rows)
    equal = all(row.equal for row in rows)
    print(f"largest delta: {worst:.2%} of a full pull; bits {'equal' if equal else 'DIFFERENT'}")
    return 0 if equal else 1


def deltas(loaded: LoadedModel, arguments: argparse.Namespace) -> Iterator[DeltaRow]:
    """Trains, and compares each version with the one before it."""
    settings = TrainingSettings(
        algorithm=AlgorithmConfig(),
        learner=LearnerConfig(
            microbatch_tokens=GROUP_SIZE * (PROMPT_TOKENS + arguments.tokens),
            compute_dtype="float32",
            optimizer=OptimizerConfig(learning_rate=arguments.lr),
        ),
        total_steps=arguments.updates,
        temperature=1.0,
        valid_vocab=None,
        max_completion_tokens=arguments.tokens,
    )
    core = LearnerCore(settings, loaded.config, loaded.params, devices=jax.devices()[:1])
    rng = np.random.default_rng(arguments.seed)
    specs, before = flat(core.named_weights("bfloat16"))
    for _ in range(arguments.updates):
        core.update(random_groups(core, loaded, rng, arguments), PhaseClock())
        _, after = flat(core.named_weights("bfloat16"))
        yield measured(before, after, specs)
        before = after


def measured(before: np.ndarray, after: np.ndarray, specs: tuple[TensorSpec, ...]) -> DeltaRow:
    """Encodes and applies the delta between two versions' bytes, bfloat16 throughout."""
    started = time.monotonic()
    delta = encode_delta(before, after, specs)
    encoded = time.monotonic()
    made = apply_delta(before, delta, specs)
    applied = time.monotonic()
    return DeltaRow(
        elements=after.size // 2,
        changed=int(np.count_nonzero(before.view(np.uint16) != after.view(np.uint16))),
        full_bytes=after.nbytes,
        delta_bytes=delta.nbytes,
        encode_s=encoded - started,
        apply_s=applied - encoded,
        equal=bool(np.array_equal(made, after)),
    )


def flat(named: Mapping[str, np.ndarray]) -> tuple[tuple[TensorSpec, ...], np.ndarray]:
    """The version as the wire has it: specs, and uint8 of all tensors in their order."""
    specs = layout(named)
    return specs, np.concatenate([tensor_bytes(named[spec.name]) for spec in specs])


def random_groups(
    core: LearnerCore, loaded: LoadedModel, rng: np.random.Generator, arguments: argparse.Namespace
) -> list[Group]:
    """Groups of random tokens with the logprobs of the current policy: all ratios are 1."""
    rows, T = arguments.groups * GROUP_SIZE, PROMPT_TOKENS + arguments.tokens
    token_ids_BT = rng.integers(0, loaded.config.vocab_size, (rows, T), dtype=np.int32)
    for start in range(0, rows, GROUP_SIZE):
        token_ids_BT[start : start + GROUP_SIZE, :PROMPT_TOKENS] = token_ids_BT[
            start, :PROMPT_TOKENS
        ]
    logprob_BT = logprobs_of(core, loaded, token_ids_BT)
    groups = []
    for number in range(arguments.groups):
        first = number * GROUP_SIZE
        groups.append(
            Group(
                run_id="bench",
                group_id=f"{core.policy_version}-{number}",
                attempt=0,
                prompt_id=number,
                epoch=0,
                policy_version=core.policy_version,
                weight_digest="",
                worker="bench",
                prompt_token_ids=token_ids_BT[first, :PROMPT_TOKENS],
                completions=tuple(
                    Completion(
                        sample_index=index,
                        token_ids=token_ids_BT[first + index, PROMPT_TOKENS:],
                        behavior_logprobs=logprob_BT[first + index, PROMPT_TOKENS - 1 :],
                        finish_reason=FinishReason.LENGTH,
                        rewards={},
                        total_reward=float(rng.random()),
                    )
                    for index in range(GROUP_SIZE)
                ),
                phase_s={},
            )
        )
    return groups


def logprobs_of(
    core: LearnerCore, loaded: LoadedModel, token_ids_BT: np.ndarray, rows: int = GROUP_SIZE
) -> np.ndarray:
    """float32 [B, T - 1]: of every token but the first, so many rows at a time."""
    config = loaded.config

    @jax.jit
    def score(params, ids_BT):
        position_BT = jnp.broadcast_to(jnp.arange(ids_BT.shape[1]), ids_BT.shape)
        attend = packed_attend(jnp.ones_like(ids_BT), operand_dtype=jnp.dtype("float32"))
        hidden_BTD, _ = forward(
            params, config, ids_BT, position_BT, attend, compute_dtype=jnp.dtype("float32")
        )
        logits_BTV = logits(hidden_BTD[:, :-1], head_weight(params))
        return token_logprob(logits_BTV, ids_BT[:, 1:]).logprob

    parts = np.split(token_ids_BT, len(token_ids_BT) // rows)
    return np.concatenate([np.asarray(score(core.state.params, part)) for part in parts])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m learner.delta_bench",
        description="Bytes of a weight delta after real optimiser steps.",
    )
    parser.add_argument("--model", required=True, help="HF folder or .gguf file")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate (%(default)g)")
    parser.add_argument("--updates", type=int, default=1, help="optimiser steps (%(default)s)")
    parser.add_argument("--groups", type=int, default=4, help="groups of a step (%(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="of a completion (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
