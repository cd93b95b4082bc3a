"""Tools by the names that a configuration gives them."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rollout_worker.environments.given_values import check_values
from rollout_worker.environments.tools.calculator import calculator
from rollout_worker.environments.tools.folder_search import make_search
from rollout_worker.environments.tools.function_schemas import BadTool
from rollout_worker.environments.tools.python_tool import make_python
from services.user_code.import_path import BadImportPath, load_named, nearest_hint

BUILT_IN: dict[str, Callable[..., Callable[..., Any]]] = {
    "calculator": lambda: calculator,
    "python": make_python,
    "search": make_search,
}
"""What makes each tool of its parameters."""


def load_tool(given: str | Mapping[str, Any]) -> Callable[..., Any]:
    """The function of a tool.

    Args:
        given: its name, or a mapping of `name` and its parameters: one of `BUILT_IN`, or an import
            path `package.module:function` or a function of a file, which have none.

    Raises:
        BadTool: if there is none, or it does not take the parameters.
    """
    params = dict(given) if isinstance(given, Mapping) else {"name": given}
    name = params.pop("name", None)
    if not isinstance(name, str):
        raise BadTool(f"a tool is a name, or a mapping with a name, got {given!r:.80}")
    if name in BUILT_IN:
        make = BUILT_IN[name]
        try:
            inspect.signature(make).bind(**params)
        except TypeError as error:
            takes = list(inspect.signature(make).parameters)
            raise BadTool(f"tool {name!r}: {error}; it takes {takes or 'no parameters'}") from error
        check_values(f"tool {name!r}: ", make, params)
        return make(**params)
    if ":" not in name:
        raise BadTool(
            f"unknown tool {name!r}{nearest_hint(name, list(BUILT_IN))}: built in are "
            f"{', '.join(BUILT_IN)}; your own is written package.module:function, or "
            "as one of a file, my_pkg/tools.py:function"
        )
    if params:
        raise BadTool(f"tool {name!r} takes no parameters, got {sorted(params)}")
    try:
        return load_named(name)
    except BadImportPath as error:
        raise BadTool(f"tool {name!r}: {error}") from error
