"""Where the numbers of a run go: JSONL files, which are the truth, and Weights & Biases.

Files in the run's folder, one JSON object a line, each with its own `step`:
    metrics.jsonl   one line per step: every metric, `time` in Unix seconds, `nonfinite` keys
    samples.jsonl   a few completions of every step
    eval.jsonl      one line per evaluated item

Rule of a resume: the run goes on from a checkpoint at step s; lines after s were made by work that
no checkpoint holds, and move to `<name>.superseded.jsonl` (see `driver/jsonl.py`). The files then
hold each step once. On W&B the run keeps its id, and the charts have `step` as their own axis, so
that repeated steps are accepted there too.

A tracker is best effort: it lives in a thread behind a bounded queue, and nothing that it does can
delay or end a step.
"""

import os
import pathlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from driver.config import WandbConfig
from driver.jsonl import JsonlLog

KEY_VARIABLE = "WANDB_API_KEY"
Warn = Callable[[str], None]


class MetricsLog:
    """Owns the three logs of a run, and the tracker where one is asked for.

    Args:
        folder: the run's output folder.
        wandb: mode and project; `disabled` starts no thread and imports nothing.
        run_id: names the run on W&B when it first starts; a resumed run keeps the stored id.
        config: the configuration as plain values, shown beside the charts.
        warn: receives each warning once; it must not raise.
        init_timeout_s: bound on W&B's start, after which the tracker goes offline.
        environ: where the API key is looked up and cleaned.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        wandb: WandbConfig,
        *,
        run_id: str,
        config: Mapping[str, Any],
        warn: Warn,
        init_timeout_s: float = 30.0,
        environ: MutableMapping[str, str] = os.environ,
    ):
        self._metrics = JsonlLog(folder / "metrics.jsonl")
        self._samples = JsonlLog(folder / "samples.jsonl")
        self._eval = JsonlLog(folder / "eval.jsonl")
        self._tracker = None
        if wandb.mode != "disabled":
            self._tracker = WandbTracker(
                wandb,
                folder=folder,
                run_id=stored_run_id(folder, run_id),
                config=config,
                warn=warn,
                init_timeout_s=init_timeout_s,
                environ=environ,
            )

    def log(self, step: int, values: Mapping[str, float]) -> dict[str, Any]:
        """Writes the metrics of one step and returns the line as written."""
        record = self._metrics.append({"step": step, "time": time.time(), **values})
        if self._tracker is not None:
            self._tracker.log(step, values)
        return record

    def log_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        for sample in samples:
            self._samples.append({"step": step, **sample})

    def log_eval(self, step: int, items: Iterable[Mapping[str, Any]]) -> None:
        for item in items:
            self._eval.append({"step": step, **item})

    def resume_at(self, step: int) -> int:
        """Moves the lines after a checkpoint's step aside; returns how many moved."""
        return sum(log.rewind(step) for log in (self._metrics, self._samples, self._eval))

    def close(self, timeout_s: float = 30.0) -> None:
        """Closes the files and gives the tracker at most `timeout_s` to finish."""
        for log in (self._metrics, self._samples, self._eval):
            log.close()
        if self._tracker is not None:
            self._tracker.close(timeout_s)


def stored_run_id(folder: pathlib.Path, run_id: str) -> str:
    """The id of the run in this folder, here and on W&B; stores `run_id` the first time."""
    path = folder / "run_id"
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    path.write_text(run_id + "\n", encoding="utf-8")
    return run_id


def clean_api_key(environ: MutableMapping[str, str]) -> str:
    """Strips white space, which copying adds, from the API key in place.

    Returns:
        What is wrong with the key, without showing it; '' if nothing is. Its length is W&B's
        business. An unset key is fine: W&B may have one from `wandb login`.
    """
    key = environ.get(KEY_VARIABLE)
    if key is None:
        return ""
    environ[KEY_VARIABLE] = key.strip()
    if not key.strip():
        del environ[KEY_VARIABLE]
        return f"{KEY_VARIABLE} is set but empty: put the key there or unset it"
    return ""


