"""Completes one prompt with a model and streams the text, to inspect a checkpoint.

    python -m rollout_worker.generate --model deploy/demo/model --prompt 'Compute 3 + 4.'
    echo 'Once upon a time' | python -m rollout_worker.generate --model MODEL --prompt - --raw

The text goes to stdout as it is decoded; several completions are printed one after the other.
Their finish reasons and the speed go to stderr. Exits with 2 if an argument is wrong, with 130 if
interrupted.
"""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from kernels.choose import XLA
from kernels.packed_attention.ops import plan_attention
from models.config import ModelConfig
from models.files.checkpoint import load_model, read_model_config
from models.load_tokenizer import load_tokenizer
from models.tokenizer import Tokenizer
from rollout_worker.engine.decode_request import DecodeRequest, FinishedRow, SamplingSettings
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.engine_limits import EngineLimits
from rollout_worker.engine.layout import Layout, make_mesh
from rollout_worker.engine.slots import DecodeSpec
from rollout_worker.engine.stop_strings import build_stop_automaton, token_bytes
from services.process.phase_clock import PhaseClock
from services.process.terminal_text import protect_terminal
from services.wire.messages import FinishReason

RAW_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The text of the messages and nothing else."""
SEGMENT_TOKENS = 8
"""Tokens by which the printed text grows at a time."""
MOST_SAMPLES = 1024
MOST_NEW_TOKENS = 512
"""Default of --max-new-tokens, if the model's positions allow it."""
REPLACEMENT = "\ufffd"
LONGEST_CHARACTER_BYTES = 4
DTYPES = ("bfloat16", "float32")
REQUEST = "prompt"
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return _generate(arguments)
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader has closed the pipe; Python flushes stdout at its end, which must not fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"generate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("generate: interrupted", file=sys.stderr)
        return INTERRUPTED


def _generate(arguments: argparse.Namespace) -> int:
    settings = SamplingSettings(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
    )
    _check(arguments)
    config = read_model_config(arguments.model)
    tokenizer = load_tokenizer(
        arguments.model, chat_template=RAW_TEMPLATE if arguments.raw else None
    )
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    for name, given in (("--prompt", text), ("--system", arguments.system or "")):
        if any("\ud800" <= character <= "\udfff" for character in given):
            raise ValueError(f"{name} is not UTF-8 text")
    if arguments.system is not None:
        tokenizer.template.check_system_prompt(arguments.system)
    messages = _messages(arguments.system, text)
    token_ids = np.asarray(
        tokenizer.encode_chat(messages, content_is_text=not arguments.raw), np.int32
    )
    new_tokens = _new_tokens(arguments.max_new_tokens, len(token_ids), config)
    engine = build_engine(
        config,
        tokenizer,
        prompt_tokens=len(token_ids),
        new_tokens=new_tokens,
        samples=arguments.samples,
        stop_strings=arguments.stop,
        dtype=arguments.dtype,
    )
    engine.swap_policy(engine.spec.layout.to_inference(load_model(arguments.model).params), 0)
    request = DecodeRequest(
        request_id=REQUEST,
        token_ids=token_ids,
        prompt_id=0,
        epoch=0,
        samples=tuple(range(arguments.samples)),
        max_new_tokens=new_tokens,
        key_data=np.asarray(jax.random.key_data(jax.random.key(arguments.seed))),
        sampling=settings,
    )
    printer = Printer(sys.stdout, tokenizer.decode_completion, several=arguments.samples > 1)
    try:
        stream_completions(engine, request, printer)
    finally:
        printer.close()
        print(printer.summary(), file=sys.stderr)
    return 0


