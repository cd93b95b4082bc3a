import pathlib
import re
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.config.config_keys import known_keys, nearest
from driver.config.load_config import ConfigError, dump, load
from driver.config.run_config import RunConfig
from learner.config import REMATS
from models import layer_scan

RUNS = pathlib.Path(__file__).resolve().parents[3] / "deploy" / "runs"

MINIMAL = """
model: {path: some/model}
data: {train: {source: train.jsonl}}
eval: {at_start: false, at_end: false}
"""


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="run.yaml"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write_file


@pytest.fixture
def minimal(write):
    return write(MINIMAL)


def refusal(path, *overrides) -> str:
    with pytest.raises(ConfigError) as refused:
        load(path, overrides)
    return str(refused.value)


F01_KEYS = {
    "learning_rate": "learner.optimizer.learning_rate",
    "beta": "algorithm.kl_coef",
    "max_steps": "run.steps",
}


def value_at(config, dotted):
    for part in dotted.split("."):
        config = getattr(config, part)
    return config


def test_f01_numbers_in_the_file(cases, write):
    case = cases("config")["F01"]
    for line, wanted in zip(case["input"]["yaml"], case["expected"]["yaml"], strict=True):
        text = MINIMAL + f"learner: {{optimizer: {{{line}}}}}\n"
        rate = load(write(text)).learner.optimizer.learning_rate
        assert type(rate) is float and rate == wanted, line


def test_f01_numbers_in_overrides(cases, minimal):
    case = cases("config")["F01"]
    for override, wanted in zip(case["input"]["set"], case["expected"]["set"], strict=True):
        name, text = override.split("=")
        value = value_at(load(minimal, [f"{F01_KEYS[name]}={text}"]), F01_KEYS[name])
        if name == "max_steps":
            assert type(value) is int and value == 1000
        else:
            assert type(value) is float and value == wanted


@pytest.mark.parametrize("text", ["'1e-6'", '"1e-6"', "1E-6", ".000001", "1.0e-06", "+1e-6"])
def test_f01_further_spellings_in_overrides(minimal, text):
    config = load(minimal, [f"learner.optimizer.learning_rate={text}"])
    assert config.learner.optimizer.learning_rate == 1e-6


def test_f02_booleans_in_overrides(cases, minimal):
    case = cases("config")["F02"]
    for override, wanted in zip(case["input"]["set"], case["expected"]["set"], strict=True):
        ours = "weights.canary=" + override.partition("=")[2]
        if wanted == "error":
            assert "weights.canary" in refusal(minimal, ours)
        else:
            assert load(minimal, [ours]).weights.canary is wanted


def test_what_is_kept_of_a_layer_has_names_and_two_of_them_are_booleans_too(minimal):
    assert set(REMATS) == {one.value for one in layer_scan.Remat}
    for text, name in [("true", "layer"), ("false", "none"), *((name, name) for name in REMATS)]:
        assert load(minimal, [f"learner.remat={text}"]).learner.remat == name


def test_f02_false_in_the_file_over_a_true_default(write):
    assert RunConfig.model_fields["weights"].default.canary is True
    assert load(write(MINIMAL + "weights: {canary: false}\n")).weights.canary is False


@pytest.mark.parametrize("word, value", [("true", True), ("on", True), ("yes", True), ("1", True)])
@pytest.mark.parametrize("spell", [str.lower, str.upper, str.capitalize])
def test_f02_true_in_any_case_in_file_and_override(write, word, value, spell):
    text = MINIMAL + f"run: {{resume: {spell(word)}}}\n"
    assert load(write(text)).run.resume is value
    assert load(write(MINIMAL), [f"run.resume={spell(word)}"]).run.resume is value


def test_f03_misspelt_keys_name_the_nearest(cases, minimal, write):
    case = cases("config")["F03"]
    nearest_key = {
        "learnig_rate=1e-6": "learner.optimizer.learning_rate",
        "rollout.max_new_token=64": "rollout.max_completion_tokens",
    }
    for override in case["input"]["set"]:
        message = refusal(minimal, override)
        assert f"{override.partition('=')[0]}:" in message
        if override in nearest_key:
            assert f"did you mean {nearest_key[override]}?" in message
        else:
            assert override == "rollout=5"
            assert "5 cannot replace a section" in message
    message = refusal(write(MINIMAL + case["input"]["yaml"]))
    assert "grop_size: unknown key; did you mean rollout.completions_per_prompt?" in message
    assert "run.yaml, line 5" in message