class WandbTracker:
    """One W&B run, fed from a queue by a thread of its own; never raises into the caller."""

    def __init__(
        self,
        wandb: WandbConfig,
        *,
        folder: pathlib.Path,
        run_id: str,
        config: Mapping[str, Any],
        warn: Warn,
        init_timeout_s: float,
        environ: MutableMapping[str, str],
        queue_lines: int = 1000,
    ):
        self._wandb = wandb
        self._folder = folder
        self._run_id = run_id
        self._config = dict(config)
        self._warn = warn
        self._warned: set[str] = set()
        self._init_timeout_s = init_timeout_s
        self._environ = environ
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(queue_lines)
        self.dropped = 0
        """Lines that the full queue had no room for."""
        self.mode = "starting"
        """`starting`, `online`, `offline` or `ended`."""
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queues one line, or counts it as dropped; returns at once."""
        if self.mode == "ended":
            self.dropped += 1
            return
        try:
            self._queue.put_nowait({"step": step, **values})
        except queue.Full:
            self.dropped += 1
            self._warn_once("queue", "W&B is slower than training: some of its lines are dropped")

    def close(self, timeout_s: float) -> None:
        """Asks the thread to finish the run and waits no longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            pass  # the thread is stuck; the join below says so
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn_once(
                "close",
                f"W&B did not finish within {timeout_s:g} s: about {self._queue.qsize()} lines "
                "were not sent; metrics.jsonl has them all",
            )
        elif self.dropped:
            self._warn_once("dropped", f"{self.dropped} lines never reached W&B")

    def _work(self) -> None:
        try:
            run = self._start()
            if run is not None:
                while (line := self._queue.get()) is not None:
                    self._guarded("log", lambda line=line: run.log(line))
                self._guarded("finish", run.finish)
                self._guarded("end", self._forget)
        finally:
            self.mode = "ended"

    def _start(self) -> Any:
        self._environ.setdefault("WANDB_ERROR_REPORTING", "false")  # telemetry that can block exit
        key_problem = clean_api_key(self._environ)
        if self._wandb.mode == "online":
            if key_problem:
                self._warn_once("key", f"{key_problem}; W&B records offline")
            else:
                run = self._guarded("start", lambda: self._init("online"), then="records offline")
                if run is not None:
                    self.mode = "online"
                    return run
                self._guarded("reset", self._forget)
        run = self._guarded("start offline", lambda: self._init("offline"))
        if run is not None:
            self.mode = "offline"
        return run

    def _init(self, mode: str) -> Any:
        import wandb

        settings = wandb.Settings(
            init_timeout=self._init_timeout_s,
            login_timeout=self._init_timeout_s,
            finish_timeout=self._init_timeout_s,
            console="off",
            silent=True,
        )
        run = wandb.init(
            mode=mode,  # type: ignore[arg-type]
            project=self._wandb.project,
            entity=self._wandb.entity,
            id=self._run_id,
            name=self._run_id,
            resume="allow" if mode == "online" else None,
            dir=str(self._folder),
            config=self._config,
            settings=settings,
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    @staticmethod
    def _forget() -> None:
        """Ends W&B's service process: it would hold the run's id, and the exit of ours."""
        import wandb

        wandb.teardown()

    def _guarded(self, action: str, call: Callable[[], Any], then: str = "is left out") -> Any:
        """The result of a call into W&B, or None and one warning: its errors end here.

        Any other exception ends this thread, and with it nothing but the tracker.
        """
        try:
            from wandb.errors import Error
        except ImportError:
            self._warn_once("import", "W&B is not installed: pip install 'tandem[wandb]'")
            return None
        try:
            return call()
        except (Error, OSError, RuntimeError, ValueError, TypeError) as error:
            self._warn_once(action, f"W&B {action} failed and {then}: {self._safe(error)}")
            return None

    def _safe(self, error: Exception) -> str:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        key = self._environ.get(KEY_VARIABLE)
        return text.replace(key, "<key>") if key else text

    def _warn_once(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            self._warn(message)
