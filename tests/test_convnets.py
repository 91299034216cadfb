"""Networks of convolutions, their sites found in their programs: what every one of them goes through."""

import copy
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from safetensors.torch import save_file

from calib.moments import Moments
from corp_deploy.families.counting import macs, site_costs
from corp_deploy.families.family import sites_of
from corp_deploy.families.traced_model import tracing
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.budget_planner import build_budget_planner
from corp_deploy.planning.curvature import effects_of_changes
from corp_deploy.planning.request import ReductionRequest
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import PRESETS
from corp_deploy.reduction.model import Reduction, reduce
from corp_deploy.store.checkpoint import dense_from_architecture, load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from corp_deploy.traced.models.narrowed_model import at_widths
from examples.digits.images import load_part
from tests.command import invoked
from tests.refusals import rejects
from tests.small_convnets import (
    SIZE,
    SMALL,
    checkpoint,
    conv_sites,
    digits,
    error,
    images_of,
    library,
    method,
    outputs,
    pixels,
    streams,
    unseen_digits,
)

FEW = ("resnet18d", "seresnet50", "resnext50_32x4d", "small_efficientnet")
NIGHTLY = ("resnet18", "resnet50", "resnet50d", "resnet26t", "regnetx_002", "regnety_002", "regnetz_005")
"""Networks that run no line of a reduction that FEW, or tests of calib/, don't run."""
WITH_CONVOLUTIONS = tuple(name for name, method in PRESETS.items() if method.conv_recovery != "keep")
BETWEEN: dict[str, int] = {
    "resnet18": 5, "resnet18d": 7, "resnet50": 10, "resnet50d": 12, "resnet26t": 12, "seresnet50": 10,
    "resnext50_32x4d": 10, "small_efficientnet": 5,
}  # fmt: skip
"""Places between two convolutions of a block, or of a deep stem."""


@cache
def moments(name: str) -> Moments:
    own = checkpoint(name)
    return calibrate(own, images_of(name, 96), batch_size=32, statistics=Statistics(residual=True))


@pytest.mark.parametrize("name", list(BETWEEN))
def test_channels_between_two_convolutions_are_a_site(name: str) -> None:
    own = checkpoint(name).model
    assert error(own, library(name), pixels(2)) < 1e-6
    found = {span.name for site in conv_sites(own) for span in site.groups.writers if span.name.endswith(".weight")}
    inside = {each for each in found if "downsample" not in each and "se." not in each}
    assert len(inside) >= BETWEEN[name]
    assert streams(own)


@pytest.mark.slow("models")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in NIGHTLY else name for name in SMALL]
)
def test_half_width_model_is_smaller_and_round_trips(name: str, tmp_path: Path) -> None:
    """Between convolutions and in streams, at both of which `best` errs least."""
    own, unseen = checkpoint(name), pixels(32, seed=5)
    splits = {
        preset: reduce(own.model, moments(name), method(preset, 0.5, residual_sparsity=0.25))
        for preset in ("none", "grail", "best")
    }
    lost = {preset: sum(each.error / each.energy for each in half.sites) for preset, half in splits.items()}
    assert lost["best"] < lost["grail"] < lost["none"]
    half = splits["best"].model
    assert macs(half) < 0.7 * macs(own.model)
    assert error(half, own.model, unseen) < 1.0
    save(replace(own, model=half), tmp_path / "model")
    again = load_checkpoint(tmp_path / "model").model
    state = half.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in again.state_dict().items())
    assert error(again, half, pixels(2)) < 1e-6


