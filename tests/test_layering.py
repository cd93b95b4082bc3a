"""Holds who may import whom: the table of DESIGN section 4, read from the source by `ast`."""

import ast
import dataclasses
import fnmatch
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

OURS = {
    "kernels": {"models": "gradcheck/*", "learner.loss": "gradcheck/*"},
    "models": {"kernels": "*"},
    "services": {},
    "learner": {"kernels": "*", "models": "*", "services": "*"},
    "rollout_worker": {"kernels": "*", "models": "*", "services": "*"},
    "driver": {
        "kernels": "*",
        "models": "*",
        "services": "*",
        "learner": "*",
        "rollout_worker": "*",
    },
}
"""Package -> another package of ours, or one module of it -> which files may import it."""

THIRD_PARTY = {
    "kernels": {"jax": "*", "numpy": "*", "wandb": "bench/cli.py"},
    "models": {
        "jax": "*",
        "flax": "*",
        "numpy": "*",
        "ml_dtypes": "*",
        "safetensors": "*",
        "gguf": "gguf*.py",
        "huggingface_hub": "hf_folder.py",
        "transformers": "tokenizer.py",
        "tokenizers": "*tokenizer.py",
        "jinja2": "*tokenizer.py",
    },
    "services": {
        "numpy": "*",
        "ml_dtypes": "*",
        "grpc": "*",
        "grpc_health": "*",
        "google": "*",
        "cryptography": "tls.py",
        "h11": "dashboard/server.py",
        "prometheus_client": "dashboard/*",
        "ruamel": "dashboard/*",
        "starlette": "dashboard/*",
        "uvicorn": "dashboard/*",
    },
    "learner": {
        "jax": "*",
        "flax": "*",
        "optax": "*",
        "orbax": "*",
        "numpy": "*",
        "ml_dtypes": "*",
        "pydantic": "config.py",
        "ray": "actor.py",
    },
    "rollout_worker": {
        "jax": "*",
        "numpy": "*",
        "ml_dtypes": "*",
        "datasets": "prompts.py",
        "pyarrow": "prompts.py",
        "reasoning_gym": "*",
        "math_verify": "*",
        "pydantic": "config.py",
        "ray": "actor.py",
        "torch": "bench/hf.py",
        "transformers": "bench/hf.py",
    },
    "driver": {
        "psutil": "cluster.py",
        "ray": "*",
        "rich": "*",
        "numpy": "*",
        "pydantic": "*",
        "ruamel": "*",
        "tensorboardX": "tensorboard.py",
        "wandb": "wandb_tracker.py",
    },
}
"""Package -> module from outside -> which files of the package may import it."""

LAZY = {"datasets", "tensorboardX", "torch", "wandb"}
"""Modules from outside that an installation may lack: imported in functions only."""


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclasses.dataclass(frozen=True)
class Import:
    """One import statement, or a call that imports a module by a literal name."""

    file: pathlib.PurePath
    """Relative to the repository."""
    line: int
    module: str
    in_function: bool

    @property
    def package(self) -> str:
        return self.file.parts[0]

    @property
    def inner(self) -> str:
        """The file's path inside its package."""
        return "/".join(self.file.parts[1:])


