"""Times episodes of several turns, with and without keys and values parked between the turns.

    python -m benchmarks.decode.episodes
    python -m benchmarks.decode.episodes --episodes 64 --tools 0.1,2 --shape demo

Groups of episodes share their first prompt, as the completions of a training prompt do. Every turn
draws `--new` tokens from all tokens before it; the environment adds `--answer` tokens. Weights and
tokens are random, in float32, so that both ways must draw the same tokens. The two are run in turn
after a pass that compiles; times are medians.

With `--tools LOW,HIGH` an answer takes a lognormal time with 95 % between these seconds, `--slots`
are fewer than the episodes, and one that has ended is followed by another. Said is then how full
the slots are, from the first answer on: the share of their token steps that drew a token, times the
share of the time in which the engine had anything to do.
"""

import argparse
import dataclasses
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.decode.engine_passes import Bench
from benchmarks.decode.model_shapes import SHAPES
from benchmarks.decode.variants import Variant
from benchmarks.decode.weights import random_params
from benchmarks.report_file import check_report_file, write_report
from driver.chip_plan.published_models import with_layers
from rollout_worker.engine.decode_request import DecodeRequest, FinishedRow
from rollout_worker.engine.engine import EngineCounts
from rollout_worker.engine.engine_limits import EngineLimits
from rollout_worker.engine.layout import Layout, make_mesh

NORMAL_95 = 1.96
"""Standard deviations within which 95 % of a normal distribution lie."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What every episode is."""

    group: int
    turns: int
    new: int
    history: int
    answer: int
    vocabulary: int

    @property
    def longest(self) -> int:
        """Tokens at the end of the last turn."""
        return self.history + self.turns * self.new + (self.turns - 1) * self.answer


@dataclasses.dataclass(frozen=True)
class Played:
    """What a pass over episodes took."""

    seconds: float
    idle_s: float
    """In which the engine had nothing to do."""
    counts: EngineCounts
    tokens: dict[str, np.ndarray]
    """Drawn by each request's rows."""

    @property
    def occupancy(self) -> float:
        """Share of the slots' time that drew tokens."""
        return self.counts.occupancy * (1 - self.idle_s / self.seconds)


