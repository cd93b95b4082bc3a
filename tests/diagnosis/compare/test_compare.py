"""Two runs part where they do, and not where only their random numbers differ."""

import json
import zipfile

import numpy as np
import pytest

from benchmarks.made_run.made_run import make_run
from diagnosis.compare import diffs
from diagnosis.compare.compare import compare
from diagnosis.compare.divergence import MOST_WINDOW, equal_until, find_divergence
from diagnosis.records.run_log import RunLog

pytestmark = pytest.mark.slow

STEPS = 160


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Makes a run and reads it."""

    def make(**options):
        folder = tmp_path_factory.mktemp("run")
        make_run(folder, **({"steps": STEPS, "samples_per_step": 0, "timeline": False} | options))
        log = RunLog(folder)
        log.refresh()
        return log

    return make


@pytest.fixture(scope="module")
def base(read):
    return read()


def noise(rng, n, kind):
    """One run's metric that nothing changes."""
    if kind == "white":
        return rng.normal(size=n)
    if kind == "rising":
        return rng.normal(size=n) * 0.1 + np.linspace(0, 3, n)
    if kind == "fraction of 128":
        return rng.binomial(128, 0.9 - 0.6 * np.exp(-np.arange(n) / 20), n) / 128
    if kind == "mostly zero":
        return rng.binomial(1, 0.1, n).astype(float)
    if kind == "heavy-tailed":
        return rng.standard_t(2, n)
    if kind == "dying down":
        return rng.normal(size=n) * (0.03 + np.exp(-np.arange(n) / 10))
    if kind == "growing":
        return rng.normal(size=n) * (0.03 + np.exp(-5 * np.arange(n, 0, -1) / n))
    values = rng.normal(size=n)
    for i in range(1, n):  # each value keeps half of the one before
        values[i] += 0.5 * values[i - 1]
    return values


def test_equal_runs_do_not_part(base, read):
    found = compare(base, read())
    assert found["part"] is None and found["parts"] == []
    assert found["config_diff"] == found["code_diff"] == found["environment_diff"] == []
    assert found["histories"][0] == found["histories"][1]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_runs_that_differ_by_their_seed_do_not_part(base, read, seed):
    found = compare(base, read(seed=seed))
    assert found["part"] is None and found["parts"] == []
    assert found["config_diff"] == [{"key": "run.seed", "a": 0, "b": seed}]


@pytest.mark.parametrize("step", [4, 57, 150])
def test_runs_that_are_equal_to_the_bit_before_diverge_at_that_very_step(base, read, step):
    part = compare(base, read(part_at=step))["part"]
    assert part["step"] == step
    assert part["text"].startswith(f"every bit is equal up to step {step - 1}; ")
    assert part["text"].endswith("no metric diverges beyond noise")


def test_a_reward_that_turns_diverges_near_where_it_turns(base, read):
    found = compare(base, read(seed=5, flat_from=60))
    steps = {part["metric"]: part["step"] for part in found["parts"]}
    assert 55 <= steps["reward/total/mean"] <= 80
    assert 55 <= found["part"]["step"] <= 80
    assert "in A and" in found["part"]["text"] and "noise would explain" in found["part"]["text"]


def test_a_setting_that_differs_from_the_start_diverges_at_the_first_step(base, read):
    other = read(seed=1)
    column = other._metrics.columns["train/learning_rate"]
    column *= 2
    found = compare(base, other)
    assert found["parts"] == [
        {
            "metric": "train/learning_rate",
            "step": 1,
            "text": "train/learning_rate is about 3e-05 in A and 6e-05 in B from step 1 on; noise "
            "would explain a difference of 0",
        }
    ]


def test_a_faster_machine_is_listed_but_is_not_where_the_policies_part(base, read):
    found = compare(base, read(seed=1, workers=4))
    assert found["part"] is None
    assert "time/train/step_s" in [part["metric"] for part in found["parts"]]


