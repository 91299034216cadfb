"""Text encoders of transformers: their embeddings, tokenizers, pooling, graphs and engines."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from calib.inputs import run_model
from corp_deploy.families.family import sites_of, text_spec
from corp_deploy.families.sentence_files import PooledBy, TextLength, pooled_by, text_length
from corp_deploy.families.tokenizer import TextSpec, Tokenization, content_of_tokenizer
from corp_deploy.families.traced_model import exportable
from corp_deploy.store.transformers_directory import SENTENCE_KINDS, load_transformers
from corp_deploy.traced.models.narrowed_model import at_widths
from export.graph.precision import typed_copy
from export.graph.to_onnx import onnx_from_model, save_onnx
from ground.errors import Missing
from ground.files import sha256_of_text
from ground.ports import OutputPort, Port
from tests import encoders
from tests.graphs import built, needs_rtx, session_of
from tests.refusals import rejects

pytest.importorskip("transformers", reason="transformers is not installed, so that there are no models of it")


@pytest.mark.parametrize("kind", SENTENCE_KINDS)
def test_embeddings_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs = encoders.write_encoder(tmp_path, kind)
    for pooling, normalize in (("mean", True), ("first", False)):
        ours = load_transformers(tmp_path, {"pooling": pooling, "normalize": normalize}).model
        tokens = text_spec(ours).encoder()(encoders.texts(6))
        last_BNC, mask_BN1 = theirs(**tokens).last_hidden_state, tokens["attention_mask"].unsqueeze(-1)
        mean_BC = (last_BNC * mask_BN1).sum(1) / mask_BN1.sum(1)
        expected_BC = F.normalize(mean_BC) if normalize else last_BNC[:, 0]
        torch.testing.assert_close(run_model(ours, tokens), expected_BC, rtol=1e-5, atol=1e-5)


def test_padding_changes_nothing_in_fp32_and_fp16(tmp_path: Path) -> None:
    encoders.write_encoder(tmp_path, hidden_act="mish")
    model = load_transformers(tmp_path).model
    ids, mask = text_spec(model).encoder()(encoders.texts(6)).values()
    other = torch.where(mask == 1, ids, encoders.VOCABULARY - 1)
    expected = model(ids, mask)
    torch.testing.assert_close(model(other, mask), expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(model(ids, torch.ones_like(mask)), expected, atol=1e-3)
    fp16 = typed_copy(exportable(model), "fp16")(ids, mask)
    assert fp16.dtype == torch.float32
    torch.testing.assert_close(fp16, expected, rtol=0.0, atol=0.01)


def test_text_classifier_gives_logits_or_pooled_embeddings(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    theirs: Any = transformers.BertForSequenceClassification(encoders.configuration("bert", num_labels=5))
    theirs.eval()
    theirs.save_pretrained(tmp_path)
    encoders.write_tokenizer(tmp_path / "tokenizer.json")
    ours = load_transformers(tmp_path).model
    tokens = text_spec(ours).encoder()(encoders.texts(3))
    torch.testing.assert_close(run_model(ours, tokens), theirs(**tokens).logits, rtol=1e-5, atol=1e-5)
    pooled = load_transformers(tmp_path, {"pooling": "first"}).model
    expected = theirs.bert(**tokens).last_hidden_state[:, 0]
    torch.testing.assert_close(run_model(pooled, tokens), expected, rtol=1e-5, atol=1e-5)


def test_missing_transformers_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoders.write_encoder(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Missing, match=r"pip install 'corp-deploy\[hf\]'"):
        load_transformers(tmp_path)


def spec_of(directory: Path, length: int = 10, vocabulary: int = encoders.VOCABULARY, **changes: Any) -> TextSpec:
    content = content_of_tokenizer(directory)
    tokenization = Tokenization(length=length, pad_id=encoders.PAD, sha256=sha256_of_text(content), **changes)
    return TextSpec(tokenization=tokenization, tokenizer_json=content, vocabulary=vocabulary)


def test_texts_become_ids_of_equal_length_with_a_mask(tmp_path: Path) -> None:
    encoders.write_tokenizer(tmp_path / "tokenizer.json")
    tokens = spec_of(tmp_path).encoder()(["a list", "", " ".join(encoders.TEXTS)])
    assert list(tokens) == ["input_ids", "attention_mask"]
    ids, mask = tokens.values()
    assert ids.shape == mask.shape == (3, 10)
    assert ids.dtype == mask.dtype == torch.int64
    assert mask.sum(dim=1).tolist()[1:] == [2, 10]
    assert ids[1].tolist() == [1, 2, *[encoders.PAD] * 8]
    assert bool((ids[:, 0] == 1).all())
    assert int(ids[2, -1]) == 2
    assert bool((ids[mask == 0] == encoders.PAD).all())


def test_texts_are_lower_cased_for_uncased_encoders(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    encoders.write_tokenizer(path)
    content = json.loads(path.read_text())
    content["normalizer"] = None
    path.write_text(json.dumps(content))
    cased, lower = spec_of(tmp_path).encoder(), spec_of(tmp_path, lower_case=True).encoder()
    assert torch.equal(lower(["A LIST"])["input_ids"], cased(["a list"])["input_ids"])
    assert not torch.equal(cased(["A LIST"])["input_ids"], cased(["a list"])["input_ids"])


def test_foreign_tokenizer_is_refused(tmp_path: Path) -> None:
    rejects("no such file", content_of_tokenizer, tmp_path)
    encoders.write_tokenizer(tmp_path / "tokenizer.json")
    rejects(r"sha256 .*, expected 0000", content_of_tokenizer, tmp_path, sha256="0" * 64)
    rejects("the model knows 50", spec_of(tmp_path, vocabulary=50).encoder)
    rejects("2 special tokens", spec_of(tmp_path, length=2).encoder)
    (tmp_path / "tokenizer.json").write_text("{}")
    rejects("not a tokenizer", spec_of(tmp_path).encoder)


def test_pooling_and_length_are_read_from_sentence_transformers_files(tmp_path: Path) -> None:
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


def test_unsupported_sentence_transformers_modules_are_refused(tmp_path: Path) -> None:
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


# The encoder as an ONNX graph and as an engine

LENGTH = 16
INPUTS = [Port(name=name, shape=(LENGTH,), dtype="int64") for name in ("input_ids", "attention_mask")]
OUTPUTS = [OutputPort(name="embedding", role="embedding")]


def encoder(directory: Path, *, normalize: bool = True, qk: int = 64) -> nn.Module:
    """Return a random encoder of two blocks in its exportable form; `qk` is the width of the queries of all heads."""
    encoders.write_encoder(directory, hidden_size=64, num_attention_heads=2, intermediate_size=128)
    dense = load_transformers(directory, {"length": LENGTH, "normalize": normalize}).model
    names = [site.name for site in sites_of(dense).every if site.name.endswith(".qk")]
    return exportable(at_widths(dense, dict.fromkeys(names, qk)) if qk < 64 else dense)


def padded_texts(count: int) -> dict[str, NDArray[np.int64]]:
    rng = np.random.default_rng(count)
    mask = (np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (count, 1))).astype(np.int64)
    return {"input_ids": rng.integers(0, encoders.VOCABULARY, (count, LENGTH)), "attention_mask": mask}


@pytest.mark.slow("graph")
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("fp16", 5e-3)])
def test_embeddings_equal_torch_for_any_padding_ids(tmp_path: Path, precision: str, bound: float) -> None:
    model = encoder(tmp_path, normalize=precision == "fp32", qk=32)
    path = tmp_path / "encoder.onnx"
    save_onnx(onnx_from_model(model, INPUTS, OUTPUTS, precision=precision, metadata={}), path)
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
def test_masked_attention_stays_one_kernel(qk: int, tmp_path: Path) -> None:
    path = tmp_path / "encoder.onnx"
    save_onnx(onnx_from_model(encoder(tmp_path, qk=qk), INPUTS, OUTPUTS, precision="fp16", metadata={}), path)
    record = built(path, "1:8:16")
    assert record.attention_sites == record.fused_attention_sites
    assert len(record.attention_sites) == 2
    assert [port.name for port in record.inputs] == [port.name for port in INPUTS]
