"""The command on the CPU: one layer of the demo's model, from its arguments to the exit code."""

import io
import json
import shlex

import pytest
from rich.console import Console

from driver.chip_plan.chips import LIBTPU_ENVIRONMENT
from driver.chip_plan.cli import command_of, main, parser

DEMO = "deploy/runs/demo_cpu.yaml"
SMALL = ("learner.microbatch_tokens=256", "rollout.decode.slots=8", "rollout.workers=1")


@pytest.fixture
def plan(monkeypatch, tmp_path):
    """Calls the command: exit code, what it printed, and its JSON where it wrote any."""
    for variable, value in LIBTPU_ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)  # the command sets them, for good
    file = tmp_path / "plan.json"

    def call(*arguments, config=DEMO, topology="cpu"):
        printed = io.StringIO()
        console = Console(file=printed, width=200)
        given = ["--config", config, "--topology", topology, "--json", str(file), *arguments]
        code = main(given, console)
        return code, printed.getvalue(), json.loads(file.read_text()) if file.exists() else {}

    return call


def small(*more):
    return ["--layers", "1", *(f"--set={one}" for one in (*SMALL, *more))]


# Of one layer: embedding and final norm of 369 x 192 + 192; q and o of 192 x 192, k and v of
# 64 x 192, three matrices of 512 x 192, biases of 192 + 2 x 64 and two norms of 192.
PARAMETERS = 369 * 192 + 192 + 2 * 192 * 192 + 2 * 64 * 192 + 3 * 512 * 192 + 320 + 2 * 192


def test_a_run_that_fits_is_planned_with_what_each_program_is_made_up_of(plan):
    code, text, found = plan(*small())
    assert code == 0 and found["fits"]
    programs = {(one["role"], one["name"]): one for one in found["programs"]}
    assert [name for role, name in programs if role == "learner"] == [
        *("empty", "accumulate", "apply", "snapshot", "canary")
    ]
    assert {"prefill", "segment"} <= {name for role, name in programs if role == "worker"}
    apply = programs["learner", "apply"]["parts"]
    assert apply["parameters"] == apply["gradients"] == 4 * PARAMETERS
    assert apply["optimiser state"] == 8 * PARAMETERS + 2 * 4  # two moments, two counts
    # The demo publishes float32; the workers of a CPU share its memory with the learner.
    segment = programs["worker", "segment"]["parts"]
    assert segment["published snapshots"] == 2 * 4 * PARAMETERS
    assert segment["policy"] == segment["policy that arrives"] == 4 * PARAMETERS
    for program in found["programs"]:
        assert sum(program["parts"].values()) == program["needs_bytes"]
        assert program["model_ms_never_measured"] is None
    assert "learner fits: at most" in text and "worker fits: at most" in text
    assert "learner accumulate" in text and "weight sync: " in text


