"""The command that completes one prompt."""

import io

import numpy as np
import pytest

from rollout_worker import generate
from rollout_worker.engine.decode_request import FinishedRow
from rollout_worker.generate import Printer, settled
from services.wire.messages import FinishReason
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("programs_compiled_once")]


def decode(token_ids):
    """Each id is a byte."""
    return bytes(int(token_id) for token_id in token_ids).decode("utf-8", errors="replace")


def finished(sample, text, reason=FinishReason.STOP):
    token_ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return FinishedRow(
        request_id=generate.REQUEST,
        sample_index=sample,
        token_ids=token_ids,
        logprobs=np.zeros(len(token_ids), np.float32),
        versions=np.zeros(len(token_ids), np.int32),
        finish_reason=reason,
    )


def running(text):
    return np.frombuffer(text, np.uint8).astype(np.int32)


@pytest.mark.parametrize("character", ["é", "あ", "🙂"])
def test_a_character_is_written_when_its_last_byte_is_there(character):
    out = io.StringIO()
    printer = Printer(out, decode, several=False)
    whole = f"a{character}b".encode()
    for size in range(1, len(character.encode()) + 1):
        printer.show_tokens({0: running(whole[:size])}, [])
        assert out.getvalue() == "a"
    printer.show_tokens({0: running(whole[:-1])}, [])
    assert out.getvalue() == f"a{character}"
    printer.show_tokens({}, [finished(0, f"a{character}b")])
    assert out.getvalue() == f"a{character}b\n"


def test_bytes_that_never_become_a_character_are_not_held_back_for_ever():
    assert settled("x" + 6 * "\ufffd") == "x" + 3 * "\ufffd"


def test_completions_come_one_after_the_other_in_their_order():
    out = io.StringIO()
    printer = Printer(out, decode, several=True)
    printer.show_tokens({0: running(b"fir"), 1: running(b"second"), 2: running(b"")}, [])
    assert out.getvalue() == "--- completion 0 ---\nfir"
    printer.show_tokens({0: running(b"first")}, [finished(2, "third")])
    assert out.getvalue() == "--- completion 0 ---\nfirst"
    printer.show_tokens({1: running(b"second o")}, [finished(0, "first one")])
    assert out.getvalue() == "--- completion 0 ---\nfirst one\n--- completion 1 ---\nsecond o"
    printer.show_tokens({}, [finished(1, "second one", FinishReason.LENGTH)])
    assert out.getvalue().endswith("second one\n--- completion 2 ---\nthird\n")
    assert printer.summary().startswith("stop, length, stop: 24 tokens")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("generate") / "model"))


def complete(capsys, tiny, *more):
    """Exit status, text and what was said of a greedy completion of 24 tokens."""
    common = ["--model", tiny, "--prompt", "ab", "--temperature", "0", "--dtype", "float32"]
    status = generate.main([*common, "--max-new-tokens", "24", *more])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_completion_ends_by_its_length_or_at_its_stop_string(capsys, tiny):
    status, whole, said = complete(capsys, tiny)
    assert (status, said.startswith("length: 24 tokens")) == (0, True)
    stop = next(character for character in whole if character.isascii())
    status, text, said = complete(capsys, tiny, "--stop", "never said", "--stop", stop)
    # The string stays, and so does what its token has after it: nothing, for a token is a byte.
    assert text.removesuffix("\n") == whole[: whole.index(stop) + 1]
    assert (status, said.startswith("stop: ")) == (0, True)


def test_a_raw_prompt_is_the_text_alone(capsys, tiny, monkeypatch):
    seen = []
    monkeypatch.setattr(
        generate, "stream_completions", lambda engine, request, _: seen.append(request)
    )
    assert complete(capsys, tiny, "--raw")[0] == 0
    tokenizer = generate.load_tokenizer(tiny)
    assert tokenizer.decode(seen[0].token_ids) == "ab"


def test_an_interruption_is_reported_and_ends_with_130(capsys, tiny, monkeypatch):
    def interrupted(engine, request, printer):
        printer.show_tokens({0: running(b"@AB")}, [])
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "stream_completions", interrupted)
    tokenizer = generate.load_tokenizer(tiny)
    status, text, said = complete(capsys, tiny)
    assert (status, text) == (130, tokenizer.decode([64, 65, 66]) + "\n")
    assert said.splitlines()[0].startswith("unfinished: 3 tokens")
    assert said.splitlines()[1] == "generate: interrupted"


@pytest.mark.parametrize(
    "more, part",
    [
        (["--top-p", "0"], "top_p must be at least"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be from 1 to 2"),
        (["--samples", "0"], "--samples must be from 1 to 1024, got 0"),
        (["--raw", "--system", "s"], "--system needs the chat template"),
        (["--stop", ""], "a stop string must not be empty"),
        (["--prompt", 300 * "a"], "model's 256 positions"),
        (["--seed", str(2**70)], "--seed must be from 0"),
        (["--top-k", str(2**31)], "top_k must be a whole number"),
        (["--prompt", "a\udcff"], "--prompt is not UTF-8 text"),
        (["--seed", "-1"], "--seed must be from 0"),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_a_wrong_question_is_refused_in_one_line(capsys, tiny, more, part):
    status, text, said = complete(capsys, tiny, *more)
    assert (status, text) == (2, "")
    assert part in said and said.startswith("generate: ") and said.count("\n") == 1