def test_what_people_ask_for_first_is_named_first(base, read):
    """All at one step, then the reward later: it still heads the list, not the sentence."""
    names = [
        *("reward/total/mean", "reward/gsm8k_answer/mean", "train/loss"),
        *("rollout/completion_len_mean", "time/train/step_s"),
    ]
    other = read(seed=1)
    for name in names:
        other._metrics.columns[name] += 1000.0
    found = compare(base, other)
    assert [part["metric"] for part in found["parts"]] == names
    assert found["part"] == found["parts"][0] and found["part"]["step"] == 1
    for name in names[:2]:
        other._metrics.columns[name][:60] -= 1000.0
    found = compare(base, other)
    assert [part["metric"] for part in found["parts"]] == names
    assert found["part"]["step"] == 1 and found["part"]["metric"] == "train/loss"


def test_a_metric_that_is_not_finite_in_one_run_diverges_there(base, read):
    parts = compare(base, read(seed=1, nonfinite=True))["parts"]
    loss = next(part for part in parts if part["metric"] == "train/loss")
    assert loss["step"] == STEPS // 2
    assert loss["text"].startswith(f"train/loss is NaN in B at step {STEPS // 2}, and ")


def test_runs_of_different_length_have_the_same_bins(base, read):
    found = compare(base, read(steps=40), points=20)
    long, short = found["histories"]
    assert long["bin"] == short["bin"] == 9
    assert short["steps"] == long["steps"][: len(short["steps"])] and short["steps"][-1] == 36


def test_a_run_without_steps_can_be_compared(base, tmp_path):
    empty = RunLog(tmp_path)
    empty.refresh()
    for pair in ((base, empty), (empty, base), (empty, empty)):
        found = compare(*pair)
        assert found["part"] is None and found["parts"] == []
        json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    "kind",
    [
        *("white", "halving", "rising", "fraction of 128"),
        *("mostly zero", "heavy-tailed", "dying down", "growing"),
    ],
)
@pytest.mark.parametrize("n", [30, 40, 200])
def test_noise_alone_diverges_in_under_one_of_five_hundred(n, kind):
    rng = np.random.default_rng([n, len(kind)])
    runs = 500
    alarms = sum(
        find_divergence(noise(rng, n, kind), noise(rng, n, kind)) is not None for _ in range(runs)
    )
    assert alarms <= runs / 500


@pytest.mark.parametrize("n, begin, jump", [(40, 20, 8.0), (200, 100, 4.0), (2000, 1500, 3.0)])
def test_a_jump_is_found_within_half_a_window_of_where_it_is(n, begin, jump):
    rng = np.random.default_rng(n)
    found = []
    for _ in range(50):
        a, b = rng.normal(size=n), rng.normal(size=n)
        b[begin:] += jump
        part = find_divergence(a, b)
        found += [part.index] if part else []
    assert len(found) >= 45 and abs(np.median(found) - begin) <= MOST_WINDOW // 2


def test_a_slope_is_found_soon_after_it_begins():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=400), rng.normal(size=400)
    b[200:] += 0.1 * np.arange(200)
    part = find_divergence(a, b)
    assert part is not None and 190 <= part.index <= 235
    assert part.b > part.a


def test_one_spike_is_no_divergence():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=200), rng.normal(size=200)
    b[50:53] += 1000.0
    assert find_divergence(a, b) is None


def test_few_steps_in_common_tell_only_what_never_meets():
    rng = np.random.default_rng(0)
    low, high = rng.uniform(0.0, 0.06, 20), rng.uniform(0.15, 0.9, 20)
    for a, b in ((low, high), (high, low)):
        found = find_divergence(a, b)
        assert found is not None and found.index == 0
        assert (found.a, found.b) == (np.median(a), np.median(b))
    assert find_divergence(low[:9], high[:9]) is None
    high[7] = low.max()
    assert find_divergence(low, high) is None
    assert find_divergence(np.zeros(20), np.zeros(20)) is None


@pytest.mark.parametrize(
    "a, b, index",
    [
        ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.5], 3),
        ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.4, 0.5], None),  # two equal values may be chance
        ([0.0, 0.0, 0.0, 0.4], [0.0, 0.0, 0.0, 0.5], None),  # it repeats itself
        ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4], None),
    ],
)
def test_bits_tell_only_where_they_can(a, b, index):
    assert equal_until(np.array(a), np.array(b)) == index


