"""Every key that a run configuration may have, and the nearest one to an unknown key.

Derived from the pydantic models, those of `run_config.py` unless another root is named, so that no
second list can go stale.
"""

import dataclasses
import difflib
import enum
import functools
import types
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from driver.config.run_config import RunConfig
from rollout_worker.config.rollout_config import WorkersConfig


class Kind(enum.Enum):
    """What a key holds."""

    SECTION = "section"
    SECTION_LIST = "list of sections"
    FREE = "free mapping"
    """Keys below it are free, such as the parameters of a reward function."""
    FREE_LIST = "list of free mappings"
    LEAF = "value"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """What one dotted key accepts."""

    kind: Kind
    optional: bool
    """May be null."""
    model: type[BaseModel] | None = None
    """The section, or the section of each list item."""
    types: frozenset[type] = frozenset()
    """Plain types that a LEAF may have, null apart; of a SECTION, what may replace it."""
    default: Any = None
    items: type[BaseModel] | None = None
    """Of a SECTION that may be a list instead: the section of each item."""


OTHER_NAMES = {
    "group_size": "rollout.completions_per_prompt",
    "num_generations": "rollout.completions_per_prompt",
    "batch_size": "rollout.prompts_per_step",
    "max_new_tokens": "rollout.max_completion_tokens",
    "max_completion_length": "rollout.max_completion_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "num_workers": "rollout.workers",
    "batch_rows": "rollout.decode.slots",
    "max_num_seqs": "rollout.decode.slots",
    "tensor_parallel_size": "rollout.decode.tensor",
    "stop": "rollout.stop_strings",
    "max_lag": "rollout.max_staleness",
    "max_steps": "run.steps",
    "experiment_name": "run.name",
    "model_path": "model.path",
    "model_name": "model.path",
    "lr": "learner.optimizer.learning_rate",
    "micro_batch": "learner.microbatch_tokens",
    "micro_batch_size": "learner.microbatch_tokens",
    "max_grad_norm": "learner.optimizer.clip_norm",
    "ppo_epochs": "learner.updates_per_batch",
    "beta": "algorithm.kl_coef",
    "teacher_model": "algorithm.distillation.teacher",
    "teacher_model_name_or_path": "algorithm.distillation.teacher",
    "loss_top_k": "algorithm.distillation.top_k",
    "epsilon_low": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "wandb.enabled": "log.wandb.mode",
    "report_to": "log.wandb.mode",
    "eval_every_steps": "eval.every_steps",
    "save_steps": "checkpoint.every_steps",
    "num_train_epochs": "run.epochs",
    "train_batch_size": "batch.sequences_per_step",
    "max_seq_length": "batch.max_tokens",
    "max_length": "batch.max_tokens",
}
"""Names that other systems use, and ours: only for the hint beside an unknown key, and only where
the configuration has such a key."""


ABSENT_KEYS = {
    f"rollout.{name}": (
        "is no setting of training: the learner scores every token under the whole distribution, "
        f"and one cut off by {name} has another support; leave it out (eval.{name} is there for "
        "evaluation)"
    )
    for name in ("top_k", "top_p", "min_p")
} | {
    "rollout.decode.on_swap": (
        "unknown key; it was removed, since it had no effect: a worker takes a new policy version "
        "only when it decodes nothing; leave it out"
    )
}
"""Keys that do not exist on purpose, or no longer, and why."""

IGNORED_VALUES = {"rollout.decode.on_swap": ("finish", "restart")}
"""Values of removed keys that never had an effect. The config.yaml of an older run has them, and
it can be resumed."""


def fields_of(model: type[BaseModel]) -> dict[str, Key]:
    """The keys of one section."""
    return {name: _key(field) for name, field in model.model_fields.items()}


def resolve(parts: tuple[str, ...], root: type[BaseModel] = RunConfig) -> Key | None:
    """What a dotted key, split at its dots, accepts; None where no such key exists.

    An item of a list of sections is named by its index: `("reward", "functions", "0", "weight")`.
    """
    key = Key(kind=Kind.SECTION, optional=False, model=root)
    for part in parts:
        if key.kind is Kind.FREE:
            return Key(kind=Kind.FREE, optional=True)
        if key.kind in (Kind.LEAF, Kind.FREE_LIST):
            return None
        assert key.model is not None
        if key.kind is Kind.SECTION and key.items is not None and part.isdecimal():
            found = Key(kind=Kind.SECTION, optional=False, model=key.items)
        elif key.kind is Kind.SECTION:
            found = fields_of(key.model).get(part)
        else:
            found = Key(kind=Kind.SECTION, optional=False, model=key.model)
            found = found if part.isdecimal() else None
        if found is None:
            return None
        key = found
    return key


