"""What a plan was made of, so that one that was kept can be recognised as out of date.

Compiling takes minutes and lowering seconds: the fingerprint is of the programs as JAX hands them
to the compiler, of the model's first layer alone, and of the sizes of the arrays of the whole. The
kernels inside them count by their sources, since their binary form has line numbers.
"""

import ast
import hashlib
import pathlib
import re

import kernels
from driver.chip_plan.run_shape import ROLES, PlanRequest, RunShape

PROGRAMS = frozenset({"accumulate", "apply", "prefill", "segment"})
"""The ones that decide about memory."""
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
    found.update(_kernel_sources().encode())
    return found.hexdigest()[:32]


def _lowered(shape: RunShape) -> list[str]:
    return [
        _KERNEL.sub("", planned.lower().as_text())
        for role in ROLES
        for planned in shape.planned(role)
        if planned.name in PROGRAMS
    ]


def _kernel_sources() -> str:
    """The syntax of every Pallas kernel for a TPU, without comments and layout."""
    (folder,) = kernels.__path__
    files = sorted(pathlib.Path(folder).rglob("pallas*.py"))
    return "".join(ast.dump(ast.parse(file.read_text(encoding="utf-8"))) for file in files)