@pytest.mark.parametrize("name", ["resnet50d", "regnety_002", "small_efficientnet", "small_mobilenetv3"])
def test_weights_under_timm_names_are_read(name: str, tmp_path: Path) -> None:
    """With as many classes as they tell apart, and without the classifier where none is asked for."""
    theirs, weights = library(name), tmp_path / "weights.safetensors"
    save_file(theirs.state_dict(), weights)
    kwargs = {"img_size": SIZE, **SMALL[name]}
    own = load_dense(name, weights=weights, kwargs=kwargs)
    assert error(own.model, theirs, pixels(2)) < 1e-5
    assert any("tells 7 classes apart" in note for note in own.notes)
    bare = load_dense(name, weights=weights, kwargs={**kwargs, "num_classes": 0})
    assert any("not used, as the model was built without" in note for note in bare.notes)
    assert outputs(bare.model, pixels(2)).shape[1] > 7


@pytest.mark.slow("models")
@pytest.mark.parametrize("preset", WITH_CONVOLUTIONS)
def test_full_width_is_the_identity(preset: str) -> None:
    """To float32 rounding; GRAIL's ridge shrinks the layer a little, as published."""
    for name in FEW if preset == "best" else FEW[2:]:
        own, source = checkpoint(name).model, images_of(name, 16)
        limit = 2e-2 if preset == "grail" else 1e-4
        assert error(reduce(own, moments(name), method(preset, 0.0)).model, own, pixels(6)) < limit, name
        assert error(reduce_traced(own, source, method(preset, 0.0), loop=Loop()).model, own, pixels(6)) < limit, name


@cache
def looped(name: str) -> dict[str, Reduction]:
    own, source = checkpoint(name), images_of(name, 96)
    return {
        "open": reduce(own.model, moments(name), method("best", 0.5)),
        "grail": reduce_traced(own.model, source, method("grail", 0.5)),
        "ours": reduce_traced(own.model, source, method("best", 0.5), loop=Loop()),
    }


@pytest.mark.slow("models")
@pytest.mark.parametrize("name", ["resnet18d", "seresnet50", "resnext50_32x4d", "small_efficientnet"])
def test_closed_loop_has_the_least_error(name: str) -> None:
    """On images that it never saw; every layer that reads a site is fitted, and no worse for it."""
    errors = {how: error(each.model, checkpoint(name).model, pixels(48, seed=5)) for how, each in looped(name).items()}
    assert errors["ours"] < errors["open"]
    assert errors["ours"] < errors["grail"]
    for report in looped(name)["ours"].sites:
        assert report.loop is None or report.loop.error_held_out <= report.loop.error_recovered_held_out
    widths = [[each.width for each in conv_sites(looped(name)[how].model)] for how in ("open", "ours", "grail")]
    assert widths[0] == widths[1] == widths[2]


@pytest.mark.slow("models")
def test_best_has_the_least_error_on_trained_weights() -> None:
    own, source = digits()
    taken, best = calibrate(own, source, batch_size=32), method("best", 0.7)
    grail, unseen = method("grail", 0.7), unseen_digits()
    ours = error(reduce_traced(own.model, source, best, loop=Loop()).model, own.model, unseen)
    assert ours < 0.8 * error(reduce(own.model, taken, best).model, own.model, unseen)
    assert ours < 0.3 * error(reduce_traced(own.model, source, grail).model, own.model, unseen)