@pytest.mark.parametrize(
    "unknown, known",
    [
        ("learner.optimiser.learning_rate", "learner.optimizer.learning_rate"),
        ("learner.optimizer.leaning_rate", "learner.optimizer.learning_rate"),
        ("rolout.workers", "rollout.workers"),
        ("qval.top_k", "eval.top_k"),
        ("rollout.learning_rate", "learner.optimizer.learning_rate"),
        ("rollout.decode.atention", "rollout.decode.attention"),
        ("learner.kl_coef", "algorithm.kl_coef"),
        ("wandb.enabled", "log.wandb.mode"),
        ("data.evaluation", "data.eval"),
    ],
)
def test_nearest_key_across_sections(unknown, known):
    assert nearest(unknown) == known


@pytest.mark.parametrize(
    "unknown",
    ["zzqx", "rollout.decode.onswap", "rollout.decode.width", "learner.optimizer.amsgrad"],
)
def test_a_key_like_nothing_gets_no_hint(unknown):
    assert nearest(unknown) is None


@given(st.sampled_from(known_keys()), st.data())
def test_one_wrong_letter_never_hides_a_key(key, data):
    at = data.draw(st.integers(0, len(key) - 1).filter(lambda i: key[i] not in ".0"))
    misspelt = key[:at] + "q" + key[at + 1 :]
    found = nearest(misspelt)
    # Another key may be as near: one letter off `gpus` is also one off `cpus`.
    as_near = len(found) == len(key) and found[:at] == key[:at] and found[at + 1 :] == key[at + 1 :]
    assert as_near or len(key) <= 8


def test_f05_geometries_that_the_configuration_alone_refuses(cases, minimal):
    first, _, _, no_prompts, uneven, plain = cases("config")["F05"]["input"]["rows"]

    def overrides(row):
        names = {
            "prompts_per_step": "rollout.prompts_per_step",
            "group_size": "rollout.completions_per_prompt",
            "workers": "rollout.workers",
        }
        return [f"{names[key]}={value}" for key, value in row.items() if key in names]

    assert "1 must be at least 2" in refusal(minimal, *overrides(first))
    assert "prompts_per_step: 0 must be at least 1" in refusal(minimal, *overrides(no_prompts))
    for row in (uneven, plain):
        config = load(minimal, overrides(row))
        assert config.rollout.completions_per_step == row["prompts_per_step"] * row["group_size"]


def test_unknown_keys_at_any_depth_and_every_error_in_one_message(write):
    path = write(
        """
        modle: {path: x}
        data: {train: {source: a.jsonl, sise: 3}}
        rollout: {decode: {lop: while}, workers: 0}
        reward: {functions: [{name: format, wieght: 1}]}
        run: {steps: many, name: "a b"}
        learner: {remat: 3, optimizer: {learning_rate: .inf}}
        """
    )
    message = refusal(path, "placement.platform=tpuu", "run.resume")
    for part in (
        "modle: unknown key; did you mean model? (",
        "data.train.sise: unknown key; did you mean data.train.size?",
        "rollout.decode.lop: unknown key; did you mean rollout.decode.loop?",
        "rollout.workers: 0 must be at least 1",
        "reward.functions.0.wieght: unknown key; did you mean reward.functions.0.weight?",
        "run.steps: 'many' is not a whole number",
        "run.name: 'a b' must match",
        "learner.remat: 3 is none of none, layer, dots, attention, mlp, offload, true or false",
        "learner.optimizer.learning_rate: inf is not a finite number",
        "placement.platform: 'tpuu' is none of 'cpu', 'gpu' or 'tpu' (--set)",
        "--set run.resume: write it as --set section.key=value",
        "line 5",
    ):
        assert part in message, part
    assert "pydantic" not in message


def test_a_missing_section_is_named(write):
    message = refusal(write("run: {steps: 1}\n"))
    assert "model: is required and not set" in message
    assert "data: is required and not set" in message