def build_engine(
    config: ModelConfig,
    tokenizer: Tokenizer,
    *,
    prompt_tokens: int,
    new_tokens: int,
    samples: int,
    stop_strings: Sequence[str],
    dtype: str,
) -> Engine:
    """An engine on one device for one prompt; it has no policy yet.

    Args:
        dtype: of weights and activations.

    Raises:
        ValueError: if the lengths do not fit the model, or the tokenizer or number of stop strings
            is not supported.
    """
    device = jax.devices()[0]
    layout = Layout(config, make_mesh([device], 1, 1), np.dtype(jnp.dtype(dtype)))
    spec = DecodeSpec(
        layout=layout,
        valid_vocab=min(tokenizer.vocab_size, config.vocab_size),
        compute_dtype=jnp.dtype(dtype),
        attention_dtype=jnp.dtype(dtype),
        attention_impl=XLA,
        prefill_attention=plan_attention("auto", device.platform),
        slots=samples,
        segment_tokens=SEGMENT_TOKENS,
        wide_cache=device.platform == "cpu",
    )
    limits = EngineLimits(
        max_prompt_tokens=prompt_tokens,
        max_new_tokens=new_tokens,
        cache_tokens=prompt_tokens + new_tokens,
        prefixes=1,
        stop_ids=len(tokenizer.stop_ids),
    )
    stops = None
    if stop_strings:
        stops = build_stop_automaton(token_bytes(tokenizer), [tuple(stop_strings)])
    return Engine(
        spec,
        limits,
        loop="while",
        stop_ids=tuple(sorted(tokenizer.stop_ids)),
        clock=PhaseClock(),
        stops=stops,
    )


class Printer:
    """Writes the completions of a request one after the other, as their tokens arrive."""

    def __init__(self, out: TextIO, decode: Callable[[np.ndarray], str], *, several: bool):
        """Args:
        decode: text of token ids.
        several: whether each completion gets a heading.
        """
        self._out = out
        self._decode = decode
        self._several = several
        self._sample = 0
        self._written = ""
        self._known: dict[int, np.ndarray] = {}
        self._ended: dict[int, FinishReason] = {}
        self._started = time.monotonic()
        self._first: tuple[float, int] | None = None
        """Time of the first tokens, and their count."""

    def show_tokens(self, running: dict[int, np.ndarray], ended: Sequence[FinishedRow]) -> None:
        """Writes the new text of the completion whose turn it is, and of those after it.

        Args:
            running: tokens of completions that have not ended, by sample index.
            ended: completions that ended in this turn of the engine.
        """
        self._known |= running
        for row in ended:
            self._known[row.sample_index] = row.token_ids
            self._ended[row.sample_index] = row.finish_reason
        if self._first is None and self._tokens:
            self._first = time.monotonic(), self._tokens
        while self._sample in self._known:
            self._write()
            if self._sample not in self._ended:
                break
            self._sample, self._written = self._sample + 1, ""
        self._out.flush()

    def close(self) -> None:
        """Writes the tokens so far of completions that were interrupted."""
        while self._sample in self._known:
            self._write()
            if self._written and self._sample not in self._ended:
                self._out.write("\n")
            self._sample, self._written = self._sample + 1, ""
        self._out.flush()

    def summary(self) -> str:
        """The finish reasons of the completions, and the speed."""
        reasons = [
            self._ended[sample].value if sample in self._ended else "unfinished"
            for sample in sorted(self._known)
        ]
        text = f"{', '.join(reasons) or 'nothing'}: {self._tokens} tokens"
        now = time.monotonic()
        if self._first is None:
            return text
        first, known_then = self._first
        text += f", the first after {first - self._started:.1f} s (compiling included)"
        if self._tokens > known_then:
            text += f", then {(self._tokens - known_then) / (now - first):.1f} tokens/s"
        return text

    @property
    def _tokens(self) -> int:
        return sum(map(len, self._known.values()))

    def _write(self) -> None:
        """Writes the new text of the completion whose turn it is."""
        token_ids, is_whole = self._known[self._sample], self._sample in self._ended
        if self._several and not self._written and len(token_ids):
            self._out.write(f"--- completion {self._sample} ---\n")
        text = self._decode(token_ids)
        if not is_whole:
            text = settled(text)
        # A decoder may revise the text of the last token; text that was written stays.
        if len(text) > len(self._written):
            self._out.write(text[len(self._written) :])
            self._written = text
        if is_whole:
            self._out.write("\n")


