"""The demo's embedded model: its files, its corpus, its task, and what it knows at the start."""

import dataclasses
import json
import pathlib
import re
import unicodedata

import jax
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from deploy.demo import make_model
from driver.config.load_config import load, load_as
from driver.sft.sft_config import SftConfig
from driver.sft.sft_plan import plan_training
from learner.sft.supervised_learner import SupervisedLearner
from models.files.checkpoint import check_model_files, load_model, read_model_config
from models.load_tokenizer import load_tokenizer
from models.transformer import init_params
from rollout_worker.data.prompts import count_shared, load_prompts
from rollout_worker.rewards.scorers import gsm8k_answer

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = str(make_model.OUTPUT)
STEP = re.compile(r"(-?\d+) ([+-]) (\d+) = (-?\d+)")
STAGES = (make_model.CALCULATE, make_model.GUESS)


@pytest.fixture(scope="module")
def demo():
    return load(str(ROOT / "deploy" / "runs" / "demo_cpu.yaml"))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODEL)


@pytest.fixture(scope="module")
def prompt_sets(demo, tokenizer):
    """The prompts of data.train and data.eval."""
    rules = {
        "tokenizer": tokenizer,
        "system_prompt": demo.data.system_prompt,
        "question_template": demo.data.question_template,
        "max_prompt_tokens": demo.rollout.max_prompt_tokens,
    }
    return tuple(load_prompts(source, **rules) for source in (demo.data.train, demo.data.eval))


def first_digit(prompt) -> str:
    """How a worked answer begins."""
    return prompt.item["metadata"]["expression"][0]


def total_of(question: str) -> int:
    """The sum by another way than the corpus takes: signed terms, added up."""
    expression = question.partition(":")[2].replace(" ", "").rstrip("=")
    return sum(int(term) for term in re.findall(r"[+-]?\d+", expression))


def test_model_is_complete_and_small(demo, tokenizer):
    check_model_files(MODEL)
    config = read_model_config(MODEL)
    params = load_model(MODEL).params
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert config.model_type == "qwen2" and config.tie_word_embeddings
    assert 1_000_000 <= count <= 3_000_000
    assert sum(file.stat().st_size for file in make_model.OUTPUT.iterdir()) < 8_000_000
    assert config == make_model.model_config(tokenizer.vocab_size)
    assert ROOT / demo.model.path == make_model.OUTPUT


def test_committed_tokenizer_is_the_scripts(tmp_path):
    make_model.build_tokenizer().save(tmp_path)
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (make_model.OUTPUT / file.name).read_bytes(), file.name