class Player:
    """Plays episodes on an engine."""

    def __init__(self, bench: Bench, shape: Shape, tool_s: Callable[[], float]):
        self._engine, self._bench, self._shape = bench.engine, bench, shape
        self._tool_s = tool_s
        self._due: list[tuple[float, DecodeRequest]] = []
        self._histories: dict[str, np.ndarray] = {}
        self._tokens: dict[str, np.ndarray] = {}

    def play(self, groups: int, *, endless: bool = False) -> Played:
        """Plays groups to their end.

        Args:
            endless: groups that end are followed by others, until as many episodes have ended; the
                time counts from the first answer on.
        """
        self._due, self._tokens = [], {}
        numbers = itertools.count()
        for _ in range(groups):
            self._begin(next(numbers))
        ended, idle_s, started = 0, 0.0, time.perf_counter()
        self._engine.counts = EngineCounts()
        answered = False
        while ended < groups * self._shape.group:
            idle_s += self._submit_due()
            for row in self._engine.step():
                if endless and not answered:
                    answered, idle_s, started = True, 0.0, time.perf_counter()
                    self._engine.counts = EngineCounts()
                if self._goes_on(row):
                    continue
                ended += 1
                if endless and ended % self._shape.group == 0:
                    self._begin(next(numbers))
        seconds = time.perf_counter() - started
        counts, tokens = self._engine.counts, self._tokens
        self._clear()
        return Played(seconds, idle_s, counts, tokens)

    def _begin(self, number: int) -> None:
        rng = np.random.default_rng(number)
        prompt = rng.integers(0, self._shape.vocabulary, self._shape.history, dtype=np.int32)
        samples = tuple(range(self._shape.group))
        self._due.append((0.0, self._request(f"{number}", 0, samples, prompt)))

    def _request(self, name: str, turn: int, samples: tuple[int, ...], tokens) -> DecodeRequest:
        (request,) = self._bench.requests(tokens[None], [self._shape.new])
        request_id = f"{name}/{samples[0]}/{turn}"
        self._histories[request_id] = tokens
        return dataclasses.replace(
            request,
            request_id=request_id,
            prompt_id=1000 * int(name) + turn,
            samples=samples,
            episode=name,
        )

    def _submit_due(self) -> float:
        """Submits what has been answered; returns the seconds waited because nothing else was
        left to do.
        """
        waited = 0.0
        if not self._engine.pending and self._due:
            waited = max(0.0, min(when for when, _ in self._due) - time.perf_counter())
            time.sleep(waited)
        now = time.perf_counter()
        self._engine.submit_requests([request for when, request in self._due if when <= now])
        self._due = [one for one in self._due if one[0] > now]
        return waited

    def _goes_on(self, row: FinishedRow) -> bool:
        """Has the environment answer a row; returns whether another turn follows."""
        name, _, turn = row.request_id.split("/")
        self._tokens[f"{name}/{row.sample_index}/{turn}"] = row.token_ids
        number = int(turn) + 1
        if number == self._shape.turns:
            return False
        seed = [int(name), row.sample_index, number]
        answer = np.random.default_rng(seed).integers(
            0, self._shape.vocabulary, self._shape.answer, dtype=np.int32
        )
        tokens = np.concatenate([self._histories[row.request_id], row.token_ids, answer])
        request = self._request(name, number, (row.sample_index,), tokens)
        self._due.append((time.perf_counter() + self._tool_s(), request))
        return True

    def _clear(self) -> None:
        for name in {request_id.split("/")[0] for request_id in self._histories}:
            self._engine.end_episode(name)
        for request_id in self._histories:
            self._engine.abort_request(request_id)
        while self._engine.pending:
            self._engine.step()
        self._histories = {}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 1 where the two ways drew other tokens."""
    given = _parser().parse_args(argv)
    try:
        check_report_file(given.json)
        report = measure(given)
    except ValueError as error:
        print(f"episodes: {error}", file=sys.stderr)
        return 2
    write_report(report, given.json, [f"{name}: {value}" for name, value in report.items()])
    return 0 if report.get("same_tokens", True) else 1


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The report of what the command line asks for.

    Raises:
        ValueError: if the sizes do not fit each other.
    """
    if given.episodes % given.group:
        raise ValueError(f"--episodes {given.episodes} must be a multiple of --group {given.group}")
    model = with_layers(SHAPES[given.shape], given.layers)
    shape = Shape(
        group=given.group,
        turns=given.turns,
        new=given.new,
        history=given.history,
        answer=given.answer,
        vocabulary=model.vocab_size,
    )
    layout = Layout(model, make_mesh(jax.devices()[:1], 1, 1), np.dtype(np.float32))
    params = random_params(layout, 0)
    groups = given.episodes // given.group

    def player(parked: int) -> Player:
        limits = EngineLimits(
            max_prompt_tokens=shape.longest - shape.new,
            max_new_tokens=shape.new,
            cache_tokens=shape.longest,
            goes_on=True,
            parked=parked,
        )
        variant = Variant(compute_dtype="float32", segment_tokens=given.segment_tokens)
        bench = Bench(layout, params, variant, limits, slots=given.slots, seed=0)
        return Player(bench, shape, _tools(given.tools))

    if given.tools is not None:
        busy = player(given.parked)
        busy.play(1)  # compiles
        played = busy.play(groups, endless=True)
        return {
            "occupancy": played.occupancy,
            "of_token_steps": played.counts.occupancy,
            "idle_share": played.idle_s / played.seconds,
            "seconds": played.seconds,
            **_reuse(played.counts),
        }
    ways = {"parked": player(given.parked), "anew": player(0)}
    passes: dict[str, list[Played]] = {name: [] for name in ways}
    for repeat in range(given.repeat + 1):
        for name, one in ways.items():
            played = one.play(groups)
            if repeat or not given.repeat:
                passes[name].append(played)
    seconds = {name: statistics.median(one.seconds for one in own) for name, own in passes.items()}
    parked, anew = (own[-1] for own in passes.values())
    return {
        "episodes_per_s": {name: given.episodes / own for name, own in seconds.items()},
        "ratio": seconds["anew"] / seconds["parked"],
        "same_tokens": _same(parked.tokens, anew.tokens),
        "parked": _reuse(parked.counts),
        "anew": _reuse(anew.counts),
    }


def _reuse(counts: EngineCounts) -> dict[str, int]:
    return {"prefilled_tokens": counts.prefilled_tokens, "reused_tokens": counts.reused_tokens}


def _same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(tokens, other[name]) for name, tokens in one.items()
    )


def _tools(bounds: tuple[float, float] | None) -> Callable[[], float]:
    """Draws the seconds that an answer takes."""
    if bounds is None:
        return lambda: 0.0
    low, high = map(math.log, bounds)
    rng = np.random.default_rng(0)
    return lambda: float(rng.lognormal((low + high) / 2, (high - low) / (2 * NORMAL_95)))


def _bounds(text: str) -> tuple[float, float]:
    low, high = map(float, text.split(","))
    if not 0 < low < high < math.inf:
        raise ValueError
    return low, high


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode.episodes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", choices=list(SHAPES), default="smollm2")
    add("--layers", type=int, help="of the shape (default: all)")
    for name, value, what in (
        ("episodes", 16, "in flight"),
        ("group", 8, "episodes of a prompt"),
        ("slots", 16, "of the engine"),
        ("turns", 6, "of an episode"),
        ("new", 64, "tokens of a turn"),
        ("history", 512, "tokens of the first prompt"),
        ("answer", 16, "tokens between two turns"),
        ("parked", 64, "entries"),
        ("segment-tokens", 64, "most token steps of a segment"),
        ("repeat", 3, "passes of each way"),
    ):
        add(f"--{name}", type=int, default=value, metavar="N", help=f"{what} (%(default)s)")
    add("--tools", type=_bounds, metavar="LOW,HIGH", help="seconds; measures how full slots are")
    add("--json", metavar="FILE", help="writes the report; - prints it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
