"""The fingerprint of a plan: what changes it, and what does not."""

import pytest

from driver.chip_plan.fingerprint import fingerprint, kernel_sources
from driver.chip_plan.run_shape import PlanRequest
from driver.chip_plan.topology import parse_topology


def of(*overrides, usable_gib=1.0):
    request = PlanRequest(
        path="deploy/runs/demo_cpu.yaml",
        overrides=("learner.microbatch_tokens=256", *overrides),
        topology=parse_topology("cpu", usable_gib),
    )
    return fingerprint(request, request.shape())


def test_only_what_memory_and_programs_depend_on_changes_it():
    plain = of()
    assert plain == of("run.name=other", "checkpoint.every_steps=7")
    others = [
        of("learner.optimizer.name=lion"),  # another program
        of("rollout.decode.slots=32"),  # other sizes
        of(usable_gib=2.0),  # another chip
    ]
    assert len({plain, *others}) == 4


@pytest.fixture
def folder(tmp_path):
    """A package with a Pallas kernel, a file beside it, one that this imports, and two others."""
    files = {
        "attention/pallas_tpu.py": "from kernels.attention import blocks\nsize = blocks.SIZE\n",
        "attention/blocks.py": "from kernels.choose import LANES\nSIZE = 2 * LANES\n",
        "choose.py": "LANES = 128\n",
        "unused.py": "X = 1\n",
        "loss/xla.py": "Y = 1\n",
    }
    for name, text in files.items():
        path = tmp_path / "kernels" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "kernels"


@pytest.mark.parametrize(
    "name, text",
    [
        ("attention/pallas_tpu.py", "size = 1\n"),
        ("attention/blocks.py", "from kernels.choose import LANES\nSIZE = LANES\n"),
        ("choose.py", "LANES = 64\n"),
        ("attention/later.py", "NEW = 1\n"),
    ],
)
def test_a_kernel_changes_with_the_files_beside_it_and_those_that_they_import(folder, name, text):
    before = kernel_sources(folder)
    (folder / name).write_text(text)
    assert kernel_sources(folder) != before


@pytest.mark.parametrize(
    "name, text",
    [
        ("unused.py", "X = 2\n"),
        ("loss/xla.py", "Y = 2\n"),
        ("choose.py", '"""Says what it is for."""\n\nLANES = (\n    128  # of a TPU\n)\n'),
    ],
)
def test_a_kernel_does_not_change_with_other_files_or_with_words(folder, name, text):
    before = kernel_sources(folder)
    (folder / name).write_text(text)
    assert kernel_sources(folder) == before
