"""Checks who may import whom (DESIGN section 4), and how the folders are laid out."""

import ast
import collections
import dataclasses
import fnmatch
import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

RECORDS = "services.process.phases services.wire.strict_json"

OURS = {
    "kernels": "",
    "models": "kernels models",
    "models.files": "models.config models.rope models.transformer models.adapter",
    "services": "services",
    "services.pb": "",
    "services.process": "",
    "services.user_code": "",
    "services.wire": "services.pb services.process",
    "services.weights": "services.pb services.process services.wire",
    "services.trajectories": "services.pb services.process services.wire",
    "services.control": "services.pb services.process services.wire",
    "diagnosis": f"diagnosis {RECORDS}",
    "diagnosis.catalog": RECORDS,
    "diagnosis.records": f"diagnosis.catalog {RECORDS}",
    "diagnosis.judgement": f"diagnosis.catalog diagnosis.records {RECORDS}",
    "diagnosis.compare": f"diagnosis {RECORDS}",
    "dashboard": "diagnosis services",
    "learner": "learner kernels models services",
    "learner.objective": "learner.config services.user_code services.wire",
    "learner.update": "learner.config learner.objective kernels models services.wire",
    "learner.publish": "learner.config learner.update kernels models services",
    "learner.durable": "learner.config learner.update models services",
    "learner.sft": "learner.config learner.objective learner.publish learner.update kernels models",
    "rollout_worker": "rollout_worker kernels models services",
    "rollout_worker.engine": "rollout_worker.config kernels models services",
    # Prompts carry the gold answer, and a scorer may ask the generator of its prompt.
    "rollout_worker.data": "rollout_worker.config rollout_worker.rewards.answers models services",
    "rollout_worker.environments": "rollout_worker.config rollout_worker.data.chat_rows "
    "rollout_worker.engine.decode_request rollout_worker.rewards models services",
    "rollout_worker.rewards": "rollout_worker.config rollout_worker.data.procedural "
    "models services",
    "driver": "driver learner rollout_worker models kernels services diagnosis "
    "dashboard.auth dashboard.listener",
    "driver.chip_plan": "driver.config learner rollout_worker models kernels services",
    "driver.config": "driver.errors learner rollout_worker models kernels services",
    "driver.accounting": "driver.errors learner rollout_worker services",
    "driver.fleet": "driver.config driver.accounting driver.errors driver.signals "
    "learner rollout_worker models services diagnosis",
    "driver.reports": "driver.config driver.accounting driver.errors "
    "learner rollout_worker services dashboard.auth dashboard.listener",
    "driver.postmortem": "driver.errors driver.reports services",
    "driver.sft": "driver.config driver.accounting driver.errors driver.reports driver.signals "
    "learner rollout_worker models kernels services",
    "driver.terminal": "driver.accounting driver.errors driver.reports services diagnosis",
    "benchmarks": "*",
    "deploy": "*",
}
"""Package or subpackage -> what of ours it may import besides itself: packages, subpackages or
modules. A folder without a row belongs to the row above it."""

ENTRIES = {
    "kernels/bench.py": "benchmarks.kernels.cli",
    "kernels/gradcheck.py": "benchmarks.gradcheck.cli",
    "kernels/tpu_report.py": "benchmarks.tpu.kernel_report",
    "learner/ab.py": "benchmarks.ab.cli",
    "learner/delta_bench.py": "benchmarks.transfer.optimizer_delta",
    "learner/sft/__main__.py": "driver.sft.cli",
    "rollout_worker/bench.py": "benchmarks.decode.cli",
    "services/bench.py": "benchmarks.transfer.cli",
}
"""Files that only start a program of another package, under the name that users know."""

