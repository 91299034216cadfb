"""ViTs and text encoders of which constants stay: what judges them, merged tokens, saved, exported and built."""

import importlib.util
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from calib.images import Images
from calib.inputs import run_model
from corp_deploy.families import traced_model
from corp_deploy.families.widths import Widths
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import Reduction, reduce
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.store.inputs import texts_for_model
from corp_deploy.store.transformers_directory import load_transformers
from corp_deploy.traced.models.merging import Merging
from export.engine.build import build_engine
from export.engine.options import BatchProfile, BuildOptions
from export.graph.to_onnx import onnx_from_model
from export.graph.to_onnx import save as save_graph
from tests import encoders, tiny

METHOD = method_from_preset("best", align_hidden=32, align_head=8)
EMPTIED: Widths = {"blocks.0.mlp": 0, "blocks.1.attn.v": 0}
GIVEN = {"blocks.0.mlp": "blocks.0.mlp.fc2", "blocks.1.attn.v": "blocks.1.attn.proj"}
"""The layers that give what stays constant."""


@cache
def dense() -> Checkpoint:
    checkpoint = tiny.checkpoint()
    checkpoint.model.requires_grad_(False)
    return checkpoint


def opened(count: int = 24, seed: int = 0) -> Images:
    return tiny.opened(Path(mkdtemp()) / "images.npy", tiny.images(count, seed), dense().model)


@cache
def emptied() -> Reduction:
    moments = calibrate(dense(), opened(), batch_size=8)
    judges = calibrate(dense(), opened(8, 5), batch_size=8)
    return reduce(dense().model, moments, METHOD, widths=EMPTIED, held_out=judges)


def given_by(model: nn.Module, name: str, inputs: object) -> Tensor:
    """What a dense layer gives, float64."""
    given: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_hook(lambda _, __, out: given.append(out.double()))
    with torch.inference_mode():
        run_model(model, inputs)  # type: ignore[arg-type]
    handle.remove()
    return given[0]


def test_other_inputs_judge_the_constant() -> None:
    for report in emptied().sites:
        given_BNC = given_by(dense().model, GIVEN[report.site], torch.from_numpy(tiny.images(8, 5)))
        constant_C = emptied().model.get_parameter(f"{GIVEN[report.site]}.bias").double()
        assert report.held_out is not None
        expected = float((given_BNC - constant_C).square().sum(dim=-1).mean())
        assert report.held_out.error == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("metric", ["stream", "keys"])
def test_tokens_are_merged_all_the_same(metric: str) -> None:
    """Where attention is gone there are no keys to tell them apart by, and no place to merge at."""
    model = emptied().model
    merged = traced_model.with_merging(model, Merging(schedule=(2,), metric=metric))  # type: ignore[arg-type]
    with torch.inference_mode():
        assert merged(torch.from_numpy(tiny.images(2))).isfinite().all()


def graph_of(model: nn.Module, precision: str = "fp32"):  # type: ignore[no-untyped-def]
    ports = traced_model.input_spec(model).ports, traced_model.output_ports(model)
    return onnx_from_model(traced_model.exportable(model), *ports, precision=precision, metadata={})


@pytest.mark.slow("graph", "engine")
@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="TensorRT-RTX is not installed for this platform",
)
def test_an_engine_is_built_of_it(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    save_graph(graph_of(emptied().model, "fp16"), path)
    options = BuildOptions(backend="tensorrt-rtx", profiles=(BatchProfile.from_text("1:8:16"),), sms=("86",))
    record = build_engine(path, options).record
    assert record.attention_sites == record.fused_attention_sites == ("blocks.0.attn",)


@pytest.mark.slow("graph")
def test_a_text_encoder_keeps_constants_of_the_tokens_that_are_there(tmp_path: Path) -> None:
    encoders.write_encoder(tmp_path / "hub")
    checkpoint = load_transformers(tmp_path / "hub", {"normalize": False})
    (tmp_path / "t.txt").write_text("\n".join(encoders.texts(20)), encoding="utf-8")
    texts = texts_for_model(checkpoint.model, tmp_path / "t.txt")
    model = reduce(checkpoint.model, calibrate(checkpoint, texts, batch_size=8), METHOD, widths=EMPTIED).model
    (tokens,) = texts.batches(20)
    is_there = tokens["attention_mask"].bool()
    for name in GIVEN.values():
        mean_C = given_by(checkpoint.model, name, tokens)[is_there].mean(dim=0)
        torch.testing.assert_close(model.get_parameter(f"{name}.bias").double(), mean_C, rtol=1e-4, atol=1e-5)
    save(replace(checkpoint, model=model, lineage={}), tmp_path / "reduced")
    session = ort.InferenceSession(graph_of(model).SerializeToString(), providers=["CPUExecutionProvider"])
    with torch.inference_mode():
        expected = run_model(model, tokens)
        assert torch.equal(run_model(load_checkpoint(tmp_path / "reduced").model, tokens), expected)
    (got,) = session.run(None, {name: tensor.numpy() for name, tensor in tokens.items()})
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-4, atol=1e-5)