@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer, text):
    composed = unicodedata.normalize("NFC", text)  # what every Qwen2 tokenizer reads
    prompt = tokenizer.encode_chat([{"role": "user", "content": composed}])
    assert tokenizer.decode(prompt) == (
        f"<|im_start|>user\n{composed}<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("loader", [AutoTokenizer, PreTrainedTokenizerFast])
def test_transformers_reads_the_words_as_single_tokens(loader):
    text = "State the final answer: 12 - 7 =<|im_end|>\n-5 + 3 = -2\n#### -2"
    expected = ["State", " the", " final", " answer", ": ", "12", " - ", "7", " =", "<|im_end|>"]
    expected += ["Ċ", "-", "5", " + ", "3", " = ", "-", "2", "Ċ", "#### ", "-", "2"]
    assert loader.from_pretrained(MODEL).tokenize(text) == expected


def test_end_of_turn_is_the_only_stop_and_is_not_padding(tokenizer):
    backend = AutoTokenizer.from_pretrained(MODEL)
    assert tokenizer.stop_ids == {backend.convert_tokens_to_ids("<|im_end|>")}
    assert tokenizer.pad_id == backend.convert_tokens_to_ids("<|endoftext|>")
    generation = json.loads((make_model.OUTPUT / "generation_config.json").read_text())
    assert set(generation["eos_token_id"]) == tokenizer.stop_ids


def test_run_asks_what_the_warm_start_taught(demo):
    assert demo.run.name == "demo"
    assert demo.data.system_prompt == make_model.SYSTEM_PROMPT
    assert demo.data.question_template == "{question}"
    for source in (demo.data.train, demo.data.eval):
        assert source.source == "reasoning_gym:chain_sum" and source.params == make_model.TASK
    assert (demo.data.eval.seed, demo.data.eval.size) == (
        make_model.HELD_OUT_SEED,
        make_model.HELD_OUT_SIZE,
    )
    assert demo.data.train.seed + demo.data.train.size < make_model.FIRST_SEED


def test_held_out_questions_are_held_out(prompt_sets):
    train, held_out = prompt_sets
    questions = {prompt.question for prompt in held_out.prompts}
    assert len(questions) == 200 and questions == make_model.held_out_questions()
    assert count_shared(train, held_out) == 0
    for stage in STAGES:
        assert not questions & {question for question, _ in make_model.conversations(stage)}


def test_prompts_and_workings_fit_the_run(demo, tokenizer, prompt_sets):
    assert [one.overlong for one in prompt_sets] == [0, 0]
    assert max(len(prompt.token_ids) for one in prompt_sets for prompt in one.prompts) == 39
    backend = AutoTokenizer.from_pretrained(MODEL)
    answers = [answer for _, answer in make_model.conversations(make_model.CALCULATE)]
    lengths = [len(tokens) + 1 for tokens in backend(answers)["input_ids"]]
    assert 30 < max(lengths) <= demo.rollout.max_completion_tokens


@pytest.mark.parametrize("stage", STAGES, ids=["calculate", "guess"])
def test_every_answer_of_the_corpus_is_right(stage):
    terse = [[], []]
    for question, answer in make_model.conversations(stage):
        *lines, last = answer.split("\n")
        first = int(question.partition(": ")[2].split()[0])
        terse[first >= make_model.LARGE].append(not lines)
        carried = None
        for line in lines:
            left, operator, right, result = STEP.fullmatch(line).groups()
            assert carried is None or int(left) == carried
            sign = 1 if operator == "+" else -1
            carried = int(result)
            assert int(left) + sign * int(right) == carried, line
        assert carried is None or carried == total_of(question)
        assert last == f"#### {total_of(question)}"
        assert gsm8k_answer(answer, answer=str(total_of(question)), prompt="", item={})
    for kind, expected in enumerate(stage.terse_fractions):
        # Four standard deviations of a binomial share.
        spread = 4 * (expected * (1 - expected) / len(terse[kind])) ** 0.5
        assert np.mean(terse[kind]) == pytest.approx(expected, abs=spread)


def test_working_of_a_sum_worked_out_by_hand():
    assert make_model.worked_lines("4 - 9 + 7 - 0") == ["4 - 9 = -5", "-5 + 7 = 2", "2 - 0 = 2"]


def test_records_train_the_answer_and_its_end_alone_and_fit(demo, tokenizer, tmp_path):
    stage = make_model.Stage(
        steps=3, rows=4, terse_fractions=(0.5, 0.5), learning_rate=1e-3, seed=5
    )
    settings = make_model.stage_settings(stage, make_model.OUTPUT, tmp_path)
    config = load_as(SftConfig, str(make_model.SETTINGS), settings)
    assert config.data.system_prompt == demo.data.system_prompt
    plan = plan_training(config)
    said = [tokenizer.decode(one.token_ids[one.trains]) for one in plan.train]
    assert said == [f"{answer}<|im_end|>" for _, answer in make_model.conversations(stage)]


def test_the_longest_record_of_the_corpus_fits(tokenizer):
    config = load_as(SftConfig, str(make_model.SETTINGS), ["model.path=m", "data.train.source=a"])
    records = list(make_model.conversations(make_model.CALCULATE))
    texts = [question + answer for question, answer in records]
    counts = [len(ids) for ids in AutoTokenizer.from_pretrained(MODEL)(texts)["input_ids"]]
    question, answer = records[int(np.argmax(counts))]
    roles = ("system", "user", "assistant")
    said = (make_model.SYSTEM_PROMPT, question, answer)
    turns = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    assert len(tokenizer.encode_turns(turns, [2]).token_ids) <= config.batch.max_tokens


def test_the_first_steps_lose_what_they_do_in_a_loop_written_out(tokenizer, tmp_path):
    """The loop had one conversation a row, one batch a step, and optax alone."""
    first_three = dataclasses.replace(make_model.CALCULATE, steps=3)
    configs = [
        load_as(
            SftConfig,
            str(make_model.SETTINGS),
            make_model.stage_settings(stage, make_model.OUTPUT, tmp_path),
        )
        for stage in (make_model.CALCULATE, first_three)
    ]
    shape = make_model.model_config(tokenizer.vocab_size)
    learner = SupervisedLearner(
        configs[0].learner,
        shape,
        jax.tree.map(np.asarray, init_params(jax.random.key(0), shape)),
        total_steps=make_model.CALCULATE.steps,
        valid_vocab=tokenizer.vocab_size,
        devices=jax.devices()[:1],
    )
    plan = plan_training(configs[1])
    losses = [learner.update(plan.batch(step))["train/loss"] for step in (1, 2, 3)]
    assert losses == pytest.approx([6.0182424, 6.0341039, 5.9585609], rel=1e-5)


@pytest.mark.slow
def test_making_it_gives_the_committed_files_but_for_the_weights(tmp_path):
    stage = make_model.Stage(
        steps=3, rows=4, terse_fractions=(0.5, 0.5), learning_rate=1e-2, seed=5, dtype="bfloat16"
    )
    make_model.make(tmp_path / "made", [stage])
    made, committed = (
        {file.name: file.read_bytes() for file in folder.iterdir()}
        for folder in (tmp_path / "made", make_model.OUTPUT)
    )
    weights = [files.pop("model.safetensors") for files in (made, committed)]
    assert made == committed and len(weights[0]) == len(weights[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "opening, least, most",
    [
        pytest.param(lambda prompt: "", 0.15, 0.40, id="as it likes"),
        pytest.param(
            lambda prompt: prompt.item["metadata"]["expression"][0], 0.90, 1.0, id="worked"
        ),
        pytest.param(lambda prompt: "#### ", 0.0, 0.20, id="terse"),
    ],
)
def test_model_could_do_better_than_it_likes_to(prompt_sets, demo, opening, least, most):
    """Greedy accuracy on held-out problems, by transformers and by how the answer opens."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    backend = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    prompts = prompt_sets[1].prompts[:80]
    rows = [prompt.token_ids.tolist() + backend.encode(opening(prompt)) for prompt in prompts]
    batch = backend.pad({"input_ids": rows}, return_tensors="pt")
    completed = model.generate(
        **batch, do_sample=False, max_new_tokens=demo.rollout.max_completion_tokens
    )
    texts = backend.batch_decode(completed, skip_special_tokens=True)
    right = [
        re.findall(r"#### (-?\d+)$", text) == [prompt.answer]
        for text, prompt in zip(texts, prompts, strict=True)
    ]
    assert least <= np.mean(right) <= most
