"""A text encoder of BERT's kind as ONNX and as an engine: the embeddings of torch, attention fused under its mask."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from corp_deploy.families.bert import EncoderArguments, architecture_of
from corp_deploy.families.family import dense_model
from corp_deploy.families.text_encoder import EncoderArchitecture
from corp_deploy.families.tokenizer import Tokenization
from corp_deploy.families.traced_model import exportable
from corp_deploy.traced.models.narrowing import at_widths
from export.graph.to_onnx import onnx_from_model, save
from ground.ports import OutputPort, Port
from tests.graphs import built, needs_rtx, session_of

TOKENS, VOCABULARY = 16, 120
INPUTS = [Port(name=name, shape=(TOKENS,), dtype="int64") for name in ("input_ids", "attention_mask")]
OUTPUTS = [OutputPort(name="embedding", role="embedding")]


def encoder(*, normalize: bool = True, qk: int = 64) -> nn.Module:
    """Two blocks with random weights, queries and keys so wide in all, in the form that is exported."""
    torch.manual_seed(0)
    architecture = EncoderArchitecture(
        vocabulary=VOCABULARY, positions=32, token_types=2, width=64, heads=2, hidden=128, layers=2, normalize=normalize
    )
    text = Tokenization(length=TOKENS, sha256="0" * 64)
    dense = dense_model(architecture_of("bert", EncoderArguments(encoder=architecture, text=text)))
    dense.requires_grad_(False)
    return exportable(at_widths(dense, {f"blocks.{block}.attn.qk": qk for block in (0, 1)}) if qk < 64 else dense)


def padded_texts(count: int) -> dict[str, NDArray[np.int64]]:
    rng = np.random.default_rng(count)
    mask = (np.arange(TOKENS) < rng.integers(1, TOKENS + 1, (count, 1))).astype(np.int64)
    return {"input_ids": rng.integers(0, VOCABULARY, (count, TOKENS)), "attention_mask": mask}


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
