"""What a run must keep over a resume: written when it starts, compared when it resumes.

A checkpoint of another seed, other prompts, another model or another optimiser would load, or fail
late, and train something that the user did not want.
"""

import dataclasses
import datetime
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from driver.config.run_config import RunConfig
from driver.config.yaml_text import parse_yaml
from driver.errors import RunError
from models.config import ModelConfig
from rollout_worker.data.data_digests import DataDigests, part_of_data
from services.process.whole_file import sync_folder, write_whole
from services.trajectories.data_order import DataOrder

FILE = "identity.json"

KEYS = {
    "seed": "run.seed",
    "mixture": "data.train, its sources and their weights,",
    "model": "model.path",
    "optimizer": "learner.optimizer.name",
    "teacher": "algorithm.distillation.teacher and its files",
    "adapter": "learner.lora",
    "base": "the files of model.path and learner.lora.init_from",
}
"""Entry of the file -> the configuration key that decides it. The others are of DataDigests."""
MOMENT = "moment"
"""Entry of the file that is not compared but kept: the time that chat templates read."""
_ONE_SOURCE = "one source"
_NO_TEACHER = _NO_ADAPTER = "none"
_DATA = tuple(field.name for field in dataclasses.fields(DataDigests))


class AlreadyFinished(RunError):
    """Nothing is left to do; a scheduler that submits again may count this as success."""

    exit_code = 2


class NotResumable(RunError):
    """--resume cannot go on from the content of the output folder."""

    exit_code = 2


def resolved(config: RunConfig, folder: pathlib.Path) -> RunConfig:
    """The configuration with `run.resume: auto` decided: whether the folder has a run."""
    run = config.run.model_copy(update={"resume": (folder / FILE).is_file()})
    return config.model_copy(update={"run": run})


def identity_of(
    config: RunConfig,
    model: ModelConfig,
    data: DataDigests,
    order: DataOrder,
    teacher_digest: str | None = None,
    base_digest: str | None = None,
) -> dict[str, str]:
    """What is compared, as short texts.

    Args:
        teacher_digest: of algorithm.distillation.teacher; None without one.
        base_digest: of the files of the model that an adapter is trained for; None without one.
    """
    lora = config.learner.lora
    shape = json.dumps(dataclasses.asdict(model), sort_keys=True)
    return {
        "seed": str(config.run.seed),
        "mixture": _say_mixture(order),
        **dataclasses.asdict(data),
        "model": hashlib.sha256(shape.encode()).hexdigest(),
        "optimizer": config.learner.optimizer.name,
        "teacher": teacher_digest or _NO_TEACHER,
        "adapter": _NO_ADAPTER if lora is None else lora.model_dump_json(),
        "base": base_digest or _NO_ADAPTER,
    }


def _say_mixture(order: DataOrder) -> str:
    """Such as `20 prompts x 1/2, 9 prompts x 1/2`; of a single source `one source`."""
    if not order.is_mixed:
        return _ONE_SOURCE
    return ", ".join(f"{count} prompts x {share}" for count, share in order.mixture())


def kept_moment(folder: pathlib.Path) -> datetime.datetime | None:
    """The time that chat templates read in the whole run, with the time zone of its first start.

    None where the folder does not say: it has no run, or that of an older program.

    Raises:
        NotResumable: if what the folder says cannot be read.
    """
    path = folder / FILE
    kept = _read(path).get(MOMENT) if path.is_file() else None
    if kept is None:
        return None
    try:
        moment = datetime.datetime.fromisoformat(kept)
    except (TypeError, ValueError):
        moment = None
    if moment is None or moment.tzinfo is None:
        raise NotResumable(
            f"--resume: {path} has {MOMENT}={kept!r}, which is no time with its time zone, such as "
            "2026-01-31T12:00:00+00:00: restore it"
        )
    return moment


def write_identity(
    folder: pathlib.Path, identity: dict[str, str], moment: datetime.datetime
) -> None:
    """Writes the identity of a run that starts, whole or not at all.

    Args:
        moment: the time that chat templates read, with its time zone.
    """
    kept = {**identity, MOMENT: moment.isoformat()}
    write_whole(folder / FILE, json.dumps(kept, indent=1), sync=True)
    sync_folder(folder)