LEAST_LEAF = 0.55
"""Least similarity of the last parts of two keys: `evaluation` and `eval` have 0.57."""


def nearest(dotted: str, root: type[BaseModel] = RunConfig) -> str | None:
    """The known dotted key most similar to an unknown one; None if none is similar.

    The whole key and its last part are compared, so that a misspelt section, a misspelt last part
    and a key under the wrong section are all recognised. The last part must be similar too: keys of
    one section begin alike.
    """
    section, _, leaf = dotted.rpartition(".")
    best, best_score = None, (0.6, 0.0)
    for known in known_keys(root):
        known_section, _, known_leaf = known.rpartition(".")
        if _ratio(leaf, known_leaf) < LEAST_LEAF and not _is_value_above(known, dotted, root):
            continue
        whole = _ratio(dotted, known)
        in_section = 0.9 * _ratio(leaf, known_leaf) + (0.1 if known_section == section else 0.0)
        # Of keys with the same last part, that with the more similar section.
        score = (max(whole, in_section), whole)
        if score > best_score:
            best, best_score = known, score
    for other, known in OTHER_NAMES.items():
        if known not in known_keys(root):
            continue
        score = (0.95 * max(_ratio(dotted, other), _ratio(leaf, other)), 0.0)
        if score > best_score:
            best, best_score = known, score
    return best


def _is_value_above(known: str, dotted: str, root: type[BaseModel]) -> bool:
    """Whether a key is below one that is no section, such as `run.steps.more`."""
    is_section = any(key.startswith(f"{known}.") for key in known_keys(root))
    return dotted.startswith(f"{known}.") and not is_section


@functools.cache
def known_keys(root: type[BaseModel] = RunConfig) -> tuple[str, ...]:
    """All dotted keys, sections included; items of a list of sections as index 0."""
    found: list[str] = []

    def walk(model: type[BaseModel], prefix: str) -> None:
        for name, key in fields_of(model).items():
            dotted = f"{prefix}{name}"
            found.append(dotted)
            if key.model is not None:
                walk(key.model, dotted + (".0." if key.kind is Kind.SECTION_LIST else "."))
            if key.items is not None:
                walk(key.items, f"{dotted}.0.")

    walk(root, "")
    return tuple(found)


def _ratio(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right, autojunk=False).ratio()


def _key(field: FieldInfo) -> Key:
    members = union_members(field.annotation)
    optional = type(None) in members
    members = [member for member in members if member is not type(None)]
    default = field.get_default(call_default_factory=True)
    for member in members:
        origin = get_origin(member)
        if isinstance(member, type) and issubclass(member, BaseModel):
            plain = frozenset({member.plain} if issubclass(member, WorkersConfig) else ())
            return Key(
                kind=Kind.SECTION,
                optional=optional,
                model=member,
                types=plain,
                default=default,
                items=next(filter(None, map(_item_section, members)), None),
            )
        if origin is dict:
            return Key(kind=Kind.FREE, optional=optional, default=default)
        if item := _item_section(member):
            return Key(kind=Kind.SECTION_LIST, optional=optional, model=item, default=default)
        if origin is tuple and get_origin(get_args(member)[0]) is dict:
            return Key(kind=Kind.FREE_LIST, optional=optional, default=default)
    plain = frozenset(member for member in members if isinstance(member, type))
    return Key(kind=Kind.LEAF, optional=optional, types=plain, default=default)


def _item_section(member: Any) -> type[BaseModel] | None:
    """The section that the items of a list have; None for any other type."""
    item = get_args(member)[0] if get_origin(member) is tuple else None
    return item if isinstance(item, type) and issubclass(item, BaseModel) else None


def union_members(annotation: Any) -> list[Any]:
    """The types that an annotation allows."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return [annotation]
    members = get_args(annotation)
    return [get_args(one)[0] if get_origin(one) is Annotated else one for one in members]
