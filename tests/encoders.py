"""Tiny text encoders as transformers and sentence-transformers leave them in a directory, for the tests."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = (
    "a list is changed in place and a tuple is not",
    "the loop ends when the name is bound to nothing",
    "every function returns a value, none where it says nothing",
    "an error is raised where a key is missing from the mapping",
    "names are looked up in the module, then among the built in ones",
    "a class may have many methods and each of them takes the object first",
    "text",
    "numbers are compared by value; objects by what they say of themselves",
)
VOCABULARY = 120
PAD = 3
"""Not the first row, so that a mask that is taken for ids of padding shows."""


def texts(count: int) -> list[str]:
    """Different texts of different lengths."""
    words = " ".join(TEXTS).split()
    return [" ".join(words[7 * place % 40 :][: 2 + 5 * place % 23]) for place in range(count)]


def write_tokenizer(path: Path) -> None:
    """A WordPiece tokenizer of these texts, whose marks are [CLS] and [SEP]."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    marks = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=marks, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.save(str(path))


def configuration(kind: str, **changes: Any) -> Any:
    """Of transformers, for 2 blocks of 4 heads of 8 and a hidden width of 64."""
    import transformers

    common = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "max_position_embeddings": 32, "initializer_range": 0.2}
    if kind == "distilbert":
        widths = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
        return transformers.DistilBertConfig(**{**common, **widths, **changes})
    widths = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    if kind == "electra":
        widths["embedding_size"] = 32
    return transformers.AutoConfig.for_model(kind, **{**common, **widths, **changes})


def theirs(kind: str, seed: int = 0, **changes: Any) -> Any:
    """The model of transformers with random weights, biases and norms among them."""
    import transformers

    torch.manual_seed(seed)
    built: Any = transformers.AutoModel.from_config(configuration(kind, **changes))  # type: ignore[no-untyped-call]
    model = built.eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


SENTENCE = ("Transformer", "Pooling", "Normalize")


def write_sentence_files(
    directory: Path, mode: str = "mean_tokens", *, kinds: tuple[str, ...] = SENTENCE, folder: str = "1_Pooling"
) -> None:
    """What sentence-transformers keeps beside an encoder; a text has 24 tokens."""
    paths = ("", folder, "2_Last")
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate(zip(paths, kinds, strict=False))
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    flags = {f"pooling_mode_{each}": each == mode for each in ("cls_token", "mean_tokens", "max_tokens")}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **flags}))
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 24}))


def write_encoder(directory: Path, kind: str = "bert", *, seed: int = 0, **changes: Any) -> Any:
    """A directory with weights, configuration, tokenizer, pooling and norm; returns the model of transformers."""
    model = theirs(kind, seed, **changes)
    model.save_pretrained(directory, safe_serialization=True)
    write_tokenizer(directory / "tokenizer.json")
    write_sentence_files(directory)
    return model
