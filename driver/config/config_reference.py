"""Makes the page docs/configuration.md from the configuration models.

Usage: `python -m driver.config.config_reference > docs/configuration.md`
"""

import argparse
import inspect
import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from driver.config.config_keys import Key, Kind, fields_of, union_members
from driver.config.run_config import RunConfig

_HEAD = """\
# Configuration

Every key of a run configuration. A run is a YAML 1.2 file plus any number of overrides:

    python -m driver --config deploy/runs/demo_cpu.yaml --set rollout.completions_per_prompt=16

`python -m driver --dry-run` checks a configuration and prints what follows from it. An unknown key,
a value outside its range and a contradiction between keys are errors before anything starts. This
page is generated: `python -m driver.config.config_reference > docs/configuration.md`.
"""

_UNIT_OF_ENDING = {
    "_s": "seconds",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_steps": "steps",
    "_port": "TCP port",
    "_fraction": "fraction, 0 to 1",
}
_UNIT_OF_KEY = {
    "run.steps": "steps",
    "rollout.prompts_per_step": "prompts",
    "rollout.completions_per_prompt": "completions",
    "rollout.max_staleness": "policy versions",
    "rollout.decode.slots": "completions",
    "rollout.decode.tensor": "devices",
    "rollout.decode.prefixes": "prompts",
    "rollout.decode.parked": "episodes",
    "rollout.decode.compile_budget": "programs",
    "rollout.workers.min": "workers",
    "rollout.workers.max": "workers",
    "rollout.workers.start": "workers",
    "reward.processes": "processes",
    "reward.in_flight": "completions",
    "algorithm.advantage_eps": "reward",
    "algorithm.distillation.top_k": "tokens",
    "algorithm.resample_rounds": "rounds",
    "learner.updates_per_batch": "updates",
    "learner.optimizer.warmup_steps": "updates",
    "learner.mesh.data": "devices",
    "learner.mesh.fsdp": "devices",
    "learner.mesh.context": "devices",
    "weights.streams": "streams",
    "weights.keep_versions": "policy versions",
    "weights.relay_fanout": "workers",
    "weights.canary_bound": "nats",
    "checkpoint.keep": "checkpoints",
    "data.eval.samples_per_prompt": "completions",
    "data.eval.correct_from": "reward",
    "eval.prompts": "prompts",
    "eval.samples_per_prompt": "completions",
    "eval.correct_from": "reward",
    "log.samples_per_step": "completions",
    "log.dashboard.port": "TCP port",
    "placement.worker_restarts": "restarts",
    "run.epochs": "epochs",
    "batch.sequences_per_step": "records",
    "placement.learner_restarts": "restarts",
    **{f"data.{which}.{key}": "prompts" for which in ("train", "eval") for key in ("size", "skip")},
    **{
        f"placement.{role}.{key}": unit
        for role in ("learner", "rollout")
        for key, unit in (("cpus", "CPU cores"), ("gpus", "GPUs"), ("tpus", "TPU chips"))
    },
}


def reference(root: type[BaseModel] = RunConfig, head: str = _HEAD) -> str:
    """The whole page, in Markdown.

    Args:
        root: the model of the sections; those that a run has as they are stand on its page alone.
        head: title and introduction.
    """
    lines = [head]
    for name, key in fields_of(root).items():
        field = root.model_fields[name]
        if root is RunConfig or field.annotation is not _annotation_in_run(name):
            lines += _section(name, key, field, depth=2)
    return "\n".join(lines)


def _annotation_in_run(name: str) -> Any:
    field = RunConfig.model_fields.get(name)
    return None if field is None else field.annotation


def _section(dotted: str, key: Key, field: FieldInfo, depth: int) -> list[str]:
    """Heading, text and table of one section, then the sections inside it."""
    assert key.model is not None
    lines = [f"{'#' * depth} `{dotted}`", "", inspect.cleandoc(key.model.__doc__ or ""), ""]
    if field.description:
        lines += [field.description.replace("\n", " "), ""]
    if key.kind is Kind.SECTION_LIST:
        lines += [f"A list; each item has these keys. Default: {_default(field)}.", ""]
    elif not field.is_required() and not isinstance(plain := _plain_default(field), dict):
        lines += [f"Default: `{json.dumps(plain)}`.", ""]
    rows, sections = [], []
    for name, inner in fields_of(key.model).items():
        below = key.model.model_fields[name]
        if inner.model is not None:
            sections += _section(f"{dotted}.{name}", inner, below, depth + 1)
        else:
            rows.append(_row(f"{dotted}.{name}", below))
    if rows:
        lines += ["| key | type | default | unit | meaning |", "|---|---|---|---|---|", *rows, ""]
    if key.items is not None:
        own = [name for name in key.items.model_fields if name not in key.model.model_fields]
        more = [_row(f"{dotted}.{name}", key.items.model_fields[name]) for name in own]
        lines += [
            *(f"{inspect.cleandoc(key.items.__doc__ or '')} An item has these keys too:", ""),
            *("| key | type | default | unit | meaning |", "|---|---|---|---|---|", *more, ""),
        ]
    return lines + sections


def _row(dotted: str, field: FieldInfo) -> str:
    meaning = _cell(field.description or "")
    cells = (f"`{dotted}`", _type(field), _default(field), _unit(dotted, field), meaning)
    return f"| {' | '.join(cells)} |"


def _type(field: FieldInfo) -> str:
    """Such as `integer, 1 to 64, or null`."""
    shown = []
    for member in union_members(field.annotation):
        if get_origin(member) is Literal:
            shown += [f"`{value}`" for value in get_args(member)]
        elif get_origin(member) is tuple:
            item = get_args(member)[0]
            item = get_args(item)[0] if get_origin(item) is Annotated else item
            shown.append(f"list of {_plain(item)}")
        else:
            shown.append(_plain(member) + (_bounds(field) if member in (int, float) else ""))
    return _cell(" or ".join(shown))


def _plain(kind: Any) -> str:
    names = {int: "integer", float: "number", bool: "boolean", str: "text", type(None): "null"}
    return names.get(kind, "mapping")


def _bounds(field: FieldInfo) -> str:
    """Such as ` (1 to 64)` or ` (above 0, below 1)`."""
    found = {
        name: f"{getattr(rule, name):,}"
        for name in ("ge", "gt", "le", "lt")
        for rule in field.metadata
        if getattr(rule, name, None) is not None
    }
    if {"ge", "le"} <= found.keys():
        return f" ({found['ge']} to {found['le']})"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    text = ", ".join(f"{words[name]} {bound}" for name, bound in found.items())
    return f" ({text})" if text else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = _plain_default(field)
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def _plain_default(field: FieldInfo) -> Any:
    value = field.get_default(call_default_factory=True)
    many = value if isinstance(value, tuple) else (value,)
    plain = [one.model_dump() if isinstance(one, BaseModel) else one for one in many]
    return plain if isinstance(value, tuple) else plain[0]


def _unit(key: str, field: FieldInfo) -> str:
    if not {int, float} & set(union_members(field.annotation)):
        return ""
    found = (unit for ending, unit in _UNIT_OF_ENDING.items() if key.endswith(ending))
    return _UNIT_OF_KEY.get(key) or next(found, "")


def _cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m driver.config.config_reference",
        description="Prints docs/configuration.md: every key of a run configuration.",
    )
    parser.parse_args(arguments)
    sys.stdout.write(reference())


if __name__ == "__main__":
    main()
