"""Where the metrics of a run go: JSONL files, which are complete, and optional trackers.

Files in the run's folder, one JSON object a line, each with its own `step`:
    metrics.jsonl   one line per step: every metric, `time` in Unix seconds, `nonfinite` keys
    samples.jsonl   a few completions of every step
    eval.jsonl      one line per evaluated item

Rule of a resume: the run goes on from a checkpoint at step s; lines after s were made by work that
no checkpoint holds, and move to `<name>.superseded.jsonl` (see `jsonl.py`). The files then
hold each step once. On W&B the run keeps its id, and the charts have `step` as their own axis, so
that repeated steps are accepted there too; TensorBoard gets a purge step.

A tracker is best effort (`tracker.py`): nothing that it does can delay or end a step.
"""

import os
import pathlib
import time
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from driver.accounting.jsonl import JsonlLog
from driver.config.sections.log import WandbConfig
from driver.reports.tensorboard import TensorboardTracker
from driver.reports.tracker import Tracker, Warn
from driver.reports.wandb_tracker import WandbTracker
from services.process.whole_file import write_whole


class MetricsLog:
    """Owns the three logs of a run, and its trackers.

    Args:
        folder: the run's output folder.
        trackers: get the same, and are closed with the logs.
    """

    def __init__(self, folder: pathlib.Path, trackers: Sequence[Tracker] = ()):
        self._metrics = JsonlLog(folder / "metrics.jsonl")
        self._samples = JsonlLog(folder / "samples.jsonl")
        self._eval = JsonlLog(folder / "eval.jsonl")
        self._trackers = trackers

    def log(self, step: int, values: Mapping[str, float]) -> dict[str, Any]:
        """Writes the metrics of one step and returns the line as written."""
        record = self._metrics.append({"step": step, "time": time.time(), **values})
        for tracker in self._trackers:
            tracker.log(step, values)
        return record

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Writes completions of a step."""
        for sample in samples:
            self._samples.append({"step": step, **sample})
        for tracker in self._trackers:
            tracker.log_samples(step, samples)

    def log_eval(self, step: int, items: Iterable[Mapping[str, Any]]) -> None:
        """Writes the completions of an evaluation."""
        for item in items:
            self._eval.append({"step": step, **item})

    def resume_at(self, step: int) -> int:
        """Moves the lines after a checkpoint's step aside; returns how many moved."""
        for tracker in self._trackers:
            tracker.resume_at(step)
        return sum(log.rewind(step) for log in (self._metrics, self._samples, self._eval))

    def close(self, timeout_s: float = 30.0) -> None:
        """Closes the files and gives the trackers at most `timeout_s` in all to finish."""
        for log in (self._metrics, self._samples, self._eval):
            log.close()
        close_trackers(self._trackers, timeout_s)


def open_trackers(
    folder: pathlib.Path,
    wandb: WandbConfig,
    *,
    run_id: str,
    config: Mapping[str, Any],
    warn: Warn,
    tensorboard: bool = False,
    init_timeout_s: float = 30.0,
    environ: MutableMapping[str, str] = os.environ,
) -> list[Tracker]:
    """Starts the enabled trackers.

    Args:
        folder: the run's output folder.
        wandb: mode and project; `disabled` starts no thread and imports nothing.
        run_id: names the run on W&B when it first starts; a resumed run keeps the stored id.
        config: the configuration as plain values, shown beside the charts.
        warn: receives each warning once; it must not raise.
        tensorboard: whether event files are written too.
        init_timeout_s: bound on W&B's start, after which the tracker goes offline.
        environ: where the API key is looked up and cleaned.
    """
    trackers: list[Tracker] = []
    if wandb.mode != "disabled":
        trackers.append(
            WandbTracker(
                wandb,
                folder=folder,
                run_id=stored_run_id(folder, run_id),
                config=config,
                warn=warn,
                init_timeout_s=init_timeout_s,
                environ=environ,
            )
        )
    if tensorboard:
        trackers.append(TensorboardTracker(folder, warn=warn))
    return trackers


def close_trackers(trackers: Sequence[Tracker], timeout_s: float = 30.0) -> None:
    """Gives the trackers at most `timeout_s` in all to finish."""
    deadline = time.monotonic() + timeout_s
    for tracker in trackers:
        tracker.close(max(0.1, deadline - time.monotonic()))


def stored_run_id(folder: pathlib.Path, run_id: str) -> str:
    """The id of the run in this folder, here and on W&B; stores `run_id` the first time."""
    path = folder / "run_id"
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    write_whole(path, run_id + "\n", sync=True)
    return run_id
