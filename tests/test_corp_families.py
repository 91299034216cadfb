"""Budgets of models whose queries and keys stay, whose MLPs are gated or without biases, and odd inputs and stems."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from calib.images import Images
from calib.moments import Moments
from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs, parameters
from corp_deploy.families.family import sites_of
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.budget import allocate_widths
from corp_deploy.planning.budget_planner import build_budget_planner
from corp_deploy.planning.curves import CostCurve, compute_cost_curves, compute_eliminations
from corp_deploy.planning.plan import choose_heads
from corp_deploy.planning.probe import Probe
from corp_deploy.planning.request import ReductionRequest
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.widths import HeadGeometry
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.store.onnx_file import metadata_of_checkpoint
from corp_deploy.traced.models.steps import SegmentStep
from tests import timm_models, tiny
from tests.refusals import rejects

MODELS: Mapping[str, Callable[[], Checkpoint]] = {
    "q/k norm": lambda: tiny.checkpoint(qk_norm=True),
    "swiglu": lambda: timm_models.checkpoint("gate apart"),
    "no biases": lambda: tiny.checkpoint(qkv_bias=False, proj_bias=False),
}


@cache
def checkpoint(family: str) -> Checkpoint:
    dense = MODELS[family]()
    dense.model.requires_grad_(False)
    return dense


@cache
def opened(family: str) -> Images:
    return tiny.opened(Path(mkdtemp()) / "images.npy", tiny.images(24), checkpoint(family).model)


def pixels(family: str) -> Tensor:
    return next(iter(opened(family).batches(24)))


@cache
def moments(family: str) -> Moments:
    return calibrate(checkpoint(family), opened(family), batch_size=8)


def best(**changes: Any) -> Method:
    return method_from_preset("best", **{"align_hidden": 8, "align_head": 8, **changes})


def probe_of(family: str, method: Method) -> Probe:
    model, inputs = checkpoint(family).model, pixels(family)[:8]
    known = compute_eliminations(model, moments(family), method)
    return Probe(model=model, moments=moments(family), method=method, inputs=inputs, eliminations=known)


@pytest.mark.parametrize(
    ("family", "share", "currency"), [("q/k norm", 0.7, "macs"), ("swiglu", 0.95, "macs"), ("no biases", 0.6, "params")]
)
def test_budget_holds_for_the_counted_macs_and_parameters(
    family: str, share: float, currency: Literal["macs", "params"]
) -> None:
    """The count includes the biases that repairs add."""
    dense, count = checkpoint(family), macs if currency == "macs" else parameters
    request = ReductionRequest(options=ReduceOptions.from_options({currency: share}), method=best())
    planner = build_budget_planner(dense, moments(family), request, opened(family))
    plan = planner.widths_at(share)
    reduced = reduce(dense.model, moments(family), best(), widths=plan.widths).model
    used = count(reduced) / count(dense.model)
    assert plan.decisions[0].startswith(f"budget: {used:.1%} of the dense {currency} used")
    assert used <= share


@pytest.mark.parametrize("geometry", ["padded", "square", "ragged"])
def test_values_are_offered_while_queries_stay(geometry: Any) -> None:
    probe = probe_of("q/k norm", best(geometry=geometry))
    (curve,) = [each for each in compute_cost_curves(probe, "macs") if each.site == "blocks.1.attn.v"]
    assert curve.widths == (0, 24, 48)
    assert curve.costs[0] < curve.costs[1] < curve.costs[2] == curve.cost_now
    assert curve.errors[0] > curve.errors[1] > curve.errors[2] == 0.0
    widths = {"blocks.1.attn.v": 24}
    reduction = reduce(probe.model, probe.moments, probe.method, widths=widths, eliminations=probe.eliminations)
    assert [(site.site, site.part, site.width) for site in reduction.sites] == [("blocks.1.attn.v", "v", 8)]
    reduced, dense = (model.get_parameter("blocks.1.attn.qkv.weight") for model in (reduction.model, probe.model))
    assert torch.equal(reduced[: 2 * 3 * 16], dense[: 2 * 3 * 16])


def test_tied_sites_take_the_same_width_index() -> None:
    shared: Any = {"widths": (1, 2, 4), "cost_now": 4, "tied": "attn"}
    queries = CostCurve(site="qk", costs=(1, 2, 4), errors=(9.0, 8.0, 0.0), **shared)
    values = CostCurve(site="v", costs=(1, 2, 4), errors=(3.0, 0.1, 0.0), **shared)
    mlp = CostCurve(site="mlp", widths=(8, 16), costs=(4, 8), errors=(5.0, 0.0), cost_now=8)
    assert allocate_widths([queries, mlp, values], 16, 0.75).widths == {"qk": 4, "mlp": 8, "v": 4}
    assert allocate_widths([queries, mlp, values], 16, 0.5).widths == {"qk": 2, "mlp": 8, "v": 2}


def test_values_tied_to_queries_may_be_removed_whole() -> None:
    """Queries can't be removed whole; they take their least width, which loses nothing once the values are gone."""
    queries = CostCurve(site="qk", widths=(2, 4), costs=(2, 4), errors=(1.0, 0.0), cost_now=4, tied="attn")
    values = CostCurve(site="v", widths=(0, 2, 4), costs=(0, 2, 4), errors=(3.0, 1.0, 0.0), cost_now=4, tied="attn")
    assert allocate_widths([queries, values], 8, 0.25).widths == {"qk": 2, "v": 0}
    assert allocate_widths([queries, values], 8, 0.5).widths == {"qk": 2, "v": 2}


