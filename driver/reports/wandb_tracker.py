"""Weights & Biases: the metrics under the same names, and a table of samples.

The only importer of wandb in the driver, and that lazily.
"""

import json
import os
import pathlib
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from driver.config.sections.log import WandbConfig
from driver.reports.tracker import QUEUED_LINES, Tracker, Warn
from services.wire.strict_json import encodable

KEY_VARIABLE = "WANDB_API_KEY"
TABLE = "samples"
COLUMNS = (
    *("step", "prompt_id", "sample_index", "why", "question", "completion", "answer"),
    *("total_reward", "rewards", "reward_error", "finish_reason", "completion_tokens"),
    *("policy_version", "worker"),
)
BATCH_ROWS = 20
"""Of the table that are sent together: each batch is a file of its own."""
MOST_ROWS = 5000
"""Of one table, which the library keeps in memory; then the next one begins under the same name."""
MOST_CHARACTERS = 2000
"""Of one cell; samples.jsonl has the whole text."""


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


class WandbTracker(Tracker):
    """One W&B run."""

    def __init__(
        self,
        wandb: WandbConfig,
        *,
        folder: pathlib.Path,
        run_id: str,
        config: Mapping[str, Any],
        warn: Warn,
        init_timeout_s: float,
        environ: MutableMapping[str, str] = os.environ,
        queue_lines: int = QUEUED_LINES,
    ):
        """Args:
        folder: gets W&B's own folder.
        run_id: under which a resumed run goes on.
        init_timeout_s: bound on the start online, after which it records offline.
        environ: where the API key is looked up and cleaned.
        """
        self._wandb = wandb
        self._folder = folder
        self._run_id = run_id
        self._config = dict(config)
        self._init_timeout_s = init_timeout_s
        self._environ = environ
        self._run: Any = None
        self._table: Any = None
        self._rows: list[list[Any]] = []
        super().__init__("W&B", extra="wandb", warn=warn, queue_lines=queue_lines)

    def _start(self) -> str | None:
        self._environ.setdefault("WANDB_ERROR_REPORTING", "false")  # telemetry that can block exit
        key_problem = clean_api_key(self._environ)
        if self._wandb.mode == "online":
            if key_problem:
                self._warn_once("key", f"{key_problem}; W&B records offline")
            else:
                self._run = self._guarded(
                    "start", lambda: self._init("online"), then="records offline"
                )
                if self._run is not None:
                    return "online"
                self._guarded("reset", self._forget)
        self._run = self._guarded("start offline", lambda: self._init("offline"))
        return None if self._run is None else "offline"

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

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def _write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._rows += [sample_row(step, sample) for sample in samples]
        if len(self._rows) >= BATCH_ROWS:
            self._send_rows(step)

    def _send_rows(self, step: int) -> None:
        """Adds to the run's table; one that is resumed has the rows before it still."""
        import wandb

        if self._table is None or len(self._table.data) >= MOST_ROWS:
            self._table = wandb.Table(list(COLUMNS), log_mode="INCREMENTAL")
        rows, self._rows = self._rows, []
        for row in rows:
            self._table.add_data(*row)
        self._run.log({"step": step, TABLE: self._table})

    def _rewind(self, step: int) -> None:
        """Nothing: the charts have `step` as their axis, which takes a step again."""

    def _finish(self) -> None:
        if self._rows:
            self._guarded("table", lambda: self._send_rows(self._rows[-1][0]))
        self._run.finish()
        self._forget()

    @staticmethod
    def _forget() -> None:
        """Ends W&B's service process: it would block the run's id, and the exit of this process."""
        import wandb

        wandb.teardown()

    def _errors(self) -> tuple[type[Exception], ...]:
        from wandb.errors import Error

        return (Error,)

    def _clean(self, message: str) -> str:
        key = self._environ.get(KEY_VARIABLE)
        return message.replace(key, "<key>") if key else message


def sample_row(step: int, sample: Mapping[str, Any]) -> list[Any]:
    """One row of the table; a column that the sample lacks is None."""
    values = {**sample, "step": step, "rewards": json.dumps(sample.get("rewards", {}))}
    return [_cell(values.get(column)) for column in COLUMNS]


def _cell(value: Any) -> Any:
    """A text is cut; a lone surrogate, which UTF-8 cannot hold, becomes its escape."""
    if not isinstance(value, str):
        return value
    if len(value) > MOST_CHARACTERS:
        value = f"{value[:MOST_CHARACTERS]}... ({len(value)} characters)"
    return encodable(value)
