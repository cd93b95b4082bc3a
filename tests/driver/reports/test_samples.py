"""Which completions of a step are written down."""

import pytest

from driver.reports.step_report import choose_samples


def samples(*whys):
    return [{"id": number, "why": why} for number, why in enumerate(whys)]


F, D, E = "first", "disagreement", "reward_error"


@pytest.mark.parametrize(
    "whys, count, chosen",
    [
        ((F, F, F), 2, [0, 1]),
        ((F, D, F, E, D, F), 4, [1, 3, 0, 2]),
        ((D, D, D, F), 4, [0, 1, 2, 3]),
        ((D, D, D, D, D), 4, [0, 1, 2, 3]),
        ((F, D, F, F, F), 4, [1, 0, 2, 3]),
        ((F, D), 1, [1]),
        ((F, D, E), 0, []),
        ((), 4, []),
    ],
)
def test_samples_chosen_for_a_reason_come_first_and_leave_half_of_the_places(whys, count, chosen):
    assert [sample["id"] for sample in choose_samples(samples(*whys), count)] == chosen