def test_reported_value_loss_equals_the_loss_of_the_stream() -> None:
    model = checkpoint("q/k norm").model
    reduction = reduce(model, moments("q/k norm"), best(), widths={"blocks.0.attn.v": 24})
    (report,) = reduction.sites

    def stream_after_attention(model: nn.Module) -> Tensor:
        x_BNC = traced_model.first_stream(model, pixels("q/k norm"))
        for step in list(traced_model.steps(model))[:2]:
            assert isinstance(step, SegmentStep)
            x_BNC = step(x_BNC)
        return x_BNC.double()

    with torch.inference_mode():
        lost_BNC = stream_after_attention(reduction.model) - stream_after_attention(model)
    assert report.error == pytest.approx(float(lost_BNC.square().sum(-1).mean()), rel=1e-4)
    assert report.error < report.error_uncompensated


def test_uniform_square_heads_reduce_the_values_alone() -> None:
    method = best(attention_sparsity=0.5, geometry="square")
    reduced = reduce(checkpoint("q/k norm").model, moments("q/k norm"), method).model
    assert {site.name: site.width for site in sites_of(reduced).every} == {
        f"blocks.{number}.{part}": width for number in (0, 1) for part, width in (("attn.v", 24), ("mlp", 192))
    }


@pytest.mark.parametrize("mlp_sparsity", [None, 0.5])
def test_heads_are_weighted_if_some_keep_queries_and_keys(mlp_sparsity: float | None) -> None:
    probe = probe_of("q/k norm", best(mlp_sparsity=mlp_sparsity, attention_sparsity=0.5))
    plan = choose_heads(probe, None)
    share = min(plan.ways, key=lambda way: way.predicted_error).share
    dense = macs(probe.model)
    geometry: HeadGeometry = "padded" if mlp_sparsity else "square"
    uniform = reduce(probe.model, probe.moments, replace(probe.method, geometry=geometry)).model
    assert share <= macs(uniform) / dense < 1.0
    reduced = reduce(probe.model, probe.moments, plan.method, widths=plan.widths).model
    assert macs(reduced) <= share * dense * (1.0 + 1e-9)


def test_stem_without_a_projection_is_described() -> None:
    kwargs = {"depth": 1, "num_classes": 7}
    model = tiny.timm_model("vit_base_mci_224", **kwargs)
    architecture = Architecture(name="vit_base_mci_224", kwargs=kwargs)
    metadata = metadata_of_checkpoint(Checkpoint(model=model, architecture=architecture, lineage={}))
    assert metadata["corp_deploy.depth"] == "1"
    assert int(metadata["corp_deploy.macs"]) == macs(model)


@pytest.mark.parametrize(("channels", "words"), [(1, "1 channel;"), (4, "4 channels;")])
def test_image_folder_is_refused_for_a_model_without_rgb_input(tmp_path: Path, channels: int, words: str) -> None:
    model = tiny.checkpoint(in_chans=channels).model
    folder = tmp_path / "images"
    folder.mkdir()
    Image.new("RGB", (32, 32)).save(folder / "a.png")
    message = f"pictures give RGB, the model takes {words} give .npy, .npz"
    rejects(message, images_for_model, model, folder)
    np.save(tmp_path / "images.npy", np.zeros((2, channels, 32, 32), np.float32))
    assert images_for_model(model, tmp_path / "images.npy").count == 2
