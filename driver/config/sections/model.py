"""The section `model`: which weights to start from."""

from services.process.config_section import Section


class ModelSection(Section):
    """Which weights to start from."""

    path: str
    """HF folder, .gguf file, or HF hub id."""
    tokenizer: str | None = None
    """Folder or hub id of another tokenizer; null takes the model's own."""
    chat_template: str | None = None
    """A Jinja template that replaces the tokenizer's; needed where it has none. It must show the
    system prompt and the question, and open the assistant's turn. The time that it reads is that of
    the run's first start."""
    stop_tokens: tuple[str, ...] = ()
    """Further stop tokens, beside those of tokenizer and generation config."""
