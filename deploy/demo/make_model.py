"""Makes the demo's model: a small Qwen2 that can calculate but mostly guesses.

    python -m deploy.demo.make_model [--output deploy/demo/model]
    python -m deploy.demo.make_model --positions 8320 --output runs/long/model

The second command trains nothing: it copies the model that is there, and lets it take so many
positions. They are rotary, so that no weight depends on their number; beyond the 76 tokens of the
warm start its answers mean nothing.

Supervised training (`python -m learner.sft`) teaches two kinds of answers. A worked answer writes
one line per operation and is mostly right; a short answer states a result at once and is mostly
wrong, since little training goes into adding five numbers at once. Worked answers are taught first,
then short ones, which become more frequent. So reinforcement learning can find that worked answers
pay. It does not improve the arithmetic: final accuracy is about that of the worked answers before
it.

The first number of a sum decides which kind is likelier, 3 to 1, so that greedy decoding is far
from a tie at every sum. With one share for all, greedy accuracy depended on rounding, which grows
from 1e-7 to a tenth of the loss in 100 steps: it was anything from 28 to 89 %.

The problems are reasoning-gym's `chain_sum`, from seeds that data.train and data.eval of
deploy/runs/demo_cpu.yaml do not reach, without the 200 held-out questions. The same versions on the
same machine write the same bytes.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import reasoning_gym
import transformers
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel

from models.config import ModelConfig
from models.files.checkpoint import save_model, to_named
from models.tokenizer import Tokenizer
from models.transformer import init_params

OUTPUT = pathlib.Path(__file__).with_name("model")
SETTINGS = pathlib.Path(__file__).with_name("warm_start.yaml")
ROOT = pathlib.Path(__file__).parents[2]

SYSTEM_PROMPT = "Give the answer after ####."
TASK = {"min_terms": 4, "max_terms": 5, "min_digits": 1, "max_digits": 1}
HELD_OUT_SEED, HELD_OUT_SIZE = 30_000_800, 200
FIRST_SEED = 50_000_000
"""reasoning-gym draws item i from seed + i: a data set is a range of seeds."""
LARGE = 3
"""First number from which a sum is mostly guessed: 7 of 10 sums."""

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
    terse_fractions: tuple[float, float]
    """Share of the answers that name the result at once, for sums that begin below LARGE, and for
    all others."""
    learning_rate: float
    seed: int
    """Offset of the problems above FIRST_SEED, and seed of the choice between the habits."""
    dtype: str = "float32"
    """Of the weights that it leaves."""


CALCULATE = Stage(steps=320, terse_fractions=(0.0, 0.0), learning_rate=2e-2, seed=0)
GUESS = Stage(
    steps=90,
    terse_fractions=(0.25, 0.75),
    learning_rate=5e-3,
    seed=1_000_000,
    dtype="bfloat16",
)


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
        expression = problem["metadata"]["expression"]
        is_large = int(expression.split()[0]) >= LARGE
        terse = habit.random() < stage.terse_fractions[is_large]
        lines = [] if terse else worked_lines(expression)
        yield problem["question"], "\n".join([*lines, f"#### {problem['answer']}"])


def stage_settings(stage: Stage, model: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """Writes the stage's records into a folder.

    Returns:
        what the stage adds to warm_start.yaml, as `--set` takes it.
    """
    records = folder / "records.jsonl"
    with records.open("w", encoding="utf-8") as file:
        for question, answer in conversations(stage):
            file.write(json.dumps({"question": question, "completion": answer}) + "\n")
    return [
        f"run.output_dir={folder / 'run'}",
        f"model.path={model}",
        f"data.train.source={records}",
        f"batch.sequences_per_step={stage.rows}",
        f"learner.optimizer.learning_rate={stage.learning_rate}",
        f"learner.optimizer.warmup_steps={max(stage.steps // 20, 1)}",
        f"checkpoint.export_dtype={stage.dtype}",
    ]


def make(output: pathlib.Path, stages: Sequence[Stage]) -> None:
    """Trains the model, stage by stage, and writes its folder."""
    tokenizer = build_tokenizer()
    config = model_config(tokenizer.vocab_size)
    start = to_named(jax.device_get(init_params(jax.random.key(0), config)), config)
    with tempfile.TemporaryDirectory() as scratch:
        model = pathlib.Path(scratch) / "start"
        save_model(model, config, start, tokenizer)
        for place, stage in enumerate(stages):
            folder = pathlib.Path(scratch) / str(place)
            folder.mkdir()
            command = [sys.executable, "-m", "learner.sft", "--config", str(SETTINGS)]
            for setting in stage_settings(stage, model, folder):
                command += ["--set", setting]
            subprocess.run(command, cwd=ROOT, check=True)
            model = folder / "run" / "export"
        shutil.copytree(model, output, dirs_exist_ok=True)


def lengthen(model: pathlib.Path, output: pathlib.Path, positions: int) -> None:
    """Copies a model's folder, with another number of positions.

    Raises:
        ValueError: if they are fewer than the model has, or output is the model itself.
    """
    content = json.loads((model / "config.json").read_text(encoding="utf-8"))
    least = content["max_position_embeddings"]
    if positions < least:
        raise ValueError(f"--positions {positions} must be at least {least}, as {model} has it")
    if output.resolve() == model.resolve():
        raise ValueError(f"--output {output} is the model to copy: name another folder")
    shutil.copytree(model, output, dirs_exist_ok=True)
    content["max_position_embeddings"] = positions
    (output / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Makes the model of the demo, or a copy of it for longer sequences."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    parser.add_argument(
        "--positions", type=int, help="copies the model for sequences of so many tokens"
    )
    given = parser.parse_args()
    if given.positions is None:
        make(given.output, (CALCULATE, GUESS))
    else:
        try:
            lengthen(OUTPUT, given.output, given.positions)
        except ValueError as error:
            parser.error(str(error))
    print(f"wrote {given.output}")


if __name__ == "__main__":
    main()
