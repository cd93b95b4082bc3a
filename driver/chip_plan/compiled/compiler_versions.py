"""Versions of what decides about a compiled program."""

import importlib.metadata

COMPILERS = ("jax", "jaxlib", "libtpu")


def compiler_versions() -> dict[str, str | None]:
    """Version by name; None for what is not installed."""
    return {name: _version(name) for name in COMPILERS}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