@pytest.mark.parametrize("name", ["resnet50d", "regnetx_002", "regnety_002", "regnetz_005", "small_efficientnet"])
def test_joint_savings_equal_the_count(name: str) -> None:
    """Layers between two sites cost the product of what is left of both, those of each channel what is left of one."""
    own = checkpoint(name).model
    every, generator = sites_of(own).every, torch.Generator().manual_seed(0)
    shares = torch.randint(1, 4, (len(every),), generator=generator).tolist()
    widths = {site.name: site.width * share // 4 for site, share in zip(conv_sites(own), shares, strict=False)}
    widths = {site.name: widths[site.name] // site.parts * site.parts for site in conv_sites(own)}
    assert site_costs(own, "macs").saved(every, widths) == pytest.approx(macs(own) - macs(at_widths(own, widths)))


def test_linear_bottlenecks_are_streams() -> None:
    """Channels that blocks hand on without an activation are the stream's, whoever else writes them."""
    own = checkpoint("small_mobilenetv4").model
    kinds = {site.name: site.kind for site in sites_of(own).every}
    assert "traced streams" in kinds.values()
    written = {span.name for site in conv_sites(own) for span in site.groups.writers}
    assert not any("pw_proj" in name for name in written)
    assert any("pw_exp" in name for name in written)


@pytest.mark.slow("models")
@pytest.mark.parametrize("name", ["resnet50d", "small_efficientnet"])
def test_budget_is_used_up_and_kept(name: str) -> None:
    own, share = checkpoint(name), 0.7
    asked = method("best", None)
    request = ReductionRequest(options=ReduceOptions(macs=share), method=asked)
    planner = build_budget_planner(own, moments(name), request, images_of(name, 32))
    plan = planner.widths_at(share)
    used = macs(reduce(own.model, moments(name), asked, widths=plan.widths).model) / macs(own.model)
    assert share - 0.04 < used <= share
    assert f"{used:.1%} of the dense macs used" in plan.decisions[0]
    least = planner.narrowest()
    assert least < 0.5
    narrowest = reduce(own.model, moments(name), asked, widths=planner.widths_at(least + 1e-9).widths).model
    assert macs(narrowest) / macs(own.model) == pytest.approx(least)
    rejects(f"out of reach: the narrowest widths keep {least:.3f}", planner.widths_at, least - 0.01)


def test_first_order_effects_equal_small_changes() -> None:
    """Compare the effects with outputs of changed models in float64; one output, so that its sign does not matter."""
    architecture = replace(checkpoint("resnet18d").architecture, kwargs={**SMALL["resnet18d"], "num_classes": 1})
    torch.manual_seed(0)
    model = dense_from_architecture(architecture).double().eval().requires_grad_(False)
    program, shown = tracing(model).program, pixels(11).double()
    assert effects_of_changes(model, shown, []) == []
    names = ("layer1.0.conv2.weight", "layer2.0.conv1.weight", "layer2.0.conv1.bias", "fc.weight")
    drawn = {name: 1e-6 * torch.randn_like(program.tensor(name)) for name in names}
    changes = [{name: drawn[name]} for name in names if name.endswith("weight")] + [drawn]
    exact, wanted = outputs(model, shown), []
    for change in changes:
        moved = copy.deepcopy(program.graph)
        for name, each in change.items():
            moved.get_parameter(name).data += each
        with torch.no_grad():
            wanted.append(float((moved(shown) - exact).square().sum() / exact.square().sum()))
    assert effects_of_changes(model, shown, changes) == pytest.approx(wanted, rel=1e-4)


# A trained convolutional network through the commands, as a user would: what they say, write, refuse and prove.

RESNET = Path(__file__).parents[1] / "examples" / "digits" / "resnet"
PLAIN = {"Conv", "Relu", "MaxPool", "Add", "AveragePool", "ReduceMean", "Reshape", "Gemm"}
# What older torch writes for the shape of its flattening, which newer writes as a number.
OF_SHAPE = {"Shape", "Concat"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrated, reduced to half and exported."""
    root = tmp_path_factory.mktemp("convnet")
    held_out = load_part("held-out")
    np.savez(root / "images.npz", images=load_part("train").images[:96])
    np.savez(root / "held-out.npz", images=held_out.images[:32], labels=held_out.labels[:32])
    invoked("calibrate", "--model", RESNET, "--images", root / "images.npz", "-o", root / "moments.safetensors")
    invoked("reduce", *given(root), "--conv", 0.5, "--align", "conv=8", "-o", root / "reduced")
    invoked("export", "--model", root / "reduced", "--precision", "fp32,fp16", "-o", root / "reduced/model.onnx")
    return root


def given(root: Path) -> tuple[object, ...]:
    return "--model", RESNET, "--moments", root / "moments.safetensors"


@pytest.mark.slow("graph")
def test_reports_mention_no_attention(home: Path) -> None:
    """No MLPs, heads or attention; sites are blocks and stages by their names."""
    sweep = ("sweep", *given(home), "--images", home / "images.npz", "-o", home / "swept")
    inspected = invoked("inspect", "--model", RESNET).output
    printed = [
        inspected,
        invoked("reduce", *given(home), "--conv", 0.5, "-o", home / "again").output,
        invoked("inspect", "redundancy", "--moments", home / "moments.safetensors").output,
        invoked(*sweep, "--sparsity", 0.5, "--preset", "best").output,
    ]
    for text in printed:
        assert [word for word in ("MLP", "ttention", "Q/K", "heads", "padded") if word in text] == []
    assert all(name in inspected for name in ("conv1", "layer1.0", "layer1.1", "layer4.0"))
    assert "conv" in printed[-1]


@pytest.mark.slow("graph")
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--mlp", 0.5), "--mlp 0.5 has no effect on a model without MLPs"),
        (("--attn", 0.5), "--attn 0.5 has no effect on a model without attention"),
        (("--conv", 0.5, "--heads", "square"), "--heads square has no effect on a reduction that leaves attention"),
        (("--conv", 0.5, "--preset", "corp-v1"), "--conv 0.5 has no effect on preset corp-v1"),
    ],
)
def test_attention_options_are_refused_with_the_reason(words: tuple[object, ...], reason: str, home: Path) -> None:
    assert reason in invoked("reduce", *given(home), *words, "-o", home / "refused", code=2).output


@pytest.mark.slow("graph")
def test_graphs_are_convolutions_with_folded_norms(home: Path) -> None:
    whole, half = (onnx.load(home / "reduced" / name) for name in ("model.onnx", "model.fp16.onnx"))
    assert {node.op_type for node in whole.graph.node} - OF_SHAPE == PLAIN
    assert {node.op_type for node in half.graph.node} - OF_SHAPE == PLAIN | {"Cast"}
    for model, kind in ((whole, TensorProto.FLOAT), (half, TensorProto.FLOAT16)):
        weights = [each for each in model.graph.initializer if each.data_type != TensorProto.INT64]
        assert {each.data_type for each in weights} == {kind}
    names = [node.name for node in whole.graph.node if node.op_type == "Conv"]
    assert "layer2.1.bn2/Conv" in names, "the norm's, which gives what both gave"


@pytest.mark.slow("models")
def test_convnet_is_verified_and_packaged(home: Path) -> None:
    chain = (RESNET, home / "reduced", home / "reduced/model.onnx", home / "reduced/model.fp16.onnx")
    # Two thirds of the MACs are gone: the stem's last channels are halved too.
    limits = ("--min-agreement", 0.85, "--max-error", 0.15)
    invoked("verify", *chain, "--images", home / "held-out.npz", *limits, "-o", home / "parity.json")
    links = json.loads((home / "parity.json").read_text())["links"]
    assert [link["status"] for link in links] == ["PASS"] * 4
    invoked("package", home, "--name", "digits", "-o", home / "repository")
    invoked("package", "lint", home / "repository")


def test_groups_keep_equally_many_channels() -> None:
    reduced = reduce(checkpoint("resnext50_32x4d").model, moments("resnext50_32x4d"), method("best", 0.5)).model
    grouped = [site for site in conv_sites(reduced) if site.groups.part_G is not None]
    assert grouped
    for site in grouped:
        part_G = torch.as_tensor(site.groups.part_G)
        assert len(set(part_G.bincount().tolist())) == 1


@pytest.mark.slow("graph")
def test_engines_are_built_in_both_precisions(home: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    for name in ("model", "model.fp16"):
        words = ("--backend", "tensorrt-rtx", "--batch", "1:4:8", "--sm", "86")
        built = invoked("build", home / f"reduced/{name}.onnx", *words, "-o", home / f"{name}.plan").output
        assert "the graph has none" in built, "no attention to fuse"
        assert (home / f"{name}.plan").stat().st_size > 100_000
