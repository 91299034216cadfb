"""Encoders of BERT's kind, held against those of transformers with the same random weights."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from corp_deploy.families.bert import MODEL_TYPES, EncoderArguments, architecture_from_transformers, architecture_of
from corp_deploy.families.family import dense_model
from corp_deploy.families.sentence_files import PooledBy, TextLength, pooled_by, text_length
from corp_deploy.families.text_encoder import EncoderArchitecture, TextEncoder
from corp_deploy.families.decoder_names import state_from_transformers
from corp_deploy.families.tokenizer import TextSpec, Tokenization, content_of_tokenizer
from corp_deploy.families.traced_model import exportable
from corp_deploy.traced.models.narrowing import at_widths
from export.graph.precision import typed_copy
from export.graph.to_onnx import onnx_from_model, save
from ground.errors import BadInput
from ground.files import sha256_of_text
from ground.ports import OutputPort, Port
from tests import encoders
from tests.graphs import built, needs_rtx, session_of
from tests.refusals import rejects

TOKENS = 12


def _ours(directory: Path, **changes: Any) -> TextEncoder:
    config = json.loads((directory / "config.json").read_text())
    architecture = architecture_from_transformers(config, where="config.json")
    model = TextEncoder(replace(architecture, **changes)).eval()
    loaded = load_file(directory / "model.safetensors")
    state, _ = state_from_transformers(loaded, model_type=config["model_type"], where="weights")
    model.load_state_dict(state)
    return model.requires_grad_(False)


def _batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Six texts of 1 to TOKENS random tokens, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([TOKENS, 1, 5, TOKENS - 1, 2, 8])
    mask = (torch.arange(TOKENS) < lengths[:, None]).long()
    ids = torch.randint(encoders.PAD + 1, encoders.VOCABULARY, mask.shape, generator=generator)
    return torch.where(mask == 1, ids, encoders.PAD), mask


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_tokens_and_embeddings_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs = encoders.write_encoder(tmp_path, kind)
    ids, mask = _batch()
    expected = theirs(input_ids=ids, attention_mask=mask).last_hidden_state
    ours = _ours(tmp_path)
    got = ours.tokens(ids, mask)
    torch.testing.assert_close(got[mask == 1], expected[mask == 1], rtol=1e-5, atol=1e-5)
    mean = (expected * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    torch.testing.assert_close(ours(ids, mask), mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(_ours(tmp_path, normalize=True)(ids, mask), F.normalize(mean), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(_ours(tmp_path, pooling="first")(ids, mask), expected[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "prefix"), [("bert", "bert."), ("xlm-roberta", "roberta."), ("distilbert", "distilbert.")]
)
def test_a_prefix_is_taken_off_and_heads_are_named(kind: str, prefix: str, tmp_path: Path) -> None:
    encoders.write_encoder(tmp_path, kind)
    bare = load_file(tmp_path / "model.safetensors")
    expected, beside = state_from_transformers(bare, kind, where="weights")
    inside = {prefix + name: value for name, value in bare.items()} | {"lm_head.bias": torch.zeros(3)}
    inside[f"{prefix}embeddings.position_ids"] = torch.arange(32)[None]
    got, others = state_from_transformers(inside, kind, where="weights")
    assert got.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in got.items())
    assert set(others) == {"lm_head.bias", *(prefix + name for name in beside)}


def test_what_padding_holds_changes_nothing(tmp_path: Path) -> None:
    encoders.write_encoder(tmp_path)
    model, (ids, mask) = _ours(tmp_path), _batch()
    other = torch.where(mask == 1, ids, encoders.VOCABULARY - 1)
    assert torch.equal(model(ids, mask), model(other, mask))
    assert not torch.equal(model(ids, mask), model(ids, torch.ones_like(mask)))
    short = ids[2:3, :5]
    torch.testing.assert_close(model(ids, mask)[2:3], model(short, torch.ones_like(short)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_half_precision_says_the_same_and_stays_finite(pooling: str, tmp_path: Path) -> None:
    encoders.write_encoder(tmp_path)
    model, (ids, mask) = _ours(tmp_path, pooling=pooling, normalize=True), _batch()
    mask[1] = 0  # a text without any token, of which nothing is known but that it says something finite
    expected = model(ids, mask)
    some = mask.any(dim=1)
    fp16 = typed_copy(model, "fp16")(ids, mask)
    assert fp16.dtype == torch.float32
    assert torch.isfinite(fp16).all()
    torch.testing.assert_close(fp16[some], expected[some], rtol=0.0, atol=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mpnet"}, "model_type is 'mpnet', expected one of bert, roberta"),
        ({"model_type": None}, "model_type is None"),
        ({"position_embedding_type": "alibi"}, "position embeddings are 'alibi'"),
        ({"auto_map": {"AutoModel": "modeling.Own"}}, "code of its own"),
        ({"is_decoder": True}, "a decoder"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"pruned_heads": {"0": [1]}}, "heads are removed already"),
        ({"embedding_size": 16}, "embeddings are 16 wide"),
        ({"hidden_act": "mish"}, "activation is 'mish'"),
        ({"hidden_size": "wide"}, r"\$.hidden_size"),
        ({"hidden_size": 10**9}, r"\$.hidden_size"),
        ({"num_attention_heads": 5}, "no multiple of 5 heads"),
        ({"num_hidden_layers": 0}, r"\$.num_hidden_layers"),
        ({"layer_norm_eps": 0.0}, "eps"),
        ({"vocab_size": None}, r"\$.vocab_size"),
    ],
)
def test_other_configurations_are_refused_with_the_reason(changes: dict[str, Any], message: str) -> None:
    config = {**encoders.configuration("bert").to_dict(), **changes}
    rejects(message, architecture_from_transformers, config, where="config.json")


def test_distilbert_is_refused_by_its_own_names() -> None:
    config = {**encoders.configuration("distilbert").to_dict(), "n_heads": 0}
    rejects(r"\$.n_heads", architecture_from_transformers, config, where="config.json")


def test_tensors_without_a_place_and_incomplete_projections_are_refused(tmp_path: Path) -> None:
    encoders.write_encoder(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    name = "encoder.layer.0.attention.self.key.bias"
    with pytest.raises(BadInput, match=r"block 0: expected attention\.self\.query"):
        state_from_transformers({key: state[key] for key in state if key != name}, "bert", where="weights")
    odd = {**state, "encoder.layer.0.crossattention.self.key.bias": state[name]}
    rejects("crossattention", state_from_transformers, odd, "bert", where="weights")
    twice = {**state, f"bert.{name}": state[name]}
    rejects(r"with and without 'bert\.'", state_from_transformers, twice, "bert", where="weights")


def _spec(directory: Path, length: int = 10, vocabulary: int = encoders.VOCABULARY, **changes: Any) -> TextSpec:
    content = content_of_tokenizer(directory)
    tokenization = Tokenization(length=length, pad_id=encoders.PAD, sha256=sha256_of_text(content), **changes)
    return TextSpec(tokenization=tokenization, tokenizer_json=content, vocabulary=vocabulary)


def test_texts_become_ids_of_one_length_with_their_mask(tmp_path: Path) -> None:
    encoders.write_tokenizer(tmp_path / "tokenizer.json")
    tokens = _spec(tmp_path).encoder()(["a list", "", " ".join(encoders.TEXTS)])
    assert list(tokens) == ["input_ids", "attention_mask"]
    ids, mask = tokens.values()
    assert ids.shape == mask.shape == (3, 10)
    assert ids.dtype == mask.dtype == torch.int64
    assert mask.sum(dim=1).tolist()[1:] == [2, 10]
    assert ids[1].tolist() == [1, 2, *[encoders.PAD] * 8]
    assert bool((ids[:, 0] == 1).all())
    assert int(ids[2, -1]) == 2
    assert bool((ids[mask == 0] == encoders.PAD).all())


def test_texts_are_lower_cased_where_the_encoder_was_trained_so(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    encoders.write_tokenizer(path)
    content = json.loads(path.read_text())
    content["normalizer"] = None
    path.write_text(json.dumps(content))
    cased, lower = _spec(tmp_path).encoder(), _spec(tmp_path, lower_case=True).encoder()
    assert torch.equal(lower(["A LIST"])["input_ids"], cased(["a list"])["input_ids"])
    assert not torch.equal(cased(["A LIST"])["input_ids"], cased(["a list"])["input_ids"])


def test_a_tokenizer_that_does_not_belong_is_refused(tmp_path: Path) -> None:
    rejects("no such file", content_of_tokenizer, tmp_path)
    encoders.write_tokenizer(tmp_path / "tokenizer.json")
    rejects(r"sha256 .*, expected 0000", content_of_tokenizer, tmp_path, sha256="0" * 64)
    rejects("the model knows 50", _spec(tmp_path, vocabulary=50).encoder)
    rejects("2 marks of start and end", _spec(tmp_path, length=2).encoder)
    (tmp_path / "tokenizer.json").write_text("{}")
    rejects("not a tokenizer", _spec(tmp_path).encoder)


def test_pooling_and_length_are_read_of_what_stands_beside(tmp_path: Path) -> None:
    assert pooled_by(tmp_path) is None
    assert text_length(tmp_path, 32) == TextLength(tokens=32, lower_case=False)
    encoders.write_sentence_files(tmp_path)
    assert pooled_by(tmp_path) == PooledBy(pooling="mean", normalize=True)
    assert text_length(tmp_path, 32) == TextLength(tokens=24, lower_case=False)
    assert text_length(tmp_path, 20) == TextLength(tokens=20, lower_case=False)
    encoders.write_sentence_files(tmp_path, "cls_token", kinds=("Transformer", "Pooling"))
    assert pooled_by(tmp_path) == PooledBy(pooling="first", normalize=False)
    (tmp_path / "sentence_bert_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert text_length(tmp_path, 32).tokens == 32
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 16}')
    assert text_length(tmp_path, 32).tokens == 16


def test_modules_that_are_not_built_are_refused(tmp_path: Path) -> None:
    encoders.write_sentence_files(tmp_path, "max_tokens")
    rejects("pooling by max_tokens; expected the mean", pooled_by, tmp_path)
    encoders.write_sentence_files(tmp_path, kinds=("Transformer", "Pooling", "Dense"))
    rejects("Transformer, Pooling, Dense; expected", pooled_by, tmp_path)
    encoders.write_sentence_files(tmp_path, folder="../elsewhere")
    rejects("in a folder there", pooled_by, tmp_path)
    (tmp_path / "modules.json").write_text("{}")
    rejects(r"modules\.json: got an object, expected a list", pooled_by, tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": "long"}')
    rejects("max_seq_length", text_length, tmp_path, 32)


def test_impossible_architectures_are_refused() -> None:
    widths = {"vocabulary": 9, "width": 8, "heads": 2, "hidden": 4, "layers": 1}
    with pytest.raises(ValueError, match="2 positions, of which the first 2"):
        EncoderArchitecture(positions=2, first_position=2, **widths)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activation 'mish'"):
        EncoderArchitecture(positions=2, activation="mish", **widths)  # type: ignore[arg-type]


# As ONNX and as an engine: the embeddings of torch, attention fused under its mask


LENGTH, VOCABULARY = 16, 120
INPUTS = [Port(name=name, shape=(LENGTH,), dtype="int64") for name in ("input_ids", "attention_mask")]
OUTPUTS = [OutputPort(name="embedding", role="embedding")]


def encoder(*, normalize: bool = True, qk: int = 64) -> nn.Module:
    """Two blocks with random weights, queries and keys so wide in all, in the form that is exported."""
    torch.manual_seed(0)
    architecture = EncoderArchitecture(
        vocabulary=VOCABULARY, positions=32, token_types=2, width=64, heads=2, hidden=128, layers=2, normalize=normalize
    )
    text = Tokenization(length=LENGTH, sha256="0" * 64)
    dense = dense_model(architecture_of("bert", EncoderArguments(encoder=architecture, text=text)))
    dense.requires_grad_(False)
    return exportable(at_widths(dense, {f"blocks.{block}.attn.qk": qk for block in (0, 1)}) if qk < 64 else dense)


def padded_texts(count: int) -> dict[str, NDArray[np.int64]]:
    rng = np.random.default_rng(count)
    mask = (np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (count, 1))).astype(np.int64)
    return {"input_ids": rng.integers(0, VOCABULARY, (count, LENGTH)), "attention_mask": mask}


@pytest.mark.slow("graph")
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("fp16", 5e-3)])
def test_embeddings_are_torchs_whatever_stands_in_the_padding(tmp_path: Path, precision: str, bound: float) -> None:
    model = encoder(normalize=precision == "fp32", qk=32)
    path = tmp_path / "encoder.onnx"
    save(onnx_from_model(model, INPUTS, OUTPUTS, precision=precision, metadata={}), path)
    session = session_of(path)
    for count in (1, 5):
        feed = padded_texts(count)
        with torch.no_grad():
            exact = copy.deepcopy(model).double()(*(torch.from_numpy(array) for array in feed.values())).numpy()
        (embedding,) = session.run(None, feed)
        assert np.linalg.norm(embedding - exact) < bound * np.linalg.norm(exact)
        other = {**feed, "input_ids": np.where(feed["attention_mask"] == 1, feed["input_ids"], 7)}
        np.testing.assert_allclose(session.run(None, other)[0], embedding, rtol=0, atol=bound)


@pytest.mark.slow("graph", "engine")
@needs_rtx
@pytest.mark.parametrize("qk", [64, 32])
def test_attention_stays_one_kernel_under_its_mask(qk: int, tmp_path: Path) -> None:
    path = tmp_path / "encoder.onnx"
    save(onnx_from_model(encoder(qk=qk), INPUTS, OUTPUTS, precision="fp16", metadata={}), path)
    record = built(path, "1:8:16")
    assert record.attention_sites == record.fused_attention_sites == ("blocks.0.attn", "blocks.1.attn")
    assert [port.name for port in record.inputs] == [port.name for port in INPUTS]