THIRD_PARTY = {
    "kernels": {"jax": "*", "numpy": "*"},
    "models": {
        "jax": "*",
        "flax": "*",
        "numpy": "*",
        "ml_dtypes": "*",
        "safetensors": "*",
        "gguf": "files/gguf*.py",
        "huggingface_hub": "files/hf_folder.py",
        "transformers": "tokenizer.py load_tokenizer.py chat_template.py",
        "tokenizers": "*tokenizer.py",
        "jinja2": "chat_template.py",
    },
    "services": {
        "numpy": "*",
        "ml_dtypes": "*",
        "grpc": "*",
        "grpc_health": "*",
        "google": "*",
        "cryptography": "wire/tls.py",
        "pydantic": "process/config_section.py",
        "psutil": "process/*",
    },
    "diagnosis": {"numpy": "*", "ruamel": "records/*"},
    "dashboard": {
        "fastapi": "*",
        "h11": "*",
        "numpy": "*",
        "prometheus_client": "*",
        "pydantic": "*",
        "starlette": "*",
        "uvicorn": "*",
    },
    "learner": {
        "jax": "*",
        "flax": "*",
        "optax": "*",
        "orbax": "durable/*",
        "numpy": "*",
        "ml_dtypes": "*",
        "pydantic": "config.py",
    },
    "rollout_worker": {
        "jax": "*",
        "numpy": "*",
        "ml_dtypes": "*",
        "datasets": "data/*",
        "pyarrow": "data/*",
        "reasoning_gym": "*",
        "httpx": "rewards/judge.py",
        "jsonschema": "rewards/* environments/tools/*",
        "math_verify": "rewards/*",
        "referencing": "rewards/* environments/tools/*",
        "rank_bm25": "environments/tools/folder_search.py",
        "starlette": "environments/openai_endpoint/http_app.py",
        "gymnasium": "environments/adapters/gymnasium_text.py",
        "verifiers": "environments/adapters/verifiers_environment.py",
        "websockets": "environments/adapters/openenv_session.py",
        "sympy": "rewards/*",
        "pydantic": "config/* environments/tools/* environments/adapters/* "
        "environments/given_values.py",
        "psutil": "*",
        "uvicorn": "environments/openai_endpoint/http_app.py",
    },
    "driver": {
        "psutil": "*",
        "ray": "*",
        "rich": "*",
        "numpy": "*",
        "httpx": "hub_upload.py",
        "huggingface_hub": "hub_upload.py",
        "jax": "sft/sft_run.py chip_plan/*",
        "pydantic": "config/* sft/sft_config.py",
        "ruamel": "config/* export.py",
        "tensorboardX": "reports/tensorboard.py",
        "wandb": "reports/wandb_tracker.py",
    },
    "benchmarks": {"grpc": "transfer/peers.py", "*": "*"},
    "deploy": {"*": "*"},
}
"""Package -> module from outside -> which files of the package may import it."""

LAZY = {
    *("datasets", "gymnasium", "playwright", "rank_bm25", "tensorboardX", "torch", "verifiers"),
    *("wandb", "websockets"),
}
"""Modules from outside that an installation may lack: imported in functions only."""

FILES_IN_A_FOLDER = 15

NOT_OURS = {"__pycache__", "build", "downloads", "node_modules", "runs"}
"""Folders that git ignores, where they stand at the top or anywhere; so are dotted ones."""

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
    def unit(self) -> str:
        """The row of `OURS` that the file belongs to."""
        folders = self.file.parent.parts
        names = (".".join(folders[:depth]) for depth in range(len(folders), 0, -1))
        return next(name for name in names if name in OURS)

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


def sources(root: pathlib.Path, packages) -> list[pathlib.Path]:
    return [path for package in packages for path in sorted((root / package).rglob("*.py"))]


def packages_of_ours() -> list[str]:
    return [name for name in OURS if "." not in name]


def violations(root: pathlib.Path) -> list[str]:
    """Every breach of the table in a tree that is laid out like this repository."""
    found = []
    for path in sources(root, packages_of_ours()):
        for one in imports_of(root, path):
            if problem := _problem(one):
                found.append(f"{one.file}:{one.line}: {problem}")
    return found