def imports_of(root: pathlib.Path, path: pathlib.Path) -> list[Import]:
    """Every import of a file, at any depth of it."""
    file = path.relative_to(root)
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    in_function = {id(node) for function in functions for node in ast.walk(function)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(file, node)
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and _called(node.func) in ("import_module", "__import__"):
            names = [a.value for a in node.args[:1] if isinstance(a, ast.Constant)]
        else:
            continue
        found += [Import(file, node.lineno, name, id(node) in in_function) for name in names]
    return found


def violations(root: pathlib.Path) -> list[str]:
    """Every breach of the table in a tree that is laid out like this repository."""
    found = []
    for package in OURS:
        for path in sorted((root / package).rglob("*.py")):
            for one in imports_of(root, path):
                problem = _problem(one)
                if problem:
                    found.append(f"{one.file}:{one.line}: {problem}")
        for folder in [root / package, *(root / package).rglob("*")]:
            if not folder.is_dir() or folder.name == "__pycache__" or not any(folder.glob("*.py")):
                continue
            init = folder / "__init__.py"
            if not init.exists():
                found.append(f"{folder.relative_to(root)}: has no __init__.py")
            elif init.read_text(encoding="utf-8"):
                found.append(f"{init.relative_to(root)}: must be empty")
    stray = [*(root / "proto").rglob("*.py")]
    found += [f"{path.relative_to(root)}: proto/ holds no Python" for path in stray]
    return found


def _problem(one: Import) -> str:
    top = one.module.split(".")[0]
    if top == one.package:
        is_core = one.inner != "actor.py" and one.package in ("learner", "rollout_worker")
        if is_core and one.module.split(".")[1:2] == ["actor"]:
            return "the core of a package does not import its actor"
        return ""
    if top in OURS:
        return _problem_with_ours(one, top)
    if top in sys.stdlib_module_names:
        return ""
    files = THIRD_PARTY[one.package].get(top)
    if files is None:
        return f"imports {top}, which {one.package} may not use"
    if not fnmatch.fnmatch(one.inner, files):
        return f"imports {top}; only {files} may"
    if top in LAZY and not one.in_function:
        return f"imports {top}, which may be absent, outside a function"
    return ""


def _problem_with_ours(one: Import, top: str) -> str:
    table = OURS[one.package]
    for name, files in table.items():
        if one.module == name or one.module.startswith(f"{name}."):
            return "" if fnmatch.fnmatch(one.inner, files) else f"imports {name}; only {files} may"
    return f"imports {top}; may import {', '.join(sorted(table)) or 'no package of ours'}"


def _absolute(file: pathlib.PurePath, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parents = file.parent.parts[: len(file.parent.parts) - node.level + 1]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _called(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def test_imports_hold_the_table():
    assert violations(ROOT) == []


def test_every_package_is_seen():
    for package in OURS:
        assert any((ROOT / package).glob("*.py")), package


@pytest.fixture
def tree(tmp_path):
    """A tree that holds the table, and a function that plants a file in it."""
    for package in OURS:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "proto").mkdir()

    def plant(path, text):
        folder = (tmp_path / path).parent
        folder.mkdir(parents=True, exist_ok=True)
        if folder.name in ("bench", "gradcheck"):
            (folder / "__init__.py").touch()
        (tmp_path / path).write_text(text)
        return violations(tmp_path)

    return plant


@pytest.mark.parametrize(
    "path, text, part",
    [
        ("kernels/a.py", "import models.rope", "imports models; only gradcheck/* may"),
        ("kernels/choose.py", "from learner import loss", "imports learner.loss; only gradcheck"),
        ("kernels/gradcheck/a.py", "import learner.core", "may import learner.loss, models"),
        ("kernels/gradcheck/a.py", "from learner import losses", "may import learner.loss, models"),
        ("kernels/gradcheck/a.py", "import flax", "imports flax, which kernels may not use"),
        (
            "benchmarks/kernels/run.py",
            "def f():\n    import wandb",
            "imports wandb; only bench/cli",
        ),
        (
            "benchmarks/kernels/cli.py",
            "import wandb",
            "imports wandb, which may be absent, outside",
        ),
        ("services/a.py", "import models.rope", "may import no package of ours"),
        ("models/a.py", "from services import codec", "imports services; may import kernels"),
        ("models/files/hf_config.py", "import transformers", "only tokenizer.py may"),
        ("services/a.py", "import jax.numpy as jnp", "imports jax, which services may not use"),
        ("services/a.py", "def f():\n    import jax", "services/a.py:2"),
        ("services/wire/server.py", "import starlette", "only dashboard/* may"),
        ("learner/a.py", "import grpc", "imports grpc, which learner may not use"),
        ("learner/update/state.py", "import ray", "only actor.py may"),
        ("learner/a.py", "from rollout_worker.config import X", "imports rollout_worker"),
        ("learner/update/loss.py", "from learner.actor import LearnerActor", "core of a package"),
        ("learner/update/loss.py", "from .actor import LearnerActor", "core of a package"),
        ("learner/update/loss.py", "from learner import actor", "core of a package"),
        ("driver/accounting/data_order.py", "import datasets", "only prompts.py may"),
        ("rollout_worker/worker.py", "import pydantic", "only config.py may"),
        ("rollout_worker/engine/engine.py", "def f():\n    import torch", "only bench/hf.py may"),
        ("benchmarks/decode/hf.py", "import torch", "imports torch, which may be absent"),
        ("rollout_worker/a.py", "import importlib\nimportlib.import_module('ray')", "a.py:2"),
        ("driver/run.py", "import wandb", "only wandb_tracker.py may"),
        (
            "driver/reports/wandb_tracker.py",
            "class A:\n    from wandb import errors",
            "outside a function",
        ),
        (
            "driver/reports/metrics.py",
            "def f():\n    import tensorboardX",
            "only tensorboard.py may",
        ),
        ("driver/reports/tensorboard.py", "import tensorboardX", "outside a function"),
        ("driver/run.py", "import grpc", "imports grpc, which driver may not use"),
        ("driver/run.py", "import transformers", "imports transformers"),
        ("models/__init__.py", "from models.rope import rotate", "must be empty"),
        ("models/deep/rope.py", "", "models/deep: has no __init__.py"),
        ("proto/__init__.py", "", "proto/ holds no Python"),
        ("proto/tandem/v1/__init__.py", "", "proto/ holds no Python"),
    ],
)
def test_a_planted_violation_is_found(tree, path, text, part):
    found = tree(path, text)
    assert len(found) == 1 and part in found[0]


@pytest.mark.parametrize(
    "path, text",
    [
        ("driver/reports/wandb_tracker.py", "def f():\n    import wandb"),
        ("driver/reports/tensorboard.py", "def f():\n    import tensorboardX"),
        ("benchmarks/kernels/cli.py", "def f():\n    if True:\n        from wandb import errors"),
        ("kernels/gradcheck/a.py", "from learner.loss import Objective\nfrom models import rope"),
        ("learner/actor.py", "import ray\nfrom learner.core import Core"),
        ("models/tokenizer.py", "import transformers"),
        ("services/wire/tls.py", "import grpc\nimport cryptography.x509"),
        ("rollout_worker/data/prompts.py", "async def f():\n    import datasets, json"),
    ],
)
def test_what_the_table_allows_is_no_violation(tree, path, text):
    assert tree(path, text) == []
