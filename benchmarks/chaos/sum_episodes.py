"""Episodes of several turns to disturb: an environment that asks for sums, and its records.

What it answers depends on the record and the messages alone. While it is at a step that another
turn follows, a file in a folder says so.
"""

import asyncio
import contextlib
import itertools
import json
import os
import pathlib
import random
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from rollout_worker.rewards.scorers import gsm8k_answer

SUMS = 3
"""Of an episode."""
TERMS = (4, 5)
"""Fewest and most of a sum."""
INSTRUCTION = "Give the answer after ####."
QUESTION = "State the final answer to the following arithmetic problem: {} ="
FIRST_TURN = 1
"""Turn whose wrong answer is met by hanging, where the record says so."""
_FOR_EVER_S = 1e6


class SumEpisodes:
    """Asks for one sum after the other; each right answer is worth 1."""

    _numbers = itertools.count()

    def __init__(self, folder: str, seconds: float):
        """Args:
        folder: gets a file while a step is under way that another turn follows.
        seconds: that such a step takes.
        """
        self._folder = pathlib.Path(folder)
        self._seconds = seconds

    async def reset(self, item, seed):
        """Begins with the first sum."""
        self._sums, self._hangs, self._turns = item["sums"], item["hangs"], 0
        return [{"role": "system", "content": INSTRUCTION}, *self._question()]

    async def step(self, message):
        """Takes its time, or for ever at a wrong first answer where the record hangs."""
        right = _is_right(message["content"], self._sums[self._turns])
        self._turns += 1
        if self._turns == SUMS:
            return [], float(right), True, {}
        with self._at_work():
            if self._hangs and self._turns == FIRST_TURN and not right:
                (self._folder / f"{zlib.crc32(self._sums[0].encode())}.hung").touch()
                await asyncio.sleep(_FOR_EVER_S)
            await asyncio.sleep(self._seconds)
        return self._question(), float(right), False, {}

    def _question(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": QUESTION.format(self._sums[self._turns])}]

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        mark = self._folder / f"{os.getpid()}.{next(self._numbers)}.step"
        mark.touch()
        try:
            yield
        finally:
            mark.unlink()


class StepMark(NamedTuple):
    """A step that is under way, or was when its process ended."""

    pid: int
    path: pathlib.Path


def steps_under_way(folder: pathlib.Path) -> list[StepMark]:
    """Of all processes, those that have ended included."""
    return [StepMark(int(path.name.split(".")[0]), path) for path in folder.glob("*.step")]


def hung_records(folder: pathlib.Path) -> int:
    """Records whose environments have begun to hang."""
    return len(list(folder.glob("*.hung")))


def sum_of(text: str) -> int:
    """The value of `4 - 2 + 7`."""
    return sum(int(term) for term in text.replace("- ", "-").replace("+ ", "").split())


def write_records(path: pathlib.Path, count: int, hanging: frozenset[int] = frozenset()) -> None:
    """Writes the records of a run.

    Args:
        hanging: lines, counted from 0, whose environments hang at a wrong first answer.
    """
    draw = random.Random(0)
    lines = []
    for line in range(count):
        sums = [_sum(draw) for _ in range(SUMS)]
        lines.append({"question": sums[0], "sums": sums, "hangs": line in hanging})
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def _is_right(text: str, asked: str) -> bool:
    gold = str(sum_of(asked))
    return bool(gsm8k_answer(text, answer=gold, prompt=asked, item={})["value"])


def _sum(draw: random.Random) -> str:
    first, *others = (draw.randint(1, 9) for _ in range(draw.randint(*TERMS)))
    return " ".join([str(first), *(f"{draw.choice('+-')} {term}" for term in others)])