def layout_violations(root: pathlib.Path) -> list[str]:
    """Folders without an empty `__init__.py`, too full, or without what they should mirror."""
    found = []
    for package in packages_of_ours():
        for folder in [root / package, *(root / package).rglob("*")]:
            # deploy/ is a folder of programs, not a package.
            if package == "deploy" or not folder.is_dir() or not any(folder.glob("*.py")):
                continue
            init = folder / "__init__.py"
            if not init.exists():
                found.append(f"{folder.relative_to(root)}: has no __init__.py")
            elif init.read_text(encoding="utf-8"):
                found.append(f"{init.relative_to(root)}: must be empty")
    stray = [*(root / "proto").rglob("*.py")]
    found += [f"{path.relative_to(root)}: proto/ holds no Python" for path in stray]
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in NOT_OURS]
        where = pathlib.Path(folder).relative_to(root)
        files = [file for file in files if not file.startswith(".")]
        if len(files) > FILES_IN_A_FOLDER:
            found.append(f"{where}: {len(files)} files, more than {FILES_IN_A_FOLDER}")
        if where.parts[:1] == ("tests",) and any(fnmatch.filter(files, "test_*.py")):
            mirrored = root.joinpath(*where.parts[1:])
            if not mirrored.is_dir() and where.as_posix() not in MIRRORS_NOTHING:
                found.append(f"{where}: mirrors no folder of the product")
    return found


MIRRORS_NOTHING = {
    "tests/cluster",
    "tests/dashboard/browser/page",
    "tests/dashboard/browser/views",
    "tests/driver/service",
}
"""Folders of tests of the whole: the page in a browser, a service of many processes or hosts."""


def classes_named_twice(root: pathlib.Path) -> list[str]:
    """Public classes of the product whose name more than one file defines."""
    files = collections.defaultdict(list)
    for path in sources(root, [p for p in packages_of_ours() if p not in ("benchmarks", "deploy")]):
        if "pb" in path.parts:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(path.relative_to(root).as_posix())
    return [f"class {name}: {', '.join(where)}" for name, where in files.items() if len(where) > 1]


def _problem(one: Import) -> str:
    top = one.module.split(".")[0]
    if top in OURS:
        is_core = one.inner != "actor.py" and one.package in ("learner", "rollout_worker")
        if is_core and _within(one.module, f"{one.package}.actor"):
            return "the core of a package does not import its actor"
        return _problem_with_ours(one)
    if top in sys.stdlib_module_names:
        return ""
    table = THIRD_PARTY[one.package]
    files = table.get(top) or (table.get("*") if top != "ray" else None)
    if files is None:
        return f"imports {top}, which {one.package} may not use"
    if not any(fnmatch.fnmatch(one.inner, pattern) for pattern in files.split()):
        return f"imports {top}; only {files} may"
    if top in LAZY and not one.in_function:
        return f"imports {top}, which may be absent, outside a function"
    return ""


def _problem_with_ours(one: Import) -> str:
    allowed = OURS[one.unit].split()
    entry = ENTRIES.get(one.file.as_posix())
    if (
        allowed == ["*"]
        or any(_within(one.module, name) for name in allowed)
        or _unit_of(one.module) == one.unit
        or (entry and _within(one.module, entry))
    ):
        return ""
    mine = ", ".join(allowed) or "nothing of ours"
    return f"imports {one.module}; {one.unit} may import {mine}"


def _unit_of(module: str) -> str:
    parts = module.split(".")
    names = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    return next(name for name in names if name in OURS)