def test_no_file_at_all_takes_defaults_and_overrides():
    config = load(
        None, ["model.path=m", "data.train.source=a.jsonl", "eval.at_start=no", "eval.at_end=no"]
    )
    assert config.model.path == "m" and config.rollout.workers.at_start == 2


def test_duplicate_key_is_refused_with_both_lines(write):
    message = refusal(write("model: {path: a}\nrun:\n  steps: 1\n  seed: 2\n  steps: 9\n"))
    assert "line 5" in message and 'duplicate key "steps"' in message and "line 3" in message


@pytest.mark.parametrize(
    "text, part",
    [
        ("run: [1\nmodel: 2\n", "line 2"),
        ("run:\n\tsteps: 1\n", "line 2"),
        ("- 1\n", "must be a mapping"),
        ("just text\n", "must be a mapping"),
        ("a: !!python/object:os.system x\n", "line 1"),
        ("run: {steps: 1}\n---\nrun: {steps: 2}\n", "another document"),
        ("data: &a {train: {params: *a}}\n", "an alias contains itself"),
    ],
)
def test_what_is_not_a_yaml_mapping_is_refused_with_its_place(write, text, part):
    assert part in refusal(write(text))


def test_a_missing_file_is_named(tmp_path):
    assert "nowhere.yaml: No such file" in refusal(str(tmp_path / "nowhere.yaml"))


def test_later_override_wins_and_overrides_beat_the_file(write):
    path = write(MINIMAL + "run: {steps: 5}\n")
    assert load(path).run.steps == 5
    assert load(path, ["run.steps=6", "run.steps=7"]).run.steps == 7


def test_an_override_leaves_its_neighbours_alone(write):
    path = write(MINIMAL + "learner: {optimizer: {clip_norm: 0.5, beta1: 0.8}}\n")
    optimizer = load(path, ["learner.optimizer.clip_norm=2"]).learner.optimizer
    assert (optimizer.clip_norm, optimizer.beta1) == (2.0, 0.8)


def test_list_items_by_index(write):
    path = write(MINIMAL + "reward: {functions: [{name: format}, {name: gsm8k_answer}]}\n")
    functions = load(path, ["reward.functions.1.weight=0.5"]).reward.functions
    assert [(f.name, f.weight) for f in functions] == [("format", 1.0), ("gsm8k_answer", 0.5)]
    added = load(path, ["reward.functions.2.name=math_verify"]).reward.functions
    assert [f.name for f in added] == ["format", "gsm8k_answer", "math_verify"]
    assert "index 7 is past the end: the list has 2 items" in refusal(
        path, "reward.functions.7.weight=1"
    )


def test_the_default_list_can_be_changed_by_index(minimal):
    (function,) = load(minimal, ["reward.functions.0.weight=2"]).reward.functions
    assert (function.name, function.weight) == ("gsm8k_answer", 2.0)


def test_text_is_taken_as_it_stands(minimal):
    config = load(
        minimal,
        [
            "run.name=007",
            "data.question_template={question} Answer: #### n",
            "data.system_prompt=key = value",
            "model.tokenizer=null",
            "model.chat_template='null'",
        ],
    )
    assert config.run.name == "007"
    assert config.data.question_template == "{question} Answer: #### n"
    assert config.data.system_prompt == "key = value"
    assert config.model.tokenizer is None
    assert config.model.chat_template == "null"


SEVERAL = "data.train=[{source: a.jsonl, weight: 5}, {source: b/c.parquet}, {source: x/d}]"


def test_several_training_sources_with_weights(minimal, tmp_path):
    config = load(minimal, [SEVERAL, "data.train.1.weight=3", "data.train.2.name=hub"])
    assert config.data.train_names == ("a", "c", "hub")
    assert config.data.train_weights == (5.0, 3.0, 1.0)
    path = tmp_path / "again.yaml"
    path.write_text(dump(config))
    assert load(str(path)) == config
    assert load(minimal).data.train_weights == (1.0,)