def settled(text: str) -> str:
    """The text without the beginning of a character whose other bytes are in later tokens."""
    kept = text.rstrip(REPLACEMENT)
    if len(text) - len(kept) >= LONGEST_CHARACTER_BYTES:
        return text[: -(LONGEST_CHARACTER_BYTES - 1)]
    return kept


def stream_completions(engine: Engine, request: DecodeRequest, printer: Printer) -> None:
    """Decodes a request and prints its completions as they grow."""
    engine.submit_requests([request])
    while engine.pending:
        ended = engine.step()
        printer.show_tokens(engine.tokens_so_far(request.request_id), ended)


def _messages(system: str | None, text: str) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def _check(arguments: argparse.Namespace) -> None:
    if not 1 <= arguments.samples <= MOST_SAMPLES:
        raise ValueError(f"--samples must be from 1 to {MOST_SAMPLES}, got {arguments.samples}")
    if arguments.raw and arguments.system is not None:
        raise ValueError("--system needs the chat template, which --raw leaves out")
    if not 0 <= arguments.seed < 2**63:
        raise ValueError(f"--seed must be from 0 to 2**63 - 1, got {arguments.seed}")


def _new_tokens(asked: int | None, prompt_tokens: int, config: ModelConfig) -> int:
    room = config.max_position_embeddings - prompt_tokens
    if prompt_tokens < 1 or room < 1:
        raise ValueError(
            f"the prompt has {prompt_tokens} tokens; at least 1 is needed, and fewer than the "
            f"model's {config.max_position_embeddings} positions"
        )
    if asked is None:
        return min(MOST_NEW_TOKENS, room)
    if not 1 <= asked <= room:
        raise ValueError(
            f"--max-new-tokens must be from 1 to {room}: the model has "
            f"{config.max_position_embeddings} positions and the prompt {prompt_tokens} tokens; "
            f"got {asked}"
        )
    return asked


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rollout_worker.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    settings: dict[str, Any] = {
        field.name: field.default for field in dataclasses.fields(SamplingSettings)
    }
    add = parser.add_argument
    add("--model", required=True, metavar="PATH", help="HF folder, .gguf file or hub id")
    add("--prompt", required=True, metavar="TEXT", help="text of the user message; - reads stdin")
    add("--system", metavar="TEXT", help="system message before it")
    add(
        "--raw",
        action="store_true",
        help="complete the text as it is, without the chat template; special tokens in it count",
    )
    add("--max-new-tokens", type=int, metavar="N", help=f"(default: {MOST_NEW_TOKENS} or less)")
    add("--temperature", type=float, default=settings["temperature"], help="(%(default)s)")
    add("--top-k", type=int, default=settings["top_k"], help="0 is off (%(default)s)")
    add("--top-p", type=float, default=settings["top_p"], help="1 is off (%(default)s)")
    add("--min-p", type=float, default=settings["min_p"], help="0 is off (%(default)s)")
    add("--seed", type=int, default=0, help="of the draws (%(default)s)")
    add("--samples", type=int, default=1, metavar="N", help="completions (%(default)s)")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="STRING",
        help="text that ends a completion, which keeps it and the whole token that completes it; "
        "can be given several times",
    )
    add("--dtype", choices=DTYPES, default="bfloat16", help="of weights and sums (%(default)s)")
    return parser


if __name__ == "__main__":
    if sys.stdout.isatty():  # a file or a pipe gets what the model wrote
        protect_terminal()
    sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    code = main()
    sys.stdout.flush()
    if code == INTERRUPTED:
        # A thread of XLA may still be compiling; an ordinary exit of the interpreter would crash.
        os._exit(code)
    sys.exit(code)
