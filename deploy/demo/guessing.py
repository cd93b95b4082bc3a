"""A guessing game, higher or lower, as an environment, and made-up games to warm a model up.

    python -m deploy.demo.guessing --output runs/guessing

writes the records of deploy/runs/guessing_cpu.yaml and the games of deploy/demo/guessing_sft.yaml,
which come in two parts. In the first, every player halves what is left, which always finds the
number in 5 guesses: the model learns it by heart, since a number decides the whole game. In the
second, most players guess without listening. A model that has learned both can find out by
reinforcement learning which one wins. From the second part alone it would not learn to halve well
enough to win by it.
"""

import argparse
import json
import pathlib
import random
from collections.abc import Iterable, Iterator

LOWEST, HIGHEST = 10, 40
"""Of the numbers: each is one token of the demo's tokenizer, and 31 can be halved 5 times."""
QUESTION = f"Guess {LOWEST} to {HIGHEST}."
GUESSES = 6
LISTENED, MIXED = 1920, 3200
"""Made-up games of the two parts, of which the first is learned within 48 steps of 32."""
LISTENING = 0.25
"""Share of the second part whose player listens."""


class Guessing:
    """The environment: a guess is answered `higher`, `lower`, or by the end of the game."""

    async def reset(self, item, seed):
        """Begins with the question; the record has the number."""
        self.secret, self.left = item["secret"], GUESSES
        return [{"role": "user", "content": item["question"]}]

    async def step(self, message):
        """1 for the number; a game also ends after 6 guesses, and with what is no guess."""
        self.left -= 1
        text = message["content"].strip()
        guess = int(text) if text.isdecimal() else None
        if guess == self.secret:
            return [], 1.0, True, {}
        if guess is None or not self.left:
            return [], 0.0, True, {}
        answer = "higher" if guess < self.secret else "lower"
        return [{"role": "user", "content": answer}], 0.0, False, {}


def play(secret: int, draw: random.Random, listening: float) -> list[dict[str, str]]:
    """A made-up game, won or lost.

    Args:
        listening: the probability that its player listens.
    """
    low, high, listens = LOWEST, HIGHEST, draw.random() < listening
    messages = [{"role": "user", "content": QUESTION}]
    for _ in range(GUESSES):
        guess = (low + high) // 2 if listens else draw.randint(LOWEST, HIGHEST)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == secret:
            break
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
        messages.append({"role": "user", "content": "higher" if guess < secret else "lower"})
    return messages if messages[-1]["role"] == "assistant" else messages[:-1]


def games() -> Iterator[dict]:
    """Records of supervised training: both parts, in their order."""
    draw = random.Random(0)
    for place in range(LISTENED + MIXED):
        listening = 1.0 if place < LISTENED else LISTENING
        yield {"messages": play(draw.randint(LOWEST, HIGHEST), draw, listening)}


def secrets(count: int) -> Iterator[dict]:
    """Records of a run: every number in turn."""
    numbers = range(LOWEST, HIGHEST + 1)
    for index in range(count):
        yield {"question": QUESTION, "secret": numbers[index % len(numbers)]}


def write_records(path: pathlib.Path, records: Iterable[dict]) -> None:
    """One record a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def main() -> None:
    """Writes the records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/guessing"))
    folder = parser.parse_args().output
    write_records(folder / "games.jsonl", games())
    write_records(folder / "train.jsonl", secrets(16 * (HIGHEST - LOWEST + 1)))
    write_records(folder / "eval.jsonl", secrets(HIGHEST - LOWEST + 1))
    print(f"wrote {folder}/games.jsonl, train.jsonl and eval.jsonl")


if __name__ == "__main__":
    main()
