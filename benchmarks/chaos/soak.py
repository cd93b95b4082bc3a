"""A long asynchronous run whose workers are added and killed, watched for leaks."""

import dataclasses
import json
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import psutil

from benchmarks.chaos.inject import FEWEST, GRACE_S
from benchmarks.chaos.job import ROOT, DriverEnded, DriverJob, WaitTimeout
from benchmarks.chaos.ray_head import running_head

EVERY_S = 10.0
"""Between two changes of the fleet."""
SAMPLE_S = 0.1
"""Between two samples: an update takes some tenths of a second, and memory is lowest between two
updates."""
WARM_UP = 0.25
"""Part of the soak after which memory must have settled."""
WINDOW = 0.2
"""Part of what follows the warm-up in which descriptors are counted, at its start and its end."""
CYCLE_S = 4 * EVERY_S
"""Time in which the fleet goes through all its sizes; no window is shorter."""
LEAST_MINUTES = 2.0
SLOPE_MB_PER_MIN = 1.0
MOST_WORKERS = 3
SETTINGS = (
    "run.steps=1000000",
    "rollout.max_staleness=2",
    "checkpoint.every_steps=50",
    "checkpoint.export_hf=false",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """Memory and descriptors of one process at one moment."""

    at_s: float
    rss_bytes: int
    descriptors: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growth:
    """What one process did after the warm-up."""

    mb_per_min: float
    descriptors: int
    """At the end, less at the start."""

    @property
    def problems(self) -> list[str]:
        """Bounds that are exceeded, one sentence each."""
        found = []
        if self.mb_per_min > SLOPE_MB_PER_MIN:
            found.append(
                f"memory grows by {self.mb_per_min:.2f} MB a minute, at most "
                f"{SLOPE_MB_PER_MIN:g} is allowed"
            )
        if self.descriptors > 0:
            found.append(f"{self.descriptors} file descriptors were leaked")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoakReport:
    """Result of a soak."""

    problems: tuple[str, ...]
    last_line: str


def growth(samples: Sequence[Sample]) -> Growth:
    """Slope of memory by least squares, and the growth of the fewest descriptors, after warm-up.

    An update allocates and frees a hundred megabytes within a second, and every worker has open
    connections. So the least memory of each cycle enters the slope, and the fewest descriptors of
    a window are those that are never closed.

    Raises:
        ValueError: if less than two cycles lie after the warm-up.
    """
    begun, ended = (samples[0].at_s, samples[-1].at_s) if samples else (0.0, 0.0)
    start = begun + WARM_UP * (ended - begun)
    window_s = max(CYCLE_S, WINDOW * (ended - start))
    if ended - start < 2 * window_s:
        raise ValueError(
            f"{ended - start:.0f} s after the warm-up are fewer than the {2 * window_s:g} of two "
            "cycles: soak for 2 minutes or more"
        )

    def within(first_s: float, length_s: float) -> list[Sample]:
        return [sample for sample in samples if first_s <= sample.at_s <= first_s + length_s]

    cycles = [start + CYCLE_S * index for index in range(int((ended - start) / CYCLE_S))]
    lowest = [
        min(within(first_s, CYCLE_S), key=lambda sample: sample.rss_bytes) for first_s in cycles
    ]
    minutes = [sample.at_s / 60 for sample in lowest]
    mean = sum(minutes) / len(minutes)
    spread = sum((minute - mean) ** 2 for minute in minutes)
    slope = sum(
        (minute - mean) * sample.rss_bytes / 1e6
        for minute, sample in zip(minutes, lowest, strict=True)
    )
    ends = within(start, window_s), within(ended - window_s, window_s)
    fewest = [min(sample.descriptors for sample in part) for part in ends]
    return Growth(mb_per_min=slope / spread, descriptors=fewest[1] - fewest[0])


def run_soak(seconds: float, folder: pathlib.Path, say: Callable[[str], None]) -> SoakReport:
    """Soaks for a number of seconds, and ends the run as a scheduler would."""
    samples: dict[str, list[Sample]] = {"driver": [], "learner": []}
    problems: list[str] = []
    changes = steps = 0
    with running_head(folder, {"JAX_COMPILATION_CACHE_DIR": str(folder / "jax-cache")}) as head:
        job = DriverJob(head, folder / "run", SETTINGS)
        try:
            job.submit()
            job.wait_for_step(5, "at the start")
            say(f"soaking for {seconds:g} s")
            changes = _soak(job, seconds, samples, say)
            steps = job.closed_step()
            if (code := job.terminate(GRACE_S)) != 128 + signal.SIGTERM:
                problems.append(f"the driver ended with code {code} after SIGTERM: {job.log}")
        except (DriverEnded, WaitTimeout, LookupError) as error:
            problems.append(str(error))
        finally:
            job.end()
    _write(folder / "soak.jsonl", samples)
    grown = {}
    if not problems:
        grown = {name: growth(taken) for name, taken in samples.items()}
        problems += [f"{name}: {p}" for name, one in grown.items() for p in one.problems]
    parts = [
        f"{name} {one.mb_per_min:+.2f} MB/min {one.descriptors:+d} fds"
        for name, one in grown.items()
    ]
    line = f"soak: changes {changes}, steps {steps}, {', '.join(parts)}, seconds {seconds:.0f}"
    return SoakReport(problems=tuple(problems), last_line=line)


def _soak(
    job: DriverJob, seconds: float, samples: dict[str, list[Sample]], say: Callable[[str], None]
) -> int:
    """Kills and adds workers in turn; returns the number of changes."""
    chance = random.Random(0)
    watched = {"driver": psutil.Process(job.driver_pid), "learner": job.learner()}
    begun = time.monotonic()
    changes, next_change, next_sample = 0, begun + EVERY_S, begun
    scaling: subprocess.Popen | None = None
    while (now := time.monotonic()) < begun + seconds:
        job.check_running("during the soak")
        if now >= next_sample:
            next_sample += SAMPLE_S
            for name, process in watched.items():
                samples[name].append(_sample(process, now - begun))
        if now >= next_change:
            next_change += EVERY_S
            scaling = _change(job, changes, scaling, chance)
            changes += 1
            if changes % 6 == 0:
                say(_progress(now - begun, job.closed_step(), samples))
        time.sleep(SAMPLE_S / 2)
    if scaling is not None:
        scaling.wait(120)
    return changes


def _change(
    job: DriverJob, count: int, scaling: subprocess.Popen | None, chance: random.Random
) -> subprocess.Popen | None:
    """Kills a worker at even counts, adds or drains one at odd ones."""
    workers = job.workers()
    if count % 2 == 0:
        if workers:
            chance.choice(workers).kill()
        return scaling
    if scaling is not None and scaling.poll() is None:
        return scaling
    target = MOST_WORKERS if count % 4 == 1 else FEWEST
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "driver.scale", "--run", str(job.folder)),
            *("--rollout-workers", str(target), "--wait", "0"),
        ],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _write(path: pathlib.Path, samples: dict[str, list[Sample]]) -> None:
    """Writes every sample, for a plot."""
    with path.open("w") as file:
        for name, taken in samples.items():
            for one in taken:
                file.write(json.dumps({"process": name, **dataclasses.asdict(one)}) + "\n")


def _sample(process: psutil.Process, at_s: float) -> Sample:
    with process.oneshot():
        return Sample(at_s=at_s, rss_bytes=process.memory_info().rss, descriptors=process.num_fds())


def _progress(at_s: float, step: int, samples: dict[str, list[Sample]]) -> str:
    parts = [
        f"{name} {taken[-1].rss_bytes / 1e6:.0f} MB {taken[-1].descriptors} fds"
        for name, taken in samples.items()
    ]
    return f"{at_s:4.0f} s  step {step:5}  {'  '.join(parts)}"
