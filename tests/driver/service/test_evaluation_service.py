"""An asynchronous run in real processes goes on training while a worker evaluates."""

import pytest

from tests.driver.service_run import Service, write_model_and_data

pytestmark = [pytest.mark.slow, pytest.mark.service]


def test_an_evaluation_beside_training_is_of_its_own_version_and_stops_nothing(tmp_path):
    model = write_model_and_data(tmp_path)
    sets = "[{source: %s, skip: 7, name: sums}, {source: %s, size: 3, name: sums-2, scorer: exact}]"
    data = model.with_name("sums.jsonl")
    service = Service(
        tmp_path,
        model,
        *("--set", "rollout.workers=1", "--set", "rollout.max_staleness=1"),
        *("--set", "eval.every_steps=3", "--set", f"data.eval={sets % (data, data)}"),
    )
    try:
        assert service.wait() == 0, service.text
    finally:
        service.kill()
    beside, at_end = (line for line in service.lines("metrics") if "eval/step" in line)
    assert (beside["eval/step"], at_end["eval/step"]) == (3, 6)
    assert beside["step"] in (4, 5) and at_end["step"] == 6
    for line in (beside, at_end):
        items = [one for one in service.lines("eval") if one["step"] == line["step"]]
        assert {one["policy_version"] for one in items} == {line["eval/policy_version"]}
        assert line["eval/policy_version"] == line["eval/step"]
        assert sorted(one["set"] for one in items) == ["sums"] * 6 + ["sums-2"] * 3
        assert (line["eval/sums/completions"], line["eval/sums-2/completions"]) == (6, 3)
    assert 0 <= at_end["eval/sums/paired/p_value"] <= 1
    assert "against step 3 on the same 6 prompts" in service.text
    assert len(service.trained()) == len(set(service.trained())) == 24
