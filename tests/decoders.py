"""Tiny decoders of transformers with random weights, a tokenizer of letters, and text that ships with Python."""

import pydoc_data.topics
from pathlib import Path
from typing import Any

import torch
from torch import nn

LETTERS, WIDTH, HIDDEN, LENGTH = 128, 64, 160, 64
_LLAMA = {
    "vocab_size": LETTERS, "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_OPT = {
    "vocab_size": LETTERS, "hidden_size": WIDTH, "ffn_dim": HIDDEN, "word_embed_proj_dim": WIDTH,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": LENGTH,
}  # fmt: skip
_GPT2 = {
    "vocab_size": LETTERS, "n_embd": WIDTH, "n_inner": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": LENGTH,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _LLAMA),
    "llama3": ("LlamaConfig", _LLAMA | {"rope_scaling": _SCALED, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", _LLAMA | {"head_dim": 16}),
    "qwen2": ("Qwen2Config", _LLAMA),
    "qwen3": ("Qwen3Config", _LLAMA | {"head_dim": 16}),
    "opt": ("OPTConfig", _OPT),
    "gpt2": ("GPT2Config", _GPT2),
}


def text(start: int = 0, letters: int = 30_000) -> str:
    """English of Python's own help, letters of ASCII alone."""
    every = "\n".join(pydoc_data.topics.topics[topic] for topic in sorted(pydoc_data.topics.topics))
    return "".join(letter for letter in every if ord(letter) < LETTERS)[start : start + letters]


def write_tokenizer(directory: Path) -> None:
    """Every letter is a token of its code."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {chr(code): code for code in range(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="\0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(directory / "tokenizer.json"))


def decoder(kind: str, **changes: Any) -> nn.Module:
    """A model of transformers, its norms and biases random, too."""
    import transformers

    config, own = KINDS[kind]
    causal: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model: nn.Module = causal.from_config(getattr(transformers, config)(**own | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def write_decoder(directory: Path, kind: str, model: nn.Module | None = None, **changes: Any) -> nn.Module:
    """A directory as save_pretrained leaves it, with its tokenizer."""
    own: Any = decoder(kind, **changes) if model is None else model
    own.save_pretrained(directory)
    write_tokenizer(directory)
    assert isinstance(own, nn.Module)
    return own


def ids(count: int, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    """Random sequences [count, length]."""
    return torch.randint(0, LETTERS, (count, length), generator=torch.Generator().manual_seed(seed))