def check_kept(
    folder: pathlib.Path,
    identity: Mapping[str, str],
    keys: Mapping[str, str],
    unless_kept: Mapping[str, str],
) -> dict[str, Any]:
    """Compares some of what is kept of the run in the folder.

    Args:
        keys: entries to compare, and the configuration key that decides each.
        unless_kept: what an entry is where the file has none.

    Returns:
        all that is kept.

    Raises:
        NotResumable: if there is no run, or it was another one; names the key.
    """
    path = folder / FILE
    if not path.is_file():
        raise NotResumable(
            f"--resume: {folder} has no run of this program: correct run.name or "
            "run.output_dir, or start without --resume"
        )
    before = {**unless_kept, **_read(path)}
    changed = [name for name in keys if before.get(name) != identity[name]]
    if changed:
        name = changed[0]
        raise NotResumable(
            f"--resume: the run in {folder} was started with another {name} ({before.get(name)} "
            f"then, {identity[name]} now): put {keys[name]} back, or start a new run"
        )
    return before


def check_identity(folder: pathlib.Path, identity: dict[str, str], *, steps: int) -> list[str]:
    """Checks that a resume matches the run in the folder.

    Returns:
        parts of the data that were not compared, since an older version did not record them.

    Raises:
        NotResumable: if there is no run, or it was another one; names the key.
        AlreadyFinished: if it has taken all its steps.
    """
    unless_kept = {"mixture": _ONE_SOURCE, "teacher": _NO_TEACHER}  # of older runs
    unless_kept |= {"adapter": _NO_ADAPTER, "base": _NO_ADAPTER}
    before = check_kept(folder, identity, KEYS, unless_kept)
    recorded = {name: identity[name] for name in _DATA} | before
    data = [DataDigests(**{name: one[name] for name in _DATA}) for one in (recorded, identity)]
    if different := data[0].differences(data[1]):
        raise NotResumable(
            f"--resume: the run in {folder} was started with other {' and '.join(different)}: put "
            "the data back as it was (file, fields, system prompt, templates, their arguments and "
            "tools, tokenizer, rollout.max_prompt_tokens; of a reasoning_gym task also the version "
            "of the package), or start a new run"
        )
    status = folder / "status.json"
    if status.is_file():
        last = _read(status)
        if last.get("state") == "finished" and last.get("step", 0) >= steps:
            raise AlreadyFinished(
                f"--resume: the run in {folder} finished its {last['step']} steps; give run.steps "
                "a higher number to train on"
            )
    return [part_of_data(name) for name in _DATA if name not in before]


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Settings that differ from those before a resume, such as `rollout.max_staleness: 2 -> 0`.

    Args:
        before, now: configurations as plain values.
    """
    old, new = _flat(before), _flat(now)
    names = sorted((old.keys() | new.keys()) - {"run.resume"})
    return [f"{n}: {old.get(n)} -> {new.get(n)}" for n in names if old.get(n) != new.get(n)]


def write_settings(folder: pathlib.Path, text: str, *, resume: bool) -> list[str]:
    """Writes the configuration, YAML, into the folder of the run.

    Returns:
        the settings that changed since the run was last started.
    """
    path = folder / "config.yaml"
    changed = []
    if resume and path.is_file():
        before = parse_yaml(path.read_text(encoding="utf-8"))
        changed = changed_settings(before or {}, parse_yaml(text) or {})
    write_whole(path, text, sync=True)
    return changed


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, list | tuple) and all(isinstance(one, Mapping) for one in value):
            value = {str(place): one for place, one in enumerate(value)}
        inside = _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else None
        flat |= {f"{prefix}{name}": value} if inside is None else inside
    return flat


def _read(path: pathlib.Path) -> dict:
    """A JSON object of the run.

    Raises:
        NotResumable: if the file is damaged.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise NotResumable(f"--resume: {path} cannot be read ({error}): restore it") from None
    if not isinstance(found, dict):
        raise NotResumable(f"--resume: {path} is not a JSON object: restore it")
    return found
