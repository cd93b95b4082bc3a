"""What is kept of the code that a run was made by."""

import json
import os
import subprocess
import zipfile

import pytest

from driver.config.paths import check_folder
from driver.reports.code_record import PACKAGES, code_archive, record_code


@pytest.fixture
def root(tmp_path):
    """Laid out like the repository, with files that do not belong into the archive."""
    root = tmp_path / "source"
    files = {
        "driver/run.py": "print(1)\n",
        "driver/__init__.py": "",
        "dashboard/app.py": "print(2)\n",
        "dashboard/static/app.js": "js",
        "proto/tandem/v1/weights.proto": "syntax",
        "models/secret.env": "KEY=1",
        "driver/__pycache__/run.pyc": "",
        "tests/test_a.py": "print(3)\n",
        "engine_setup.py": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def environment(folder):
    return json.loads((folder / "environment.json").read_text())


def test_the_archive_holds_the_sources_of_the_packages_and_nothing_else(root, folder):
    record_code(folder, resume=False, root=root)
    with zipfile.ZipFile(folder / "code.zip") as archive:
        assert archive.namelist() == [
            "dashboard/app.py",
            "driver/__init__.py",
            "driver/run.py",
            "proto/tandem/v1/weights.proto",
        ]
        assert archive.read("driver/run.py") == b"print(1)\n"


def test_equal_sources_make_equal_bytes_whatever_their_dates(root):
    before = code_archive(root)
    os.utime(root / "driver/run.py", (1e9, 1e9))
    (root / "driver/run.py").chmod(0o755)
    assert code_archive(root) == before
    (root / "driver/run.py").write_text("print(7)\n")
    assert code_archive(root) != before


def test_without_a_repository_there_is_no_commit(root, folder):
    """As in the copy that a submitted job runs in."""
    record_code(folder, resume=False, root=root)
    found = environment(folder)
    assert found["commit"] is None and found["dirty"] is None
    assert found["versions"]["numpy"] and found["python"] and found["platform"]
    assert found["cpus"] >= 1


def test_the_commit_is_recorded_and_whether_the_packages_match_it(root, folder):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", root, *identity, *arguments], check=True, capture_output=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    (root / "notes.txt").write_text("no package")
    record_code(folder, resume=False, root=root)
    assert len(environment(folder)["commit"]) == 40
    assert environment(folder)["dirty"] is False
    (root / "driver/run.py").write_text("print(2)\n")
    record_code(folder, resume=False, root=root)
    assert environment(folder)["dirty"] is True


def test_a_resume_keeps_what_the_run_had_before_where_it_differs(root, folder):
    record_code(folder, resume=False, root=root)
    first = (folder / "code.zip").read_bytes()
    record_code(folder, resume=True, root=root)
    assert sorted(path.name for path in folder.iterdir()) == ["code.zip", "environment.json"]
    for number in (1, 2):
        (root / "driver/run.py").write_text(f"print({10 + number})\n")
        record_code(folder, resume=True, root=root)
        assert (folder / f"code-{number}.zip").is_file()
    assert (folder / "code-1.zip").read_bytes() == first
    assert (folder / "code.zip").read_bytes() == code_archive(root)


def test_a_try_that_never_closed_a_step_does_not_stand_in_the_way_of_the_next(root, folder):
    record_code(folder, resume=False, root=root)
    (root / "driver/run.py").write_text("print(2)\n")
    record_code(folder, resume=False, root=root)
    assert not (folder / "code-1.zip").exists()
    check_folder(folder, resume=False)


def test_the_packages_are_those_of_this_repository():
    from driver.reports.code_record import _ROOT

    assert all((_ROOT / package).is_dir() for package in PACKAGES)
    with_sources = {path.parent.name for path in _ROOT.glob("*/__init__.py")}
    assert with_sources - {"tests"} <= set(PACKAGES)
