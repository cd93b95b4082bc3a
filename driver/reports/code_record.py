"""What code a run was made by, kept in its folder: `code.zip` and `environment.json`.

`code.zip` has the `.py` and `.proto` files of Tandem's packages as they lie where the driver runs,
which also is a submitted job's copy without a repository. Equal files make equal bytes. Where a run
goes on with other code, what it had before is kept as `code-1.zip`, `code-2.zip`, ..., and likewise
for the environment.
"""

import importlib.metadata
import io
import json
import os
import pathlib
import platform
import re
import subprocess
import zipfile
from typing import Any

from services.process.whole_file import write_whole

PACKAGES = (
    *("benchmarks", "dashboard", "diagnosis", "driver", "kernels", "learner", "models"),
    *("proto", "rollout_worker", "services"),
)
SUFFIXES = (".py", ".proto")
DATE = (1980, 1, 1, 0, 0, 0)
"""Of every file in the archive: the oldest that the format can hold."""
CODE, ENVIRONMENT = "code.zip", "environment.json"
COMMAND_S = 10.0
_NAME, _VERSION = re.compile(r"^Name: *(\S+)", re.M), re.compile(r"^Version: *(\S+)", re.M)

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def record_code(folder: pathlib.Path, *, resume: bool, root: pathlib.Path = _ROOT) -> None:
    """Writes both files, each whole or not at all.

    Args:
        folder: of the run.
        resume: whether the run goes on, so that what was there before and differs is kept.
        root: where the packages lie.
    """
    _write(folder / CODE, code_archive(root), keep=resume)
    content = json.dumps(environment(root), indent=1, sort_keys=True) + "\n"
    _write(folder / ENVIRONMENT, content.encode(), keep=resume)


def code_archive(root: pathlib.Path) -> bytes:
    """A zip of the source files below the packages: sorted, with one date and one mode."""
    files = [
        path
        for package in PACKAGES
        for path in (root / package).rglob("*")
        if path.suffix in SUFFIXES and path.is_file()
    ]
    names = {path.relative_to(root).as_posix(): path for path in files}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(names):
            info = zipfile.ZipInfo(name, DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            archive.writestr(info, names[name].read_bytes())
    return buffer.getvalue()


def environment(root: pathlib.Path) -> dict[str, Any]:
    """What the code ran on: versions of all packages, and the commit where there is a repository.

    `commit` and `dirty` are None where git cannot say.
    """
    commit = git_output("rev-parse", "HEAD", root=root)
    changes = (
        None if commit is None else git_output("status", "--porcelain", "--", *PACKAGES, root=root)
    )
    return {
        "versions": package_versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "commit": commit,
        "dirty": None if changes is None else bool(changes),
    }


def package_versions() -> dict[str, str]:
    """Version by name of everything that is installed."""
    packages = {}
    for distribution in importlib.metadata.distributions():
        # `distribution.name` parses whole descriptions, a second for the packages of a run.
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        name, version = _NAME.search(text), _VERSION.search(text)
        if name and version:
            packages[name[1]] = version[1]
    return dict(sorted(packages.items(), key=lambda pair: pair[0].lower()))


def git_output(*arguments: str, root: pathlib.Path = _ROOT) -> str | None:
    """Git's output; None where it is not installed or root is not the top of a repository."""
    if not (root / ".git").exists():
        return None  # a folder around it may be another project's
    try:
        asked = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            timeout=COMMAND_S,
            text=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None


def _write(path: pathlib.Path, content: bytes, *, keep: bool) -> None:
    """Writes a file; one with other content is renamed to `<name>-<n>` first, if it is to stay."""
    if keep and path.is_file():
        if path.read_bytes() == content:
            return
        n = 1
        while (older := path.with_stem(f"{path.stem}-{n}")).exists():
            n += 1
        path.rename(older)
    write_whole(path, content)