@pytest.mark.parametrize(
    "override, said",
    [
        ("data.train.1.weight=0", "data.train.1.weight: a weight must be a finite number above 0"),
        ("data.train.1.weight=-2", "above 0, got -2.0: correct it, or remove the source"),
        ("data.train.1.weight=.nan", "data.train.1.weight: a weight must be a finite number"),
        ("data.train.1.weight=.inf", "above 0, got inf"),
        ("data.train.1.weight=much", "data.train.1.weight: 'much' is not a number"),
        ("data.train.1.weight=true", "data.train.1.weight: True is not a number"),
        ("data.train.1.wieght=1", "data.train.1.wieght: unknown key; did you mean data.train."),
        ("data.train.1.name=a/b", "data.train.1.name: 'a/b' must match"),
        ("data.train.1.name=a", "train.0 and train.1 are both called 'a' in logs and metrics"),
        ("data.train.1.source=./a.jsonl", "train.0 and train.1 are the same source ./a.jsonl: "),
        ("data.train=[]", "train=[] has no source: give at least one"),
        ("data.train=[3]", "data.train.0: 3 cannot replace a section"),
        ("data.train.source=a", "data.train is a list here: name an item, such as data.train.0.s"),
        ("data.train.7.source=a", "index 7 is past the end: the list has 3 items"),
    ],
)
def test_a_bad_mixture_is_one_message(minimal, override, said):
    with pytest.raises(ConfigError) as refused:
        load(minimal, [SEVERAL, override])
    assert said in str(refused.value)
    assert str(refused.value).startswith("1 problem in the configuration")


def test_all_weights_of_zero_are_named(minimal):
    zero = "data.train=[{source: a.jsonl, weight: 0}, {source: b.jsonl, weight: 0}]"
    with pytest.raises(ConfigError, match="data.train.0.weight: .*got 0.0(?s:.*)data.train.1.wei"):
        load(minimal, [zero])


@pytest.mark.parametrize(
    "other, are_equal",
    [
        ("{source: a.jsonl, split: test, seed: 4}", True),  # neither is read of a file
        ("{source: a.jsonl, weight: 2, name: z}", True),
        ("{source: a.jsonl, skip: 5, name: z}", False),
        ("{source: a.jsonl, question_field: ask, name: z}", False),
    ],
)
def test_equal_sources_are_those_with_equal_records(minimal, other, are_equal):
    both = f"data.train=[{{source: a.jsonl}}, {other}]"
    if not are_equal:
        assert len(load(minimal, [both]).data.train_sources) == 2
        return
    with pytest.raises(ConfigError, match="are the same source a.jsonl: keep one of them"):
        load(minimal, [both])


def test_an_item_of_what_is_no_list_is_refused(minimal):
    with pytest.raises(ConfigError, match="data.train is no list here: make it one in the file"):
        load(minimal, ["data.train={source: a.jsonl}", "data.train.0.weight=2"])
    with pytest.raises(ConfigError, match="data.train.weight: unknown key; did you mean data.t"):
        load(minimal, ["data.train={source: a.jsonl, weight: 2}"])


def test_a_number_in_quotes_is_that_number_wherever_it_stands(minimal):
    config = load(
        minimal,
        [
            "run.steps='7'",
            "reward.functions=[{name: exact, weight: '2'}]",
            "data.train=[{source: a.jsonl, weight: '2'}, {source: b.jsonl}]",
        ],
    )
    assert config.run.steps == 7 and config.reward.functions[0].weight == 2.0
    assert config.data.train_weights == (2.0, 1.0)
    with pytest.raises(ConfigError, match="reward.functions.0.weight: 'two' is not a number"):
        load(minimal, ["reward.functions=[{name: exact, weight: two}]"])


ADD = "{type: function, function: {name: add}}"


def test_arguments_and_tools_of_the_chat_template(minimal, tmp_path):
    config = load(minimal, ["data.template_args.enable_thinking=false", f"data.tools=[{ADD}]"])
    assert config.data.template_args == {"enable_thinking": False}
    assert config.data.tools == ({"type": "function", "function": {"name": "add"}},)
    path = tmp_path / "again.yaml"
    path.write_text(dump(config))
    assert load(str(path)) == config


