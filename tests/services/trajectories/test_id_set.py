import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trajectories.id_set import IdSet

IDS = st.one_of(
    st.integers(0, 30).map(lambda n: f"g{n:08d}"),
    st.integers(0, 120).map(lambda n: f"g{n}"),
    st.sampled_from(["", "g", "7", "07", "g1-2", "g\u0661", "a\nb3", "g-3", "1" * 30]),
)


@given(st.lists(IDS, max_size=60), st.lists(IDS, max_size=30))
def test_it_is_a_set_of_texts_that_survives_json(added, asked):
    ids = IdSet()
    ids.update(added)
    again = IdSet(json.loads(json.dumps(ids.plain())))
    for one in [*added, *asked]:
        assert (one in ids) == (one in again) == (one in set(added))
    assert again.plain() == ids.plain()


def test_numbers_in_a_row_take_one_range_in_whatever_order_they_come():
    ids = IdSet()
    for number in [*range(0, 1000, 2), *range(999, 0, -2)]:
        ids.add(f"g{number:08d}")
    assert ids.plain() == [["g00000000", "g00000999"]]
    ids.add("g00001001")
    assert ids.plain() == [["g00000000", "g00000999"], "g00001001"]
    assert "g00001000" not in ids and "g1001" not in ids


@pytest.mark.parametrize("item", [["g2", "g1"], ["g1", "h2"], ["g9", "g10"], ["g1", "x"]])
def test_a_range_that_is_none_is_refused(item):
    with pytest.raises(ValueError, match="a first and a last, got"):
        IdSet([item])
