"""What a plan was made of, so that one that was kept can be recognised as out of date.

Compiling takes minutes and lowering seconds: the fingerprint is of the programs as JAX hands them
to the compiler, of the model's first layer alone, and of the sizes of the arrays of the whole. The
kernels inside them count by their sources, since their binary form has line numbers: those beside a
Pallas kernel, which may make its body or choose its blocks, and all that these import.
"""

import ast
import hashlib
import pathlib
import re
from collections.abc import Iterator

import kernels
from driver.chip_plan.learner_programs import ACCUMULATE, SHORTER
from driver.chip_plan.run_program import PlannedProgram
from driver.chip_plan.run_shape import ROLES, PlanRequest, RunShape

PROGRAMS = frozenset({ACCUMULATE, ACCUMULATE + SHORTER, "apply", "prefill", "segment"})
"""The ones that decide about memory."""
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_KERNEL = re.compile(r'backend_config = "[^"]*"')


def fingerprint(request: PlanRequest, shape: RunShape) -> str:
    """Hex digits that are equal while programs, sizes, kernels and topology are.

    Args:
        shape: of the request, whole.
    """
    found = hashlib.sha256(f"{request.topology.name} {request.topology.usable_bytes}".encode())
    for role in ROLES:
        for planned in shape.planned(role):
            found.update(f"{role} {planned.name} {planned.inside} {planned.beside}".encode())
    for text in _lowered(request.with_layers(1).shape()):
        found.update(text.encode())
    (folder,) = kernels.__path__
    found.update(kernel_sources(pathlib.Path(folder)).encode())
    return found.hexdigest()[:32]


def _lowered(shape: RunShape) -> list[str]:
    return [
        _text_of(planned)
        for role in ROLES
        for planned in shape.planned(role)
        if planned.name in PROGRAMS
    ]


def _text_of(planned: PlannedProgram) -> str:
    try:
        return _KERNEL.sub("", planned.lower().as_text())
    # Of a program that cannot be lowered, which the plan says (ProgramCompiler).
    except Exception as error:
        return f"{type(error).__name__} {error}"


def kernel_sources(folder: pathlib.Path) -> str:
    """The syntax of all that may be in a Pallas kernel, without comments, docstrings and layout.

    Args:
        folder: of the package `kernels`.
    """
    found: dict[pathlib.Path, ast.Module] = {}
    wanted = [file for one in folder.rglob("pallas*.py") for file in one.parent.glob("*.py")]
    while wanted:
        file = wanted.pop()
        if file not in found and file.is_file():
            found[file] = ast.parse(file.read_text(encoding="utf-8"))
            wanted += _imported(found[file], folder)
    return "".join(
        f"{file.relative_to(folder)} {ast.dump(_without_docstrings(found[file]))}"
        for file in sorted(found)
    )


def _imported(tree: ast.Module, folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Files of the package that a module imports from, and names that may be files."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [f"{node.module}"]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for package, *inner in (name.split(".") for name in names):
            if package == folder.name and inner:
                yield folder.joinpath(*inner).with_suffix(".py")


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node) is not None:
            del node.body[0]
    return tree
