"""TensorBoard: the metrics of every step in event files, under the same names.

The only importer of tensorboardX, and that lazily. Of it, only what writes an event is used: its
summary writer has a thread and a hook at exit of its own, which could wait for ever.
"""

import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from driver.reports.tracker import Tracker, Warn

FOLDER = "tensorboard"


class TensorboardTracker(Tracker):
    """Event files in `tensorboard` of the run's folder; a resume starts the next one."""

    def __init__(self, folder: pathlib.Path, *, warn: Warn):
        self._folder = folder / FOLDER
        self._writer: Any = None
        super().__init__("TensorBoard", extra="tensorboard", warn=warn)

    def _start(self) -> str | None:
        return self._guarded("start", self._open)

    def _open(self) -> str:
        from tensorboardX.event_file_writer import EventsWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        # The name has the second; two files of one second must not be one.
        suffix = f".{time.time_ns()}"
        self._writer = EventsWriter(str(self._folder / "events"), suffix)
        self._writer.flush()
        return "recording"

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        scalars = [Summary.Value(tag=name, simple_value=float(v)) for name, v in values.items()]
        self._event(step, summary=Summary(value=scalars))

    def _write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: samples.jsonl has them."""

    def _rewind(self, step: int) -> None:
        """Has TensorBoard forget the steps after this one (its purge step)."""
        from tensorboardX.proto.event_pb2 import SessionLog  # pyright: ignore[reportAttributeAccessIssue]

        self._writer.close()
        self._open()
        self._event(step + 1, session_log=SessionLog(status=SessionLog.START))

    def _event(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        self._writer.write_event(Event(wall_time=time.time(), step=step, **content))
        self._writer.flush()

    def _finish(self) -> None:
        self._writer.close()

    def _errors(self) -> tuple[type[Exception], ...]:
        import tensorboardX.event_file_writer  # noqa: F401

        return ()
