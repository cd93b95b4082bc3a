"""Makes the demo's model: a small Qwen2 that can calculate but mostly guesses.

    python -m deploy.demo.make_model [--output deploy/demo/model]

Supervised training teaches two kinds of answers. A worked answer writes one line per operation and
is mostly right; a short answer states a result at once and is mostly wrong, since little training
goes into adding five numbers at once. Worked answers are taught first, then short ones, which stay
more frequent. So reinforcement learning can find that worked answers pay. It does not improve the
arithmetic: final accuracy is about that of the worked answers before it.

The problems are reasoning-gym's `chain_sum`, from seeds that data.train and data.eval of
deploy/runs/demo_cpu.yaml do not reach, without the 200 held-out questions. The same versions on the
same machine write the same bytes.

Dimension key:
    S: optimiser steps
    B: rows of one step
    T: tokens of one row
    V: vocabulary
"""

import argparse
import dataclasses
import itertools
import pathlib
import random
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import optax.contrib
import reasoning_gym
import transformers
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel

from models.config import ModelConfig
from models.files.checkpoint import save_model, to_named
from models.tokenizer import Tokenizer
from models.transformer import Params, forward, head_weight, init_params, logits, packed_attend

OUTPUT = pathlib.Path(__file__).with_name("model")

SYSTEM_PROMPT = "Give the answer after ####."
TASK = {"min_terms": 4, "max_terms": 5, "min_digits": 1, "max_digits": 1}
HELD_OUT_SEED, HELD_OUT_SIZE = 30_000_800, 200
FIRST_SEED = 50_000_000
"""reasoning-gym draws item i from seed + i: a data set is a range of seeds."""

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
WORDS = (
    *("system", "user", "assistant", " = ", " + ", " - ", " =", ": ", "#### ", " ####"),
    *("State", " the", " final", " answer", " to", " following", " arithmetic", " problem"),
    *("Give", " after"),
    *(str(number) for number in range(10, 100)),
)
"""One token each: what the demo's prompts and answers are written in."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One part of the warm start: its problems, its habits, its optimiser steps."""

    steps: int
    rows: int = 32
    row_tokens: int = 76
    terse_fraction: float
    """Share of the answers that name the result at once."""
    learning_rate: float
    seed: int
    """Offset of the problems above FIRST_SEED, and seed of the choice between the habits."""


CALCULATE = Stage(steps=320, terse_fraction=0.0, learning_rate=2e-2, seed=0)
GUESS = Stage(steps=60, terse_fraction=0.6, learning_rate=1e-3, seed=1_000_000)


def model_config(vocab_size: int) -> ModelConfig:
    """1.25 M parameters, wide and shallow: trains no slower than 1.03 M in four narrower layers."""
    return ModelConfig(
        model_type="qwen2",
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        qkv_bias=True,
    )


def build_tokenizer() -> Tokenizer:
    """The demo's words and the numbers to 99 as one token each, any other text as its bytes.

    Loading a Qwen2 folder, transformers takes vocabulary, merges and added tokens from
    tokenizer.json but puts Qwen2's own rule for words in place of the file's. Hence the words are
    added tokens, which are found before any such rule, and there are no merges.
    """
    vocab = {byte: i for i, byte in enumerate(sorted(ByteLevel.alphabet()))}
    no_unknown: Any = None  # annotated as str, but a byte-level vocabulary has none
    backend = transformers.Qwen2Tokenizer(
        vocab=vocab, merges=[], unk_token=no_unknown, eos_token=END, pad_token=PAD
    )
    backend.add_tokens([START], special_tokens=True)
    words: list[Any] = [AddedToken(word, normalized=False) for word in WORDS]
    backend.add_tokens(words)
    backend.chat_template = CHAT_TEMPLATE
    return Tokenizer(backend, source="the demo")


def worked_lines(expression: str) -> list[str]:
    """One line per operation, left to right: "4 + 7 - 9" gives "4 + 7 = 11" and "11 - 9 = 2"."""
    first, *rest = expression.split()
    total, lines = int(first), []
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(term) if operator == "+" else total - int(term)
        lines.append(f"{total} {operator} {term} = {result}")
        total = result
    return lines


def held_out_questions() -> frozenset[str]:
    """The questions of data.eval, which the warm start must not see."""
    problems = reasoning_gym.create_dataset(
        "chain_sum", seed=HELD_OUT_SEED, size=HELD_OUT_SIZE, **TASK
    )
    return frozenset(problem["question"] for problem in problems)