def _within(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def _absolute(file: pathlib.PurePath, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parents = file.parent.parts[: len(file.parent.parts) - node.level + 1]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _called(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def test_imports_follow_the_table():
    assert violations(ROOT) == []


def test_folders_are_packages_that_hold_few_files_and_tests_mirror_them():
    assert layout_violations(ROOT) == []


def test_a_class_name_is_defined_once_in_the_product():
    assert classes_named_twice(ROOT) == []


def test_every_row_of_the_table_is_a_folder_with_sources():
    for name in OURS:
        assert any(ROOT.joinpath(*name.split(".")).glob("*.py")), name


def test_every_entry_only_starts_its_program():
    for file, program in ENTRIES.items():
        statements = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        assert [type(one) for one in statements] == [ast.Expr, ast.Import, ast.ImportFrom, ast.If]
        assert imports_of(ROOT, ROOT / file)[-1].module.startswith(f"{program}."), file


@pytest.fixture
def tree(tmp_path):
    """A tree that follows the table, and a function that plants a file in it."""
    for name in OURS:
        folder = tmp_path.joinpath(*name.split("."))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
    (tmp_path / "proto").mkdir()

    def plant(path, text, with_init=True):
        folder = (tmp_path / path).parent
        folder.mkdir(parents=True, exist_ok=True)
        if with_init and path.split("/")[0] in OURS:
            (folder / "__init__.py").touch()
        (tmp_path / path).write_text(text)
        return violations(tmp_path) + layout_violations(tmp_path) + classes_named_twice(tmp_path)

    return plant


@pytest.mark.parametrize(
    "path, text, part",
    [
        ("kernels/a.py", "import models.rope", "kernels may import nothing of ours"),
        ("kernels/choose.py", "from learner.objective import loss", "may import nothing of ours"),
        ("kernels/choose.py", "import benchmarks.kernels.cli", "may import nothing of ours"),
        ("kernels/bench.py", "import benchmarks.gradcheck.cli", "may import nothing of ours"),
        ("kernels/a.py", "import flax", "imports flax, which kernels may not use"),
        ("models/a.py", "from services.wire import codec", "models may import kernels"),
        ("models/files/a.py", "import models.tokenizer", "models.files may import models.config"),
        (
            "models/files/hf_config.py",
            "import transformers",
            "only tokenizer.py load_tokenizer.py chat_template.py may",
        ),
        ("models/a.py", "from learner.objective.loss import loss", "models may import kernels"),
        ("services/wire/a.py", "import services.control.client", "services.wire may import"),
        ("services/weights/a.py", "from services.control import client", "services.weights may"),
        ("services/control/a.py", "import services.trajectories.client", "services.control may"),
        ("services/process/a.py", "import services.wire.tls", "may import nothing of ours"),
        ("services/a.py", "import jax.numpy as jnp", "imports jax, which services may not use"),
        ("services/a.py", "def f():\n    import jax", "services/a.py:2"),
        ("services/wire/server.py", "import starlette", "which services may not use"),
        ("services/wire/a.py", "import cryptography", "only wire/tls.py may"),
        ("diagnosis/records/a.py", "import services.wire.codec", "diagnosis.records may import"),
        ("diagnosis/records/a.py", "import diagnosis.judgement.alerts", "diagnosis.records may"),
        ("diagnosis/a.py", "import dashboard.app", "diagnosis may import"),
        ("diagnosis/a.py", "import prometheus_client", "which diagnosis may not use"),
        ("dashboard/a.py", "import driver.reports.status", "dashboard may import"),
        ("dashboard/a.py", "import jax", "which dashboard may not use"),
        ("learner/a.py", "import grpc", "imports grpc, which learner may not use"),
        ("learner/update/state.py", "import ray", "imports ray, which learner may not use"),
        ("learner/actor.py", "import ray", "imports ray, which learner may not use"),
        ("learner/a.py", "from rollout_worker.config import X", "learner may import"),
        ("learner/update/a.py", "import learner.durable.spool", "learner.update may import"),
        ("learner/publish/a.py", "import learner.durable.spool", "learner.publish may import"),
        (
            "learner/objective/loss.py",
            "from learner.actor import LearnerActor",
            "core of a package",
        ),
        ("learner/loss.py", "from .actor import LearnerActor", "core of a package"),
        ("learner/objective/loss.py", "from learner import actor", "core of a package"),
        ("rollout_worker/engine/a.py", "import rollout_worker.rewards.scorers", "engine may"),
        ("rollout_worker/worker.py", "import pydantic", "only config/* environments/tools"),
        ("rollout_worker/engine/engine.py", "def f():\n    import torch", "may not use"),
        ("rollout_worker/a.py", "import importlib\nimportlib.import_module('ray')", "a.py:2"),
        ("driver/config/a.py", "import driver.accounting.leases", "driver.config may import"),
        ("driver/accounting/a.py", "import driver.postmortem.archive", "driver.accounting may"),
        ("driver/accounting/leases.py", "import datasets", "which driver may not use"),
        ("driver/fleet/balance.py", "import dashboard.auth", "driver.fleet may import"),
        ("driver/fleet/a.py", "import driver.terminal.top", "driver.fleet may import"),
        ("driver/run.py", "import dashboard.app", "driver may import"),
        ("driver/run.py", "import benchmarks.timing", "driver may import"),
        ("driver/run.py", "import wandb", "only reports/wandb_tracker.py may"),
        ("driver/run.py", "import grpc", "imports grpc, which driver may not use"),
        ("driver/run.py", "import transformers", "imports transformers"),
        ("driver/reports/wandb_tracker.py", "class A:\n    from wandb import x", "outside a funct"),
        ("driver/reports/metrics.py", "def f():\n    import tensorboardX", "tensorboard.py may"),
        ("driver/reports/tensorboard.py", "import tensorboardX", "outside a function"),
        ("benchmarks/a.py", "import ray", "imports ray, which benchmarks may not use"),
        ("benchmarks/a.py", "import grpc", "only transfer/peers.py may"),
        (
            "benchmarks/decode/hf_transformers.py",
            "import torch",
            "imports torch, which may be absent",
        ),
        ("deploy/a.py", "import ray", "imports ray, which deploy may not use"),
        ("models/__init__.py", "from models.rope import rotate", "must be empty"),
        ("proto/__init__.py", "", "proto/ holds no Python"),
        ("proto/tandem/v1/__init__.py", "", "proto/ holds no Python"),
        ("tests/models/deep/test_a.py", "", "tests/models/deep: mirrors no folder"),
    ],
)
def test_a_planted_violation_is_found(tree, path, text, part):
    found = tree(path, text)
    assert len(found) == 1 and part in found[0]


def test_a_folder_without_init_is_found(tree):
    assert tree("models/deep/rope.py", "", with_init=False) == ["models/deep: has no __init__.py"]


def test_a_folder_with_too_many_files_is_found(tree):
    for number in range(15):
        assert tree(f"docs/{number}.md", "") == []
    assert tree("docs/15.md", "") == ["docs: 16 files, more than 15"]


def test_a_class_that_is_defined_twice_is_found(tree):
    assert tree("models/a.py", "class Rope: ...") == []
    assert tree("benchmarks/b.py", "class Rope: ...") == []
    assert tree("driver/fleet/c.py", "class Rope: ...") == [
        "class Rope: models/a.py, driver/fleet/c.py"
    ]


@pytest.mark.parametrize(
    "path, text",
    [
        ("driver/reports/wandb_tracker.py", "def f():\n    import wandb"),
        ("driver/reports/tensorboard.py", "def f():\n    import tensorboardX"),
        ("driver/reports/dashboard_process.py", "from dashboard.auth import token_path"),
        ("driver/accounting/a.py", "from driver import errors"),
        ("benchmarks/kernels/cli.py", "def f():\n    if True:\n        from wandb import errors"),
        ("kernels/bench.py", "from benchmarks.kernels.cli import main"),
        ("benchmarks/gradcheck/a.py", "from learner.objective.loss import Objective\nimport flax"),
        ("learner/actor.py", "from learner.core import Core"),
        ("models/tokenizer.py", "import transformers\nfrom models.files import hf_folder"),
        ("models/deep/a.py", "from models.deep import b"),
        ("services/wire/tls.py", "import grpc\nimport cryptography.x509"),
        ("services/learner_server.py", "import services.weights.store, services.control.service"),
        ("diagnosis/records/a.py", "from services.process.phases import PHASES"),
        ("rollout_worker/data/prompts.py", "async def f():\n    import datasets, json"),
    ],
)
def test_what_the_table_allows_is_no_violation(tree, path, text):
    assert tree(path, text) == []