@pytest.mark.parametrize(
    "override, said",
    [
        ("data.tools=5", "data.tools: 5 is not a list of mappings: write one item per `- `"),
        ("data.tools=[5]", "data.tools: [5] is not a list of mappings"),
        (f"data.tools={ADD}", "is not a list of mappings"),
        ("data.tools=[{1: 2}]", "data.tools.0: key 1 is not text: put it in quotes"),
        ("data.tools=[{a: .nan}]", "data.tools.0.a: nan is not finite"),
        (
            "data.tools=[{api_key: abcdefgh12345678}]",
            "data.tools.0.api_key: is named like a s",
        ),
        ("data.tools=[{}]", "data.tools: tool 0 is {}, which names no function, so that"),
        (f"data.tools=[{ADD}, {{type: function}}]", "tool 1 is {'type': 'function'}, which names"),
        ("data.tools=[{function: {name: ''}}]", "write {type: function, function: {name: add"),
        ("data.tools=[{function: add}]", "tool 0 is {'function': 'add'}, which names no function"),
        ("data.tools.0.a=1", "data.tools.0.a: unknown key"),
        ("data.template_args=5", "data.template_args: 5 is not a mapping"),
        ("data.template_args.a=.inf", "data.template_args.a: inf is not finite"),
    ],
)
def test_bad_arguments_and_tools_are_one_message(minimal, override, said):
    with pytest.raises(ConfigError) as refused:
        load(minimal, [override])
    assert said in str(refused.value)


def test_flow_collections_in_overrides(minimal):
    config = load(
        minimal,
        [
            "model.stop_tokens=[<|im_end|>, </s>]",
            "data.train.source=reasoning_gym:chain_sum",
            "data.train.params={min_terms: 2, digits: [1, 3]}",
            "data.train.params.max_terms=4",
            "data.eval={source: test.jsonl}",
            "data.eval.size=20",
            "learner.mesh={data: 2, fsdp: -1}",
        ],
    )
    assert config.model.stop_tokens == ("<|im_end|>", "</s>")
    assert config.data.train.params == {"min_terms": 2, "digits": [1, 3], "max_terms": 4}
    assert config.data.eval.source == "test.jsonl" and config.data.eval.size == 20
    assert config.learner.mesh.data == 2


@pytest.mark.parametrize(
    "override, part",
    [
        ("run.steps=true", "True is not a number"),
        ("run.steps=1.5", "1.5 is not a whole number"),
        ("run.steps=", "has no value"),
        ("run.steps=null", "null is not allowed"),
        ("model.path=null", "null is not allowed"),
        ("run.steps=[1", "is not a YAML value"),
        ("model.stop_tokens=abc", "'abc' is not a list"),
        ("reward.functions=3", "3 is not a list"),
        ("data.train.params=3", "3 is not a mapping"),
        ("run.steps.more=1", "unknown key; did you mean run.steps?"),
        ("=1", "write it as --set section.key=value"),
        ("run..steps=1", "write it as --set section.key=value"),
        ("learner.microbatch_tokens=100", "cannot hold one sequence"),
        ("learner.mesh.context=3", "context=3: rows are cut into 2 x context equal chunks"),
        ("learner.mesh.context=0", "set it to one of (1, 2, 4, 8, 16, 32)"),
        ("learner={mesh: {context: 2}, microbatch_tokens: 1537}", "each device has two equal"),
        (
            "learner={mesh: {context: 2}, microbatch_tokens: 700}",
            "learner.microbatch_tokens=700 x learner.mesh.context=2 = 1400 cannot hold one",
        ),
        ("rollout.decode.cache_tokens=8", "1536 positions, but the KV cache holds"),
        ("rollout.decode.on_swap=continue", "it was removed, since it had no effect"),
        ("rollout.decode.batch_rows=12", "unknown key; did you mean rollout.decode.slots?"),
        ("rollout.stop_strings=####", "is a comment in YAML: quote what is text"),
        ("rollout.decode.attention=float8", "none of 'auto', 'bf16', 'f32' or 'pallas'"),
        ("rollout.top_p=0.9", "the learner scores every token under the whole distribution"),
        ("rollout.stop_strings=[a, '']", "each must have between 1 and 256"),
        ("rollout.stop_strings=END", "'END' is not a list"),
        ("eval.top_p=0", "0 must be at least 1e-09"),
        ("eval.min_p=1.5", "1.5 must be at most 1"),
        ("eval.top_k=-1", "-1 must be at least 0"),
        ("rollout.max_completion_tokens=0", "0 must be at least 1"),
    ],
)
def test_wrong_values_say_value_rule_and_fix(minimal, override, part):
    assert part in refusal(minimal, override)


