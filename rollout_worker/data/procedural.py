"""Tasks of reasoning-gym by name, with errors that name the nearest task or parameter.

`prompts.py` makes the items of a task here, and `scorers.py` makes the same item again in a child
process, so that the task can score an answer.
"""

import dataclasses
import typing
from typing import Any

from services.user_code.import_path import nearest_hint

PREFIX = "reasoning_gym:"
MAX_ITEMS = 1_000_000
"""Of one source: all prompts are made and encoded before the first step."""


def make_dataset(task: str, *, seed: int, size: int, params: dict[str, Any]):
    """Makes a reasoning-gym dataset; of most tasks, item i is a function of seed + i.

    Args:
        task: its name in reasoning-gym, such as `chain_sum`.
        seed: of the first item. Two seeds that differ by less than `size` share items.
        size: number of items.
        params: fields of the task's own configuration, without seed and size.

    Raises:
        ValueError: if the task or a parameter is unknown, or the task refuses a value.
    """
    # Imported here, since it takes a second and other sources and scorers do not need it.
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise ValueError(
            f"reasoning_gym has no task {task!r}{nearest_hint(task, list(DATASETS))}; "
            "reasoning_gym.factory.DATASETS lists all"
        )
    known = [field.name for field in dataclasses.fields(DATASETS[task][1])]
    for name in params:
        if name in ("seed", "size"):
            raise ValueError(f"{PREFIX}{task}: give {name} as the source's own key, not in params")
        if name not in known:
            own = sorted(set(known) - {"seed", "size"})
            raise ValueError(
                f"{PREFIX}{task} has no parameter {name!r}{nearest_hint(name, own)}; it knows {own}"
            )
    _check_types(task, DATASETS[task][1], params)
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **params)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{PREFIX}{task} refuses {params}: {error}") from error


def _check_types(task: str, config: type, params: dict[str, Any]) -> None:
    """Refuses values of the wrong type for plain fields; the task checks the others."""
    hints = typing.get_type_hints(config)
    for name, value in params.items():
        wanted = hints.get(name)
        if wanted not in (bool, int, float, str):
            continue
        accepted = (int, float) if wanted is float else wanted
        wrong_bool = isinstance(value, bool) and wanted is not bool
        if wrong_bool or not isinstance(value, accepted):
            raise ValueError(
                f"{PREFIX}{task}: parameter {name}={value!r} must be of type {wanted.__name__}, "
                f"got {type(value).__name__}"
            )
