"""What the bench of deltas counts, and how it refuses a wrong argument."""

import ml_dtypes
import numpy as np

from benchmarks.transfer.optimizer_delta import flat, main, measured


def test_row_counts_changed_elements_and_holds_the_result_to_the_bits():
    rng = np.random.default_rng(0)
    before = {
        "a": rng.standard_normal((100, 50)).astype(ml_dtypes.bfloat16),
        "b": np.ones(70, ml_dtypes.bfloat16),
    }
    after = {"a": before["a"].copy(), "b": before["b"]}
    after["a"][::10, 7] = np.nan
    specs, old = flat(before)
    row = measured(old, flat(after)[1], specs)
    assert (row.elements, row.changed, row.full_bytes, row.equal) == (5070, 10, 10140, True)
    assert 10 * 2 < row.delta_bytes < 10140 / 20
    assert "0.197%" in str(row) and str(row).endswith("equal")


def test_model_that_is_not_there_is_a_short_answer(capsys, tmp_path):
    assert main(["--model", str(tmp_path / "none.gguf")]) == 2
    assert "delta_bench: " in capsys.readouterr().err