def conversations(stage: Stage) -> Iterator[tuple[str, str]]:
    """The stage's `steps x rows` pairs of a question and an answer, without its end token."""
    count = stage.steps * stage.rows
    problems = reasoning_gym.create_dataset(
        "chain_sum", seed=FIRST_SEED + stage.seed, size=count + HELD_OUT_SIZE, **TASK
    )
    held_out = held_out_questions()
    allowed = (problem for problem in problems if problem["question"] not in held_out)
    habit = random.Random(stage.seed)
    for problem in itertools.islice(allowed, count):
        terse = habit.random() < stage.terse_fraction
        lines = [] if terse else worked_lines(problem["metadata"]["expression"])
        yield problem["question"], "\n".join([*lines, f"#### {problem['answer']}"])


def stage_batches(tokenizer: Tokenizer, stage: Stage) -> tuple[np.ndarray, np.ndarray]:
    """One conversation per row, padded at the end; the loss counts the answer and its end token.

    Returns:
        token ids int32 [S, B, T] and loss mask bool [S, B, T].

    Raises:
        ValueError: if a conversation is longer than a row.
    """
    shape = (stage.steps, stage.rows, stage.row_tokens)
    ids_NT = np.full((stage.steps * stage.rows, stage.row_tokens), tokenizer.pad_id, np.int32)
    counted_NT = np.zeros(ids_NT.shape, bool)
    for row, (question, answer) in enumerate(conversations(stage)):
        asked = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": question},
        ]
        prompt = tokenizer.encode_chat(asked)
        whole = tokenizer.encode_chat([*asked, {"role": "assistant", "content": answer}])
        # What follows the end token belongs to the next turn: a line feed and its header.
        end = len(prompt) + whole[len(prompt) :].index(*tokenizer.stop_ids) + 1
        if end > stage.row_tokens:
            raise ValueError(f"a row of {stage.row_tokens} tokens cannot hold {end}: {question!r}")
        ids_NT[row, :end] = whole[:end]
        counted_NT[row, len(prompt) : end] = True
    return ids_NT.reshape(shape), counted_NT.reshape(shape)


def layer_matrices(params: Any) -> Any:
    """Marks the stacked [L, out, in] matrices for Muon; embedding, norms and biases get Adam."""
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=2, output_axis=1)
    return jax.tree.map(lambda leaf: matrix if leaf.ndim == 3 else None, params)


def train(
    params: Params,
    config: ModelConfig,
    ids_SBT: np.ndarray,
    counted_SBT: np.ndarray,
    learning_rate: float,
) -> tuple[Params, jax.Array]:
    """Supervised steps over the given batches, with warm-up and cosine decay.

    Muon keeps this script short: on single lines of this arithmetic it had, after about 75 steps,
    the loss that Adam (the better of two rates) had after 300.

    Returns:
        the new parameters and the loss of every step in nats per counted token, float32 [S].
    """
    S, B, T = ids_SBT.shape
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, max(S // 20, 1), S, 0.05 * learning_rate
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            schedule,
            adam_b2=0.98,
            adam_learning_rate=lambda count: 0.1 * schedule(count),
            muon_weight_dimension_numbers=layer_matrices,
        ),
    )
    attend = packed_attend(jnp.ones((B, T), jnp.int32), operand_dtype=jnp.float32)
    position_BT = jnp.broadcast_to(jnp.arange(T), (B, T))

    def mean_loss(params, ids_BT, counted_BT):
        hidden_BTD, _ = forward(
            params, config, ids_BT, position_BT, attend, compute_dtype=jnp.float32
        )
        logits_BTV = logits(hidden_BTD[:, :-1], head_weight(params))
        loss_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, ids_BT[:, 1:])
        return jnp.mean(loss_BT, where=counted_BT[:, 1:])

    def step(carry, batch):
        params, state = carry
        loss, gradient = jax.value_and_grad(mean_loss)(params, *batch)
        update, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, update), state), loss

    scan = jax.jit(lambda carry, batches: jax.lax.scan(step, carry, batches))
    (params, _), loss_S = scan((params, optimizer.init(params)), (ids_SBT, counted_SBT))
    return params, loss_S


def main() -> None:
    """Trains the model and writes its folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    output = parser.parse_args().output
    tokenizer = build_tokenizer()
    config = model_config(tokenizer.vocab_size)
    params = init_params(jax.random.key(0), config)
    print(f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters")
    for name, stage in (("calculate", CALCULATE), ("guess", GUESS)):
        started = time.monotonic()
        params, loss_S = train(
            params, config, *stage_batches(tokenizer, stage), stage.learning_rate
        )
        last = float(loss_S[-10:].mean())
        print(f"{name}: loss {last:.3f} nats a token, {time.monotonic() - started:.0f} s")
    stored = jax.tree.map(lambda leaf: np.asarray(leaf, ml_dtypes.bfloat16), params)
    save_model(output, config, to_named(stored, config), tokenizer)
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