def test_numbers_where_text_belongs_ask_for_quotes(write):
    assert "run.name: 5 is not text: put it in quotes" in refusal(
        write(MINIMAL + "run: {name: 5}\n")
    )


def test_a_number_of_workers_is_short_for_a_start_and_any_number_later(minimal):
    def workers(*overrides):
        return load(minimal, overrides).rollout.workers

    one = workers("rollout.workers=3")
    assert (one.at_start, one.min, one.max, one.policy) == (3, 1, 4096, "fixed")
    some = workers("rollout.workers={min: 2, max: 5, policy: balance}")
    assert (some.at_start, some.min, some.max, some.policy) == (2, 2, 5, "balance")
    assert workers("rollout.workers.min=1", "rollout.workers.max=4").at_start == 1


@pytest.mark.parametrize(
    "value",
    ["3", "{min: 1, max: 4096, start: 1}", "{min: 2, max: 4}", "{min: 1, max: 9, start: 4}"],
)
def test_workers_are_written_as_they_are_read(minimal, write, value):
    config = load(minimal, [f"rollout.workers={value}"])
    assert load(write(dump(config))) == config
    if value == "3":
        assert "  workers: 3\n" in dump(config)


def test_dropped_groups_may_be_replaced_in_an_asynchronous_run(minimal):
    config = load(minimal, ["rollout.max_staleness=2", "algorithm.zero_variance=resample"])
    assert config.rollout.max_staleness == 2


def test_a_section_without_keys_takes_its_defaults(write):
    assert load(write(MINIMAL + "rollout:\n  # workers: 3\n")).rollout.workers.at_start == 2


