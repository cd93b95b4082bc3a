"""How held-out prompts are shared out; `test_lost_processes.py` loses workers meanwhile."""

import pytest

from driver.evaluator import shares


@pytest.mark.parametrize(
    "prompts, workers, expected",
    [(5, 2, [[0, 1, 2], [3, 4]]), (4, 2, [[0, 1], [2, 3]]), (1, 8, [[0]]), (0, 2, [])],
)
def test_case_f05_prompts_are_shared_out_and_none_is_lost(prompts, workers, expected):
    assert shares(range(prompts), workers) == expected
