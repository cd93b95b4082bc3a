"""Prints what the installed transformers reads of model folders, a line of JSON for each.

    python tests/learner/exported_model.py FOLDER ...

Imports nothing of ours, so that it runs in an environment that has another transformers.
"""

import hashlib
import json
import pathlib
import sys

import torch
import transformers

TEXTS = (
    "hi 12, <tool>x</tool>",
    "<s>user:4 - 2 =</s><think> no\n",
    "\u00e9t\u00e9 \U0001f642",
)
MESSAGES = [{"role": "user", "content": "4 + 7?"}]


def read(folder: str) -> dict:
    """Ids of texts, special tokens, generation settings, and weights with what they compute."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    written = json.loads((pathlib.Path(folder) / "generation_config.json").read_text())
    generation = transformers.GenerationConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    with torch.no_grad():
        logits = model(torch.tensor([ids[0]])).logits.float()
    chat = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    return {
        "version": int(transformers.__version__.partition(".")[0]),
        "ids": ids,
        "chat": chat,
        "chat_ids": tokenizer.encode(chat, add_special_tokens=False),
        "shown": tokenizer.decode(ids[0], skip_special_tokens=True),
        "eos": [tokenizer.eos_token_id, tokenizer.pad_token_id],
        "generation": {key: getattr(generation, key, None) for key in written},
        "dtype": str(model.dtype),
        "weights": digest.hexdigest(),
        "logits": [round(float(value), 3) for value in logits[0, -1, :8]],
    }


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for folder in sys.argv[1:]:
        print(json.dumps(read(folder)))
