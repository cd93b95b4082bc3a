"""Completions are found, paged and shown, whatever stands in them."""

import json

import pytest

from benchmarks.made_run.made_run import MadeRun, make_run
from benchmarks.made_run.made_steps import RunPlan
from diagnosis.records.samples_index import SHOWN_CHARS, SampleIndex, SampleQuery, _excerpt
from services.wire.strict_json import encode

pytestmark = pytest.mark.slow


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def index_of(folder, **options):
    index = SampleIndex(folder, **options)
    index.refresh()
    return index


def ids(found):
    return [item["id"] for item in found["items"]]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder of 60 steps with 4 samples each, and two evaluations of 200 prompts."""
    folder = tmp_path_factory.mktemp("run")
    make_run(folder, steps=60)
    return folder


@pytest.fixture(params=[None, 0, 5000], ids=["texts in memory", "on disk", "some of both"])
def index(run, request):
    return index_of(run, **({} if request.param is None else {"text_budget": request.param}))


def write(folder, *records, name="samples.jsonl"):
    with (folder / name).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_all_are_found_the_newest_first(index):
    found = index.search(SampleQuery(limit=500))
    assert index.total == found["total"] == 60 * 4 + 400
    steps = [item["step"] for item in found["items"]]
    assert steps == sorted(steps, reverse=True)
    assert ids(found)[0] == "e399" and found["items"][0]["kind"] == "eval"


def test_pages_follow_each_other_without_gap_or_repeat(index):
    pages = [index.search(SampleQuery(offset=at, limit=100)) for at in range(0, 700, 100)]
    together = [one for page in pages for one in ids(page)]
    assert len(together) == len(set(together)) == 640 and len(pages[-1]["items"]) == 40
    assert index.search(SampleQuery(offset=10_000))["items"] == []


@pytest.mark.parametrize("q", ["#### 1", "STATE the Final", "5 = ", "no such words", "\n####"])
def test_a_search_finds_what_a_reading_of_the_file_finds(run, index, q):
    expected = [
        f"t{i}"
        for i, record in enumerate(lines(run / "samples.jsonl"))
        if any(
            q.lower() in record[field].lower()
            for field in ("question", "prompt", "completion", "answer")
        )
    ]
    found = index.search(SampleQuery(q=q, kind="train", limit=500))
    assert ids(found) == expected[::-1] and found["total"] == len(expected)


@pytest.mark.parametrize(
    "query, holds",
    [
        ({"first": 3, "last": 5}, lambda r: 3 <= r["step"] <= 5),
        ({"prompt": 7}, lambda r: r["prompt_id"] == 7),
        ({"reward_min": 0.5}, lambda r: r["total_reward"] >= 0.5),
        ({"reward_max": 0.5}, lambda r: r["total_reward"] <= 0.5),
        ({"finish": "length"}, lambda r: r["finish_reason"] == "length"),
        ({"finish": "nonsense"}, lambda r: False),
        ({"why": "disagreement"}, lambda r: r["why"] == "disagreement"),
        ({"error": True}, lambda r: r["reward_error"] != ""),
        (
            {"disagree": True},
            lambda r: (
                r["rewards"].get("gsm8k_answer/strict") != r["rewards"].get("gsm8k_answer/lenient")
            ),
        ),
        (
            {"q": "+", "reward_min": 1.0, "first": 20},
            lambda r: r["step"] >= 20 and r["total_reward"],
        ),
    ],
)
def test_filters_choose_what_they_say(run, index, query, holds):
    expected = [f"t{i}" for i, r in enumerate(lines(run / "samples.jsonl")) if holds(r)]
    found = index.search(SampleQuery(kind="train", limit=500, **query))
    assert ids(found) == expected[::-1]


def test_a_sample_is_its_whole_record(run, index):
    record = lines(run / "samples.jsonl")[12]
    assert index.sample("t12") == {**record, "id": "t12", "kind": "train"}
    assert "tokens" in record and "prompt" in record
    assert index.sample("e12")["kind"] == "eval"


@pytest.mark.parametrize("name", ["t240", "e400", "x1", "t-1", "t", "", "t1 ", "t" + "9" * 30])
def test_an_id_that_is_none_finds_nothing(index, name):
    assert index.sample(name) is None and index.same_prompt(name) is None


def test_the_same_prompt_is_listed_over_time(run, index):
    found = index.same_prompt("e217")["items"]
    assert [(item["id"], item["step"]) for item in found] == [("e17", 0), ("e217", 60)]
    prompt = lines(run / "samples.jsonl")[5]["prompt_id"]
    found = index.same_prompt("t5")["items"]
    assert {item["prompt_id"] for item in found} == {prompt}
    steps = [item["step"] for item in found]
    assert steps == sorted(steps) and "t5" in [item["id"] for item in found]


def test_a_long_completion_is_cut_in_lists_and_whole_alone(tmp_path):
    long = "begin " + "x" * 100_000 + " needle " + "y" * 100_000
    write(tmp_path, {"step": 1, "question": "q", "completion": long})
    index = index_of(tmp_path)
    (item,) = index.search(SampleQuery())["items"]
    assert item["cut"] and item["completion"] == long[:SHOWN_CHARS]
    (item,) = index.search(SampleQuery(q="NEEDLE"))["items"]
    assert item["cut"] and "needle" in item["completion"]
    assert len(item["completion"]) == SHOWN_CHARS
    assert index.sample("t0")["completion"] == long


@pytest.mark.parametrize("at", [0, 399, 400, 5000, 9994])
def test_an_excerpt_shows_the_words_it_was_asked_for(at):
    text = "x" * at + "Needle" + "y" * (10_000 - at - 6)
    shown, is_cut = _excerpt(text, "needle")
    assert "Needle" in shown and len(shown) <= SHOWN_CHARS and is_cut


def test_hostile_texts_come_through_as_data(tmp_path):
    make_run(tmp_path, steps=10, hostile=True)
    index = index_of(tmp_path)
    found = index.search(SampleQuery(q="<SCRIPT>", limit=500))
    assert found["total"] == 2 and "<script>" in found["items"][0]["completion"]
    assert index.search(SampleQuery(q="\x1b[31m"))["total"] == 2
    lone = index.search(SampleQuery(q="lone", kind="train"))
    assert lone["items"][0]["completion"] == "\ud800 lone"
    encode(index.search(SampleQuery(limit=500)))
    encode(index.sample(lone["items"][0]["id"]))


@pytest.mark.parametrize("text_budget", [10**6, 0])
@pytest.mark.parametrize("q", ['"quoted"', "back\\slash", "tab\there", "ümlaut", "日本", "\x07"])
def test_words_that_json_escapes_are_found(tmp_path, q, text_budget):
    for ascii_only in (True, False):
        line = json.dumps({"step": 1, "completion": f"A {q.upper()} z"}, ensure_ascii=ascii_only)
        with (tmp_path / "samples.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    index = index_of(tmp_path, text_budget=text_budget)
    assert index.search(SampleQuery(q=q))["total"] == 2
    assert index.search(SampleQuery(q=q + "!"))["total"] == 0


def test_a_reward_that_is_not_finite_is_shown_and_in_no_range(tmp_path):
    write(tmp_path, {"step": 1, "total_reward": "NaN"}, {"step": 2, "total_reward": float("inf")})
    index = index_of(tmp_path)
    assert [item["total_reward"] for item in index.search(SampleQuery())["items"]][1] == "NaN"
    assert ids(index.search(SampleQuery(reward_min=0.0))) == ["t1"]
    assert ids(index.search(SampleQuery(reward_max=1.0))) == []


def test_records_of_an_older_version_lack_fields(tmp_path):
    write(tmp_path, {"step": 4, "completion": "x"}, name="eval.jsonl")
    index = index_of(tmp_path)
    (item,) = index.search(SampleQuery())["items"]
    assert item["why"] is None and item["parsed"] is None and item["question"] == ""
    assert ids(index.same_prompt("e0")) == ["e0"]


@pytest.mark.parametrize(
    "record", [{}, {"step": None}, {"step": "1"}, [], "x", {"step": True}, {"step": 1.5}]
)
def test_a_line_without_a_step_is_left_out(tmp_path, record):
    write(tmp_path, record, {"step": 1, "completion": "x", "question": {"odd": [1]}})
    index = index_of(tmp_path)
    assert ids(index.search(SampleQuery(q="odd"))) == ["t0"]


def test_what_is_appended_is_found_and_what_is_rewound_is_not(tmp_path):
    made = MadeRun(tmp_path, RunPlan())
    made.write_step()
    index = index_of(tmp_path)
    assert index.total == 200
    made.write_step()
    made.write_step()
    assert index.refresh() == 208
    path = tmp_path / "samples.jsonl"
    (tmp_path / "new").write_text("".join(path.read_text().splitlines(True)[:4]))
    (tmp_path / "new").replace(path)
    assert index.refresh() == 204
    assert {item["step"] for item in index.search(SampleQuery(kind="train"))["items"]} == {1}


def test_a_file_replaced_since_the_last_look_shows_nothing_wrong(tmp_path):
    write(tmp_path, *({"step": i, "completion": f"c{i}" * 50} for i in range(5)))
    index = index_of(tmp_path)
    (tmp_path / "samples.jsonl").write_text('{"step": 77, "completion": "other"}\n')
    assert index.search(SampleQuery())["items"] == [] and index.sample("t3") is None
    (tmp_path / "samples.jsonl").unlink()
    assert index.search(SampleQuery())["items"] == [] and index.sample("t3") is None
    assert index.refresh() == 0


@pytest.mark.parametrize(
    "query, message",
    [
        ({"limit": 0}, "limit=0 must be between 1 and 500"),
        ({"limit": 501}, "limit=501 must be between 1 and 500"),
        ({"offset": -1}, "offset=-1 must not be negative: 0 is the newest"),
        ({"first": 5, "last": 4}, "first=5 must not be above last=4: swap them"),
        ({"reward_min": 1.0, "reward_max": 0.5}, "reward_min=1.0 must not be above"),
        ({"kind": "test"}, "kind='test' must be one of train, eval"),
        ({"q": "x" * 1001}, "q has 1001 characters: give at most 1000"),
    ],
)
def test_a_query_that_cannot_be_is_refused(query, message):
    with pytest.raises(ValueError, match=message):
        SampleQuery(**query)
