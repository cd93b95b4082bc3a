"""What is known of a run that ended badly, and how rules search in it."""

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from driver.postmortem.host_state import Machine, ProcessState

SHOWN_LINES = 6
LINE_CHARS = 240


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Evidence; every field may be missing."""

    error: str = ""
    """`Type: message` of the error that ended the run."""
    error_types: tuple[str, ...] = ()
    """Names of its class, its base classes and those of its causes."""
    details: str = ""
    """Tracebacks of this and of other processes."""
    exit_code: int | None = None
    status: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """status.json."""
    driver_gone: bool = False
    """That process has ended, and could not write how."""
    worker_errors: tuple[str, ...] = ()
    """Why workers were replaced, one text each, such as `rollout-0: its process ended`, since a
    step was last closed."""
    overcome_errors: tuple[str, ...] = ()
    """The same of the steps before. The run has gone on after them, so they are not why it ended,
    unless there were too many."""
    lost_hosts: tuple[str, ...] = ()
    """Hosts that were in the cluster and are no more, with what Ray says of their end."""
    missing: tuple[str, ...] = ()
    """Processes on other hosts, such as `rollout-1 on b`, whose stacks and logs are not here."""
    processes: tuple[ProcessState, ...] = ()
    stacks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The newest dump of each process by `name-pid`."""
    logs: tuple[str, ...] = ()
    """`file: line` of process logs that hold an error."""
    kernel: tuple[str, ...] = ()
    """Lines of the kernel's log since the run began."""
    machine: Machine | None = None
    metrics: tuple[Mapping[str, Any], ...] = ()
    """Last lines of metrics.jsonl, the newest last."""
    samples: tuple[Mapping[str, Any], ...] = ()
    """Last lines of samples.jsonl."""
    rejected: tuple[str, ...] = ()
    """Files of groups whose update was not finite."""

    @property
    def reported(self) -> list[str]:
        """What processes reported, line by line, without what Ray adds to every death."""
        texts = [self.error, *self.worker_errors]
        # An indented line of a traceback is source code, not something that happened.
        lines = (line for line in self.details.splitlines() if not line.startswith((" ", "\t")))
        texts += [line for line in lines if not (self.error and line.endswith(self.error))]
        return [without_ray_guesses(text) for text in texts if text]


def grouped(errors: Sequence[str]) -> list[str]:
    """Equal errors as one line with their number, the commonest first; digits do not count."""
    counts = collections.Counter(re.sub(r"\d+", "N", short(error)) for error in errors)
    first = {re.sub(r"\d+", "N", short(error)): short(error) for error in reversed(errors)}
    return [f"{count} x {first[kind]}" for kind, count in counts.most_common()]


def short(text: str, around: int = 0) -> str:
    """One line of at most LINE_CHARS, cut around a place in the text where it is longer."""
    if len(text) > 4 * LINE_CHARS:
        text = text[max(0, around - LINE_CHARS // 2) :][: 4 * LINE_CHARS]
    line = " ".join(text.split())
    return line if len(line) <= LINE_CHARS else line[: LINE_CHARS - 3] + "..."


def matching(pattern: str, lines: Sequence[str], shown: int = SHOWN_LINES) -> tuple[str, ...]:
    """The lines that a pattern is found in, shortened, each once."""
    matches = (re.search(pattern, line, re.I) for line in lines)
    found = [short(match.string, match.start()) for match in matches if match]
    return tuple(dict.fromkeys(found))[:shown]


def first_match(pattern: str, lines: Sequence[str]) -> re.Match[str] | None:
    """Where a pattern is found first."""
    return next((match for x in lines if (match := re.search(pattern, x, re.I))), None)


_RAY_GUESSES = re.compile(r"Some common causes include: .*", re.S)


def without_ray_guesses(text: str) -> str:
    """Ray says of every process that ended that memory or a crash may have been the reason."""
    return _RAY_GUESSES.sub("", text)


def innermost_frame(dump: str) -> str:
    """The innermost frame in a dump of stacks: of the current thread, or of the first."""
    _, _, current = dump.rpartition("Current thread")
    frames = re.findall(r'^\s+File "(.*?)", line (\d+)(?: in (.+))?', current or dump, re.M)
    return f"{frames[0][2]} ({frames[0][0]}:{frames[0][1]})" if frames else "no Python frame"
