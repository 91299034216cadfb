"""timm models of every form as graphs and engines: outputs as in torch, and attention fused as in the dense model."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from corp_deploy.families.family import output_ports, sites_of
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.onnx_file import export_checkpoint
from tests import timm_models
from tests.graphs import audited, built, needs_rtx, require_as_torch
from tests.small_models import outputs, small
from tests.timm_models import EVAS, FORMS, HIERARCHIES, VITS, method, opened, pixels

SHALLOW: dict[str, dict[str, Any]] = {
    **{form: {} for form in HIERARCHIES}, "windows": {"depths": (2, 1)}, "cosines": {"depths": (1, 1)},
    "q/k norm, groups": {"depth": 1, "num_kv_heads": 1},
}  # fmt: skip
"""Options of the smallest models that have a block of each sort, such as a shifted one."""
HALF = ("packed gate", "gate apart", "q/k norm", "side by side", "halves turned, registers")
"""Forms that are exported in half precision too."""
PLAIN = ("mean", "maximum", "mean and maximum", "no classes", "registers", "any image size", "layer scale")
"""Forms whose graphs are left out here, since other forms and other tests cover them."""
GRAPHS: dict[str, dict[str, float]] = {
    **{form: {"fp32": 1e-4} | ({"fp16": 2e-2} if form in HALF else {})
       for form in (*VITS, "halves turned, registers", "q/k norm, groups") if form not in PLAIN},
    "hiera": {"fp16": 5e-3}, "maxvit_tf": {"fp32": 1e-5}, "tiny_vit": {"fp32": 1e-5}, "windows": {"fp16": 5e-3},
    "cosines": {"fp32": 1e-5}, "networks": {"fp16": 2e-2}, "talking heads": {"fp32": 1e-4},
    "convnext_tiny": {"fp32": 1e-5}, "small_resmlp": {"fp32": 1e-5},
    **{form: {"fp32": 1e-5, "fp16": 5e-3} for form in ("convnext_atto", "convnextv2_atto", "small_mixer")},
}  # fmt: skip
"""Largest error relative to torch's outputs, by form and precision."""
NIGHTLY: dict[str, str] = {
    **dict.fromkeys(("mean without a class token", "norm before"), "class token"),
    "attention pool without weights": "a mean's query: attention pool",
    "gate behind a norm": "a gate: gate apart; a norm in front of a layer: norms inside",
    "residual post-norm": "a norm on a branch: cosines",
    "side by side": "two branches of one tensor: one layer for all, a difference",
    "difference of softmaxes": "one layer for all, a difference",
    "one layer for all": "one layer for all, a difference",
    "networks": "biases that are constants: windows, cosines",
    "tiny_vit": "convolutions and windows: maxvit_tf; padding: cosines",
    "convnext_atto": "all but its layer scale: convnextv2_atto; its layers: the test of what it keeps",
    "convnext_tiny": "MLPs on the last axis: small_mixer; its layers: the test of what it keeps",
    "small_resmlp": "layers over tokens: small_mixer",
}  # fmt: skip
"""Graphs that are only checked nightly, with the forms that cover them in every run."""


def in_turn(forms: Iterable[str]) -> list[Any]:
    """Parametrise a test: forms of NIGHTLY nightly, all others in every run."""
    return [pytest.param(form, marks=pytest.mark.nightly) if form in NIGHTLY else form for form in forms]


COMPUTED = {"Sin", "Cos", "If", "Range", "Tile", "Loop"}


@cache
def dense(form: str) -> Checkpoint:
    return timm_models.checkpoint(form, **SHALLOW.get(form, {"depth": 1})) if form in FORMS else small(form)


@cache
def reduced(form: str) -> Checkpoint:
    """Reduce every site of the model to half its width."""
    model, asked = dense(form).model, method(geometry="square" if form == "cosines" else "padded")
    taken = calibrate(dense(form), opened(model, 8), batch_size=8)
    return replace(dense(form), model=reduce(model, taken, asked).model)


@pytest.mark.slow("graph")
@pytest.mark.parametrize("form", in_turn(GRAPHS))
def test_graphs_equal_torch(form: str, tmp_path: Path) -> None:
    """The angles of rotary embeddings must be constants of the graph."""
    model = reduced(form).model

    def asked(count: int) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        images = pixels(model, count, seed=count)
        return images.numpy(), outputs(model, images).numpy()

    for precision, bound in GRAPHS[form].items():
        path = tmp_path / f"{precision}.onnx"
        export_checkpoint(reduced(form), path, precision=precision)
        require_as_torch(path, asked, bound)
        graph = onnx.load(str(path)).graph
        assert form not in EVAS or not COMPUTED & {node.op_type for node in graph.node}
        assert [port.name for port in output_ports(model)] == [each.name for each in graph.output]


@pytest.mark.slow("graph", "engine")
@needs_rtx
@pytest.mark.parametrize(
    "form",
    [
        "side by side",
        "neighbours turned, packed gate",
        # Forms with the attention of a plain ViT.
        *(
            pytest.param(form, marks=pytest.mark.nightly)
            for form in ("packed gate", "gate apart", "residual post-norm")
        ),
    ],
)
def test_attention_stays_fused(form: str, tmp_path: Path) -> None:
    export_checkpoint(reduced(form), tmp_path / "m.onnx", precision="fp16")
    every = sites_of(reduced(form).model).every
    attentions = {site.name.removesuffix(".v") for site in every if site.name.endswith(".v")}
    assert set(built(tmp_path / "m.onnx", "1:2:4").fused_attention_sites or ()) == attentions


@pytest.mark.slow("graph", "engine")
@needs_rtx
@pytest.mark.parametrize("form", ["windows", "tables", "hiera"])
def test_attention_is_fused_in_dense_and_reduced_engines(form: str, tmp_path: Path) -> None:
    """Hiera's attention is within mask units, of pooled queries, or over all tokens."""
    for name, each in (("dense", dense(form)), ("half", reduced(form))):
        export_checkpoint(each, tmp_path / f"{name}.onnx", precision="fp16")
    audit = audited(tmp_path / "dense.onnx", tmp_path / "half.onnx")
    assert audit.passed
    every = sites_of(dense(form).model).every
    attentions = {site.name.removesuffix(".v") for site in every if site.name.endswith(".v")}
    assert {name.removesuffix(".softmax") for name in audit.dense.fused_attention_sites or ()} == attentions
    assert set(audit.reduced.fused_attention_sites or ()) == set(audit.dense.fused_attention_sites or ())


# Models without attention keep timm's layers.


@pytest.mark.slow("graph")
def test_convnext_keeps_the_layer_names_of_timm(tmp_path: Path) -> None:
    def count(name: str, kind: str) -> int:
        export_checkpoint(reduced(name), tmp_path / f"{name}.onnx", precision="fp32")
        return sum(node.op_type == kind for node in onnx.load(str(tmp_path / f"{name}.onnx")).graph.node)

    # A stem, three downsamplings and a depthwise convolution in each of five blocks; the two layers of an MLP are
    # convolutions in convnext_atto and matrix products in convnext_tiny.
    assert count("convnext_atto", "Conv") == 1 + 3 + 5 + 2 * 5
    assert count("convnext_tiny", "Conv") == 1 + 3 + 5
