"""`generate` of Hugging Face transformers with the same weights, on the CPU by torch."""

import pathlib
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.decode.engine_passes import Bench

DTYPES = ("float32", "bfloat16")


class HfModel:
    """One model of transformers in one dtype."""

    def __init__(self, folder: pathlib.Path, dtype: str):
        import torch
        import transformers

        self._torch = torch
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=getattr(torch, dtype)
        )
        self._model = model.eval()
        # Nothing but the number of tokens ends a completion, as in the engine's requests.
        self._model.generation_config.eos_token_id = None

    def generate(self, prompt_BT: np.ndarray, new_tokens: int) -> tuple[float, np.ndarray]:
        """Seconds and int64 [B, new_tokens] of greedy decoding with a KV cache."""
        ids = self._torch.from_numpy(prompt_BT.astype(np.int64))
        started = time.perf_counter()
        with self._torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                pad_token_id=0,
                use_cache=True,
            )
        seconds = time.perf_counter() - started
        return seconds, out[:, prompt_BT.shape[1] :].numpy()


def compare_with_hf(
    bench: Bench, folder: pathlib.Path, prompt_QT: np.ndarray, new_tokens: int, repeat: int
) -> dict[str, Any]:
    """Decodes one batch greedily by the engine and by transformers, in turn.

    Args:
        folder: the weights of the engine.
        prompt_QT: one prompt for each slot.

    Returns:
        Milliseconds per token of the whole batch, prefill included, and the engine's speed over
        that of the faster dtype of transformers.
    """
    models = {dtype: HfModel(folder, dtype) for dtype in DTYPES}
    requests = bench.requests(prompt_QT, [new_tokens] * len(prompt_QT), temperature=0.0)
    bench.run(requests)
    for model in models.values():
        model.generate(prompt_QT, 2)
    ours: list[float] = []
    theirs: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    tokens: dict[str, np.ndarray] = {}
    rows = []
    for _ in range(repeat):
        one = bench.run(requests)
        ours.append(one.seconds)
        rows = one.rows
        for dtype, model in models.items():
            seconds, tokens[dtype] = model.generate(prompt_QT, new_tokens)
            theirs[dtype].append(seconds)
    drawn = {int(row.request_id): row.token_ids for row in rows}
    ours_BT = np.stack([drawn[place] for place in range(len(prompt_QT))])
    medians = {dtype: statistics.median(seconds) for dtype, seconds in theirs.items()}
    best = min(medians, key=lambda dtype: medians[dtype])
    per_token = lambda seconds: 1e3 * seconds / new_tokens
    return {
        "ours_ms": per_token(statistics.median(ours)),
        **{f"hf_{dtype}_ms": per_token(seconds) for dtype, seconds in medians.items()},
        "best": best,
        "ratio": medians[best] / statistics.median(ours),
        "same_tokens": {
            dtype: float(np.mean(ours_BT == theirs_BT)) for dtype, theirs_BT in tokens.items()
        },
    }
