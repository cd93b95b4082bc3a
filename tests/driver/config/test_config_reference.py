"""docs/configuration.md names every configuration key, and is the page that the models make now."""

import pathlib

import pytest

from driver.config.config_keys import known_keys
from driver.config.config_reference import main, reference

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_committed_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == reference(), (
        "run `python -m driver.config.config_reference > docs/configuration.md`"
    )


def test_every_key_is_on_the_page_and_has_a_description():
    page = reference()
    missing = [key for key in known_keys() if f"`{key.replace('.0', '')}`" not in page]
    undescribed = [row for row in page.splitlines() if row.endswith("|  |")]
    assert missing == [] and undescribed == []


def test_a_row_has_type_default_unit_and_meaning():
    (row,) = [
        line for line in reference().splitlines() if line.startswith("| `algorithm.clip_low`")
    ]
    assert row == (
        "| `algorithm.clip_low` | number (above 0, at most 1) | `0.2` |  "
        "| The ratio is held above 1 - clip_low; 1 is no bound. |"
    )


@pytest.mark.parametrize("argument, code", [("--help", 0), ("--frobnicate", 2), ("x", 2)])
def test_the_command_knows_no_arguments(capsys, argument, code):
    with pytest.raises(SystemExit) as end:
        main([argument])
    assert end.value.code == code and "| key |" not in capsys.readouterr().out