def test_values_that_differ_are_named_by_their_dotted_key():
    a = {"x": {"y": 1, "same": [1, 2]}, "list": [1, 2], "gone": None, "kind": 1, "empty": {}}
    b = {"x": {"y": 2, "same": [1, 2]}, "list": [1, 2, 3], "new": {"z": 0}, "kind": {"now": 2}}
    assert diffs.value_diff(a, b) == [
        {"key": "x.y", "a": 1, "b": 2},
        {"key": "gone", "a": None, "b": None},
        {"key": "kind", "a": 1, "b": None},
        {"key": "empty", "a": {}, "b": None},
        {"key": "list.2", "a": None, "b": 3},
        {"key": "new.z", "a": None, "b": 0},
        {"key": "kind.now", "a": None, "b": 2},
    ]


def test_what_a_run_lacks_altogether_has_no_key_of_its_own():
    b = {"python": "3.11"}
    assert diffs.value_diff({}, b) == [{"key": "python", "a": None, "b": "3.11"}]
    assert diffs.value_diff(b, {}) == [{"key": "python", "a": "3.11", "b": None}]


def test_code_that_differs_is_shown_line_by_line(base, read):
    other = read(
        code={"driver/run.py": '"""The step loop."""\n\nSTEPS = 41\n', "new.py": "x = 1\n"}
    )
    changed, added = diffs.code_diff(base.folder, other.folder)
    assert (changed["file"], changed["status"]) == ("driver/run.py", "changed")
    assert changed["diff"].splitlines()[:2] == ["--- a/driver/run.py", "+++ b/driver/run.py"]
    assert "-STEPS = 40\n+STEPS = 41" in changed["diff"]
    assert (added["file"], added["status"]) == ("new.py", "added")
    removed = diffs.code_diff(other.folder, base.folder)[1]
    assert (removed["file"], removed["status"]) == ("new.py", "removed")


def test_long_diffs_are_cut_to_whole_lines(base, read):
    text = "".join(f"line {i}\n" for i in range(20_000))
    huge = "x" * (diffs.FILE_BYTES + 1)
    other = read(code={"a.py": text, "b.py": huge})
    first, second = diffs.code_diff(base.folder, other.folder)
    assert len(first["diff"]) < diffs.DIFF_CHARS + 100
    assert first["diff"].splitlines()[-1].endswith(" more lines")
    assert second["diff"] == f"longer than {diffs.FILE_BYTES} bytes: not compared line by line"


def test_many_diffs_are_cut_together(base, read, monkeypatch):
    monkeypatch.setattr(diffs, "ALL_CHARS", 1000)
    other = read(code={f"f{i:02}.py": "line\n" * 50 for i in range(30)})
    found = diffs.code_diff(base.folder, other.folder)
    assert len(found) == 30 and sum(len(one["diff"]) for one in found) < 2500


def test_an_archive_that_is_missing_or_broken_is_named(base, read, tmp_path):
    assert diffs.code_diff(tmp_path, tmp_path) == []
    (entry,) = diffs.code_diff(base.folder, tmp_path)
    assert entry["diff"] == "B: the run has no code.zip"
    (tmp_path / "code.zip").write_bytes(b"no archive")
    (entry,) = diffs.code_diff(tmp_path, base.folder)
    assert entry["diff"].startswith("A: code.zip cannot be read: ")


def test_an_archive_that_would_unpack_to_gigabytes_is_read_in_part(base, tmp_path):
    with zipfile.ZipFile(tmp_path / "code.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.py", b"\0" * (64 << 20))
    entry = diffs.code_diff(base.folder, tmp_path)[0]
    assert entry["file"] == "bomb.py" and "longer than" in entry["diff"]


def test_environments_are_compared(base, read):
    other = read(seed=1)
    path = other.folder / "environment.json"
    environment = json.loads(path.read_text())
    environment["versions"]["jax"] = "0.11.0"
    path.write_text(json.dumps(environment))
    assert compare(base, other)["environment_diff"] == [
        {"key": "versions.jax", "a": "0.10.2", "b": "0.11.0"}
    ]