def test_what_is_sent_and_what_hosts_keep(plan):
    _, text, found = plan(*small("weights.keep_versions=3"))
    version = 4 * PARAMETERS
    assert found["wire"] == {
        "version_bytes": version,
        "largest_delta_bytes": version // 2,
        "whole_versions_bytes_per_step": version,
    }
    learner = found["host_bytes"]["learner"]
    assert learner["policy versions, with the one that is published"] == 4 * version
    assert learner["deltas"] == 3 * (version // 2)
    state = 12 * PARAMETERS + 2 * 4
    assert learner["state, while a checkpoint is written"] == state
    assert found["host_bytes"]["worker"]["policy version and the next"] == 2 * version
    assert "host memory of the worker, at most" in text


def test_both_roles_of_a_colocated_run_count_together(plan):
    _, text, found = plan(
        *small("placement.mode=colocated", "placement.rollout={}"), "--role", "learner"
    )
    (accumulate,) = [one for one in found["programs"] if one["name"] == "accumulate"]
    assert accumulate["parts"]["policy"] == 4 * PARAMETERS
    assert accumulate["parts"]["KV cache"] > 0
    assert found["wire"]["whole_versions_bytes_per_step"] == 0
    assert "nothing is sent, learner and worker share their chips" in text


def test_what_does_not_fit_ends_with_1_and_says_the_nearest_that_does(plan):
    _, _, whole = plan(*small(), "--role", "worker")
    needs = max(one["needs_bytes"] for one in whole["programs"])
    (segment,) = [one for one in whole["programs"] if one["name"] == "segment"]
    usable = needs - segment["parts"]["KV cache"] // 2
    code, text, found = plan(*small(), "--role", "worker", "--usable-gib", str(usable / 2**30))
    assert code == 1 and not found["fits"]
    assert "worker does NOT fit" in text and "of this machine" in text
    (line,) = [line for line in found["words"] if line.startswith("nearest that fits")]
    slots = int(line.partition("rollout.decode.slots=")[2].partition(",")[0])
    assert 1 <= slots < 8
    again = [f"--set=rollout.decode.slots={slots}", "--role", "worker"]
    assert plan(*small(), *again, "--usable-gib", str(usable / 2**30))[0] == 0


def test_where_no_micro_batch_fits_other_settings_are_named(plan):
    parameters_alone = 4 * PARAMETERS / 2**30
    code, text, _ = plan(*small(), "--role", "learner", "--usable-gib", str(7 * parameters_alone))
    assert code == 1
    assert "learner.microbatch_tokens: no value fits, what does not depend on it needs" in text
    assert "by arithmetic, not compiled, this would fit: --set learner.lora.rank=16" in text


def test_the_command_of_a_plan_has_every_argument_as_a_shell_takes_it(plan):
    given = [
        *("--config", "my runs/run.yaml", "--topology", "v6e:2x4"),
        *("--set", "run.name=a b", "--set", "rollout.stop_strings=['\\n']", "--role", "worker"),
        *("--model-config", "its config.json", "--layers", "3", "--usable-gib", "28.5"),
    ]
    command = command_of(parser().parse_args([*given, "--search", "--json", "plan.json"]))
    assert shlex.split(command) == ["python", "-m", "driver.plan", *given, "--search"]
    assert command_of(parser().parse_args(given[:4])) == (
        "python -m driver.plan --config 'my runs/run.yaml' --topology v6e:2x4"
    )
    _, _, found = plan(*small(), "--role", "worker")
    again = shlex.split(found["command"])
    assert again[:3] == ["python", "-m", "driver.plan"]
    assert again[-4:] == ["--role", "worker", "--layers", "1"]


def test_a_search_after_a_verdict_compiles_nothing_twice(plan):
    _, _, whole = plan(*small(), "--role", "worker")
    (segment,) = [one for one in whole["programs"] if one["name"] == "segment"]
    needs = max(one["needs_bytes"] for one in whole["programs"])
    usable = (needs - segment["parts"]["KV cache"] // 2) / 2**30
    code, text, found = plan(*small(), "--role", "worker", "--usable-gib", str(usable), "--search")
    assert code == 1
    tried = [line for line in text.splitlines() if line.startswith("  rollout.decode.slots=")]
    assert 1 <= len(tried) == len(set(tried))
    (slots,) = [one for one in found["search"] if one["key"] == "rollout.decode.slots"]
    (nearest,) = [line for line in found["words"] if line.startswith("nearest that fits")]
    assert f"rollout.decode.slots={slots['largest_that_fits']}," in nearest


def test_a_program_that_cannot_be_traced_ends_with_1_and_says_why(plan, monkeypatch, tmp_path):
    (tmp_path / "short_loss.py").write_text(
        "def loss(logprob, ratio, advantage, **rest):\n"
        "    if logprob.size > 100:  # more than the trial of a policy loss has\n"
        "        raise RuntimeError('at most 100 tokens')\n"
        "    return -ratio * advantage\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    code, text, found = plan(*small("algorithm.policy_loss=short_loss:loss"), "--role", "learner")
    assert code == 1 and not found["fits"]
    assert "learner accumulate does not compile: at most 100 tokens" in text
    (accumulate,) = [one for one in found["programs"] if one["name"] == "accumulate"]
    assert accumulate["error"] == "at most 100 tokens"
    assert found["fingerprint"]


def test_json_goes_to_standard_output_alone(monkeypatch, capsys):
    for variable, value in LIBTPU_ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)
    arguments = ["--config", DEMO, "--topology", "cpu", "--role", "worker", *small()]
    assert main([*arguments, "--json", "-"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["fits"] is True
    assert "worker fits" in said.err


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--json", "deploy"], ["--json 'deploy' is a folder: name a file in it"]),
        (["--json", "no/such/x.json"], ["its folder does not exist: make it first"]),
        (["--config", "no.yaml"], ["cannot read the configuration file no.yaml"]),
        (["--topology", "v6e:9x9"], ["'9x9' is no shape of v6e chips"]),
        (["--layers", "9"], ["--layers 9 must be from 1 to the model's 3 layers"]),
        (["--model-config", "no.json"], ["--model-config no.json", "give it with --model-config"]),
        (["--set", "model.path=no/such/folder"], ["model.path=no/such/folder", "--model-config"]),
        (["--set", "learner.microbatch_tokens=20"], ["learner.microbatch_tokens=20 cannot hold"]),
        (["--set", "rollout.decode.loop=python"], ["only `while` is one program"]),
        (["--usable-gib", "nan"], ["--usable-gib nan must be a finite number above 0"]),
        (["--usable-gib", "inf"], ["--usable-gib inf must be a finite number above 0"]),
        (
            ["--set", "algorithm.policy_loss=no.such:f"],
            ["algorithm.policy_loss=no.such:f: ", "Built in are clip"],
        ),
        (
            ["--model-config", "deploy/demo/model/tokenizer_config.json"],
            ["--model-config deploy/demo/model/tokenizer_config.json", "model_type"],
        ),
        (
            ["--set=algorithm.distillation.teacher=no/such/folder"],
            ["algorithm.distillation.teacher: ", "no/such/folder"],
        ),
    ],
)
def test_bad_input_ends_with_2_and_one_clear_error(monkeypatch, capsys, arguments, parts):
    for variable, value in LIBTPU_ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)
    assert main(["--config", DEMO, "--topology", "cpu", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "Traceback" not in said
    for part in parts:
        assert part in said