@pytest.mark.parametrize(
    "override",
    [
        "log.wandb.api_key=geheim123",
        "reward.functions.0.params.api_key=geheim123",
        "reward.functions.0.params={service: {password: geheim123}}",
        "data.train.source=https://me:geheim123@example.org/x.jsonl",
        "data.train.params.url=https://me:geheim123@example.org/x",
        "reward.functions.0.params.openai_key=sk-zq81geheim1234471aa02",
        "reward.functions.0.params.x=sk-zq81geheim1234471aa02",
        "reward.functions.0.params={judge: {headers: [Bearer geheim1234567]}}",
        "reward.functions.0.params.stripe_key=geheim123",
        "reward.functions.0.params={ghp_geheim1236C7e42F292c6912E77: 1}",
        "log.wandb.mode=sk-zq81geheim1234471aa02",
        "run.steps=sk-zq81geheim1234471aa02",
        "model.path=https://example.org/model?token=geheim1234567",
    ],
)
def test_secrets_are_refused_and_not_repeated_R12(minimal, override):
    message = refusal(minimal, override)
    assert "secret" in message and "geheim123" not in message


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
tricky = st.sampled_from(
    [
        "\x85",
        "a\u2028b",
        "no",
        "1e-6",
        "null",
        "~",
        "2024-01-01",
        "=",
        "<<",
        " lead",
        "trail ",
        "a: b",
        "# c",
        "0x1f",
    ]
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | tricky
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text("abc_ 1:-", min_size=1, max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@given(
    system_prompt=st.none() | texts | tricky,
    template=texts,
    stop_tokens=st.lists(texts | tricky, max_size=3),
    params=st.dictionaries(st.text("abc_ 1:-", min_size=1, max_size=5), plain, max_size=3),
    rate=st.floats(0, 1, allow_subnormal=False),
    steps=st.integers(1, 10**6),
    resume=st.booleans(),
)
def test_dump_loads_back_to_the_equal_configuration(
    tmp_path_factory, system_prompt, template, stop_tokens, params, rate, steps, resume
):
    config = RunConfig.model_validate(
        {
            "run": {"steps": steps, "resume": resume},
            "model": {"path": "m", "stop_tokens": stop_tokens},
            "data": {
                "train": {"source": "reasoning_gym:x", "params": params},
                "system_prompt": system_prompt,
                "question_template": template + "{question}",
            },
            "eval": {"at_start": False, "at_end": False},
            "learner": {"optimizer": {"learning_rate": rate}},
        }
    )
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump(config), encoding="utf-8", newline="")
    assert load(str(path)) == config


@pytest.mark.parametrize("path", sorted(RUNS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_run_file_loads_and_is_named_after_itself(path):
    config = load(str(path))
    assert config.run.name.replace("-", "_") in path.stem
    assert config == load(str(path), ["run.seed=0"])


@pytest.mark.parametrize(
    "override, part",
    [
        ("reward.functions=null", "reward.functions: null is not allowed"),
        ("reward.functions.0.weight=0", "the weights of reward.functions are all 0"),
        ("reward.functions.0.weight=1e9", "must be at most 1000000"),
        ("reward.timeout_s=1e-9", "must be at least 0.01"),
        ("weights.timeout_s=0.001", "must be at least 0.01"),
        ("placement.step_timeout_s=1e300", "must be at most 604800"),
        ("rollout.workers=5000", "must be at most 4096"),
        ("rollout.workers=2.5", "2.5 is not a whole number: write one, or set keys such as"),
        ("rollout.workers=true", "True is not a whole number"),
        ("rollout.workers.max=3", "rollout.workers.min: is required and not set"),
        ("rollout.workers={min: 3, max: 2}", "min=3 is above max=2"),
        ("rollout.workers={min: 1, max: 2, start: 3}", "must lie between min=1 and max=2"),
        ("rollout.max_staleness=65", "must be at most 64"),
        ("rollout.prompts_per_step=10000000", "must be at most 1000000"),
        ("rollout.decode.slots=1000000", "must be at most 65536"),
        ("rollout.decode.tensor=0", "must be at least 1"),
        ("rollout.decode.segment_tokens=5000", "must be at most 4096"),
        ("rollout.decode.prefill_tokens=31", "must be at least 32"),
        ("rollout.decode.prefixes=0", "must be at least 1"),
        ("rollout.decode.compile_budget=0", "must be at least 1"),
        ("rollout.temperature=1e-40", "must be at least 0.01"),
        ("eval.temperature=1e-40", "must be 0 (greedy) or at least 0.01"),
        ("learner.optimizer.learning_rate=3", "must be at most 1"),
        ("algorithm.advantage_eps=1e-300", "must be at least 1e-12"),
        ('data.system_prompt="\\ud800"', "contains half a surrogate pair"),
        ('model.stop_tokens=["\\ud800"]', "contains half a surrogate pair"),
        ("rollout=5", "rollout: 5 cannot replace a section"),
        ("rollout.max_completion_tokens=null", "null is not allowed"),
        ("rollout.max_prompt_tokens=x", "'x' is not a whole number"),
        ("data.train.params={a: 1}", "belong to a reasoning_gym:<task> source"),
    ],
)
def test_what_cannot_be_meant_is_one_problem_with_its_rule(write, override, part):
    # microbatch_tokens holds 100 + 100 tokens, but not those of the default lengths.
    path = write(
        MINIMAL
        + "rollout: {max_prompt_tokens: 100, max_completion_tokens: 100}\n"
        + "learner: {microbatch_tokens: 256}\n"
        + "reward: {functions: [{name: format}]}\n"
    )
    message = refusal(path, override)
    assert message.startswith("1 problem in") and part in message


@pytest.mark.parametrize("depth", [100, 3000, 100_000])
def test_deep_nesting_is_a_problem_of_the_file(write, minimal, depth):
    nested = "[" * depth + "]" * depth
    assert "nested more than 64 levels deep" in refusal(write(MINIMAL + f"run: {nested}\n"))
    assert "nested more than 64 levels deep" in refusal(minimal, f"data.train.params={nested}")


def test_a_removed_key_of_an_older_run_is_ignored_where_it_had_no_effect(tmp_path):
    """A run writes every key into its config.yaml, those included that were removed since."""
    config = load("deploy/runs/demo_cpu.yaml", [])
    older = tmp_path / "config.yaml"
    for value in ("finish", "restart"):
        text = dump(config).replace("  decode:\n", f"  decode:\n    on_swap: {value}\n")
        older.write_text(text)
        assert "on_swap" in text and load(str(older), []) == config
    older.write_text(text.replace("on_swap: restart", "on_swap: continue"))
    with pytest.raises(ConfigError, match="it was removed, since it had no effect"):
        load(str(older), [])


PARAMS = (
    MINIMAL
    + """
reward:
  functions:
    - name: format
      params: {pattern: "a+"}
"""
)


@pytest.mark.parametrize(
    "override, expected",
    [
        ("reward.functions.0.params.x=.inf", "params.x: inf is not finite: .* (--set)"),
        ("reward.functions.0.params.pattern=.nan", "params.pattern: nan is not finite: .* (--set)"),
        ("reward.functions.0.params.x.y=[1, .inf]", "params.x.y.1: inf is not finite: .* (--set)"),
        (
            "reward.functions.0.params.api_key=k",
            "params.api_key: is named like a secret: .*reward.environment.* (--set)",
        ),
        ("reward.functions.0.params.x=http://a:b@c", "params.x: contains a password .* (--set)"),
        (
            "reward.functions.1.weight=2",
            "reward.functions.1.name: is required .* and --set reward.functions.1.weight)",
        ),
        ("data.train.params.x=1", "data.train: params={'x': 1} .* and --set data.train.params.x)"),
    ],
)
def test_a_fault_of_an_override_names_it_and_its_value(write, override, expected):
    message = refusal(write(PARAMS), override)
    assert re.search(re.escape(expected).replace(r"\.\*", ".*"), message), message


def test_a_fault_in_the_file_keeps_its_line(write):
    message = refusal(write(PARAMS.replace('"a+"', ".inf")), "reward.functions.0.weight=2")
    assert re.search(r"params.pattern: inf is not finite.*run.yaml, line \d+\)", message), message


def test_a_group_of_one_is_refused_where_completions_are_compared():
    base = ["model.path=a", "data.train.source=b.jsonl", "data.eval.source=c.jsonl"]
    alone = [*base, "rollout.completions_per_prompt=1"]
    for advantage in ("group_norm", "leave_one_out", "reward_norm"):
        with pytest.raises(ConfigError, match="=1 must be at least 2 with .*raise it, or set"):
            load(None, [*alone, f"algorithm.advantage={advantage}"])
    for advantage in ("gae", "batch_norm"):
        config = load(None, [*alone, f"algorithm.advantage={advantage}"])
        assert config.rollout.completions_per_step == config.rollout.prompts_per_step
    dropping = [*alone, "algorithm.advantage=batch_norm", "algorithm.zero_variance=mask"]
    with pytest.raises(ConfigError, match="zero_variance=mask leaves every group out"):
        load(None, dropping)


def test_what_would_train_nothing_or_drop_what_trains_is_refused():
    base = ["model.path=a", "data.train.source=b.jsonl", "data.eval.source=c.jsonl"]
    passes = ["algorithm.advantage=pass_at_k", "rollout.completions_per_prompt=4"]
    with pytest.raises(ConfigError, match=r"algorithm.pass_k=4 must be below .*=4"):
        load(None, [*base, *passes])
    assert load(None, [*base, *passes, "algorithm.pass_k=3"]).algorithm.pass_k == 3
    for key in ("advantage=reward_norm", "length_coef=1"):
        with pytest.raises(ConfigError, match="zero_variance=mask drops .*set zero_variance to"):
            load(None, [*base, f"algorithm.{key}", "algorithm.zero_variance=mask"])
        assert load(None, [*base, f"algorithm.{key}"]).algorithm.zero_variance == "keep"


def test_completions_without_an_end_are_refused_where_they_would_train_nothing():
    base = ["model.path=a", "data.train.source=b.jsonl", "data.eval.source=c.jsonl"]
    endless = [*base, "rollout.ignore_stop_tokens=true"]
    masked = [*endless, "algorithm.truncated=mask"]
    with pytest.raises(ConfigError, match="truncated=mask leaves those out.*set algorithm.trunc"):
        load(None, masked)
    assert load(None, [*masked, 'rollout.stop_strings=["."]']).rollout.ignore_stop_tokens
    with pytest.raises(ConfigError, match="with environment.name=a:B: a turn .*set it to false"):
        load(None, [*endless, "environment.name=a:B"])
