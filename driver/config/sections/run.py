"""The section `run`: what a run is called, how long it is, and where it writes."""

from typing import Literal

from pydantic import Field

from services.process.config_section import Section


class NamedRun(Section):
    """What a run is called, where it writes, and what its random draws follow from."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$")
    """Name in messages, of the output folder and on W&B: letters, digits, `.`, `_` and `-`."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the data order and of every sampled token."""
    output_dir: str = "runs/{name}"
    """Folder of logs, checkpoints and exports, relative to where the run starts; `{name}` and
    `{time}` are replaced."""
    resume: bool | Literal["auto"] = False
    """Continue from the newest complete checkpoint in output_dir and the groups accepted since;
    without it the folder must be new or empty. `auto` continues where there is a run and starts one
    where there is none, for a scheduler that submits the same command again."""


class RunSection(NamedRun):
    """What the run is called, how long it is, and where it writes."""

    steps: int = Field(default=100, ge=1, le=10**9)
    """Training steps of the whole run, those before a resume included."""
