"""Products for a model that has a calculator, and made-up conversations to warm it up.

    python -m deploy.demo.calculator --output runs/calculator

writes the records of deploy/runs/calculator_cpu.yaml and those of deploy/demo/calculator_sft.yaml,
which come in two parts. In the first, every answer is what the calculator returned: the model
learns to write a call and to copy. In the second, which is shorter, three of four answers are a
guess without a call, and wrong but for luck. A model that has learned both can find out by
reinforcement learning that calling pays.

The environment is the built-in one, with the built-in calculator: nothing of it is here.
"""

import argparse
import itertools
import pathlib
import random
from collections.abc import Iterator

from deploy.demo.guessing import write_records
from rollout_worker.environments.tools.calculator import calculator
from rollout_worker.environments.tools.function_schemas import schema_of

SMALLEST, LARGEST = 12, 98
"""Of the factors: each is one token of the demo's tokenizer."""
HELD_OUT = 200
"""Products that neither the warm start nor the run has."""
CALLS, MIXED = 5760, 1920
"""Conversations of the two parts."""
CALLING = 0.25
"""Share of the second part that calls."""
GUESS_ERROR = 0.2
"""A guess is off by at most this share of the product."""
TOOLS = [schema_of(calculator)]


def products() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The pairs of factors to train on, and those that are held out; in an order of chance."""
    numbers = range(SMALLEST, LARGEST + 1)
    pairs = list(itertools.product(numbers, numbers))
    random.Random(0).shuffle(pairs)
    return pairs[HELD_OUT:], pairs[:HELD_OUT]


def question(left: int, right: int) -> str:
    """What the model is asked."""
    return f"What is {left}*{right}?"


def call(left: int, right: int) -> str:
    """A call of the calculator as Llama 3 writes it: of the formats the one with fewest tokens."""
    return f'<|python_tag|>calculator.call(expression="{left}*{right}")'


def conversation(left: int, right: int, draw: random.Random, calling: float) -> dict:
    """A record of supervised training.

    Args:
        calling: the probability of a call; otherwise the answer is a guess.
    """
    messages = [{"role": "user", "content": question(left, right)}]
    if draw.random() < calling:
        result = calculator(f"{left}*{right}")
        messages += [
            {"role": "assistant", "content": call(left, right)},
            {"role": "tool", "content": result},
            {"role": "assistant", "content": result},
        ]
    else:
        guess = round(left * right * draw.uniform(1 - GUESS_ERROR, 1 + GUESS_ERROR))
        messages.append({"role": "assistant", "content": str(guess)})
    return {"messages": messages, "tools": TOOLS}


def conversations() -> Iterator[dict]:
    """Both parts, in their order."""
    draw = random.Random(1)
    known, _ = products()
    for place in range(CALLS + MIXED):
        yield conversation(*draw.choice(known), draw, 1.0 if place < CALLS else CALLING)


def problems(pairs: list[tuple[int, int]]) -> Iterator[dict]:
    """Records of a run."""
    for left, right in pairs:
        yield {"question": question(left, right), "answer": str(left * right)}


def main() -> None:
    """Writes the records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/calculator"))
    folder = parser.parse_args().output
    train, held_out = products()
    write_records(folder / "conversations.jsonl", conversations())
    write_records(folder / "train.jsonl", problems(train))
    write_records(folder / "eval.jsonl", problems(held_out))
    print(f"wrote {folder}/conversations.jsonl, train.jsonl and eval.jsonl")


if __name__ == "__main__":
    main()
