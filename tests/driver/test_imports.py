"""Checks that a process of the product imports no library that it does not use.

Only what is imported together with an entry counts, not what a function imports.
"""

import ast
import functools
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

CONFIGURATION = {"numpy", "pydantic", "ruamel"}
MODEL = {
    *("cryptography", "flax", "gguf", "google", "huggingface_hub", "jax", "jinja2", "ml_dtypes"),
    *("numpy", "psutil", "pydantic", "tokenizers", "transformers"),
}
WIRE = {"grpc", "grpc_health"}
ENTRIES = {
    # `--help` and `--print-config`: what checks the data and what runs is imported after them.
    "driver.cli": CONFIGURATION,
    "driver.config.prepare": MODEL | WIRE | {"ruamel"},
    "driver.sft.cli": CONFIGURATION,
    "driver.sft.sft_run": MODEL | WIRE | {"optax", "orbax", "ruamel"},
    "driver.run": MODEL | WIRE | {"ray", "rich", "ruamel"},
    "learner.recorded_learner": MODEL | {"optax", "orbax"},
    "rollout_worker.actor": MODEL | WIRE,
    "rollout_worker.rewards.processes.reward_child": {"psutil"},
    "rollout_worker.environments.environment_child": {"psutil"},
    "driver.reports.end_watch": {"psutil"},
    "driver.scale": {"cryptography", "google", "grpc", "psutil", "rich"},
    "deploy.run_local": set(),
}
"""Module that a process starts with -> libraries that may be imported with it."""


@functools.cache
def imported_by(module: str) -> frozenset[str]:
    """Names of the modules that importing this one imports; those of a package's `from` as well."""
    path = path_of(module)
    assert path is not None, module
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif not (is_function(node) or is_for_types(node)):
                pending.append(node)
    return frozenset(found)


def path_of(module: str) -> pathlib.Path | None:
    """The file of a module of ours; None for any other name."""
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return path if path.is_file() else None


def is_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def libraries_of(entry: str) -> set[str]:
    """Top names of all from outside that are imported with a module of ours."""
    seen, pending, found = {entry}, [entry], set()
    while pending:
        for name in imported_by(pending.pop()):
            if path_of(name) is not None:
                pending += [name] * (name not in seen)
                seen.add(name)
            elif not (ROOT / name.split(".")[0]).is_dir():
                found.add(name.split(".")[0])
    return found - sys.stdlib_module_names


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_imports_what_its_process_uses(entry):
    assert libraries_of(entry) - ENTRIES[entry] == set()


def test_what_a_function_imports_does_not_count_and_all_else_does():
    assert "optax" in libraries_of("learner.recorded_learner")
    assert "optax" not in libraries_of("learner.actor")
    assert "driver.run" not in imported_by("driver.cli")
    assert "numpy" in libraries_of("driver.__main__")
