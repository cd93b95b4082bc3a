"""The list of deliberate breaks fits the product as it is."""

import ast

import pytest

from tests.breaks import BREAKS, ROOT, copy_tree


def test_the_breaks_differ_and_stand_in_many_files():
    assert len(BREAKS) == len({(one.file, one.text) for one in BREAKS})
    assert len({one.file for one in BREAKS}) >= 45


@pytest.mark.parametrize("broken", BREAKS, ids=lambda one: one.file)
def test_a_break_changes_one_place_and_stays_python(broken):
    source = (ROOT / broken.file).read_text(encoding="utf-8")
    assert source.count(broken.text) == 1
    ast.parse(source.replace(broken.text, broken.replacement))
    for name in broken.tests.split():
        assert (ROOT / "tests" / name).exists()


def test_a_copy_has_all_of_the_product_and_nothing_of_an_environment(tmp_path):
    copy_tree(tmp_path / "tree")
    assert (tmp_path / "tree/deploy/runs/demo_cpu.yaml").is_file()
    assert (tmp_path / "tree/dashboard/runs/__init__.py").is_file()
    assert not (tmp_path / "tree/.venv").exists() and not (tmp_path / "tree/.git").exists()
    assert not list((tmp_path / "tree").rglob("__pycache__"))
