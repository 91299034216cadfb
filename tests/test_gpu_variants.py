"""Other ways to be smaller on a GPU: half precision, merged tokens, eight bits and convolutional networks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.gpu import models, real, variants
from benchmarks.gpu.quantised import QuantisedLinear, quantised
from benchmarks.gpu.record import Refused
from benchmarks.gpu.run import main
from benchmarks.gpu.setting import Setting
from benchmarks.real import packed
from benchmarks.real.head import SaliencyHead
from benchmarks.real.measures import relative_error
from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs
from tests import tiny

pytestmark = pytest.mark.nightly

Row = dict[str, Any]


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(device="cpu", small=True, everything=False, cache=tmp_path / "cache")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Row:
    """The part of a small run."""
    folder = tmp_path_factory.mktemp("variants")
    main(["--output", str(folder), "--small", "--device", "cpu", "--only", "variants"], say=lambda line: None)
    written: Row = json.loads((folder / "gpu_variants.json").read_text())
    return written


def row_of(record: Row, key: str) -> Row:
    found: Row = next(row for row in record["rows"] if row["key"] == key)
    return found


@pytest.mark.slow("models")
def test_every_variant_is_measured_and_none_is_refused(record: Row) -> None:
    assert [(row["about"], row["model"], row["status"], row["refused"]) for row in record["rows"]] == [
        ("bf16", "DeiT-T", "done", {}),
        ("merging", "DeiT-T", "done", {}),
        ("eight bits", "DeiT-T", "done", {}),
        ("convnet", "ResNet-50", "done", {}),
        ("convnet", "ConvNeXt-B", "done", {}),
    ]
    assert record["skipped"] == []


@pytest.mark.slow("models")
def test_tokens_and_widths_are_compared_at_the_same_share(record: Row) -> None:
    row = row_of(record, "merging DeiT-T batch 2")
    shares = {name.split(" ")[0]: kept / row["macs"]["dense"] for name, kept in row["macs"].items()}
    assert list(shares) == ["dense", "merge", "drop", "square"]
    assert all(0.85 < share <= 0.92 for name, share in shares.items() if name != "dense")


@pytest.mark.slow("models")
def test_convolutional_networks_keep_the_share_of_the_macs_asked_for(record: Row) -> None:
    for row in record["rows"][-2:]:
        dense, *reduced = row["macs"].values()
        assert reduced
        assert all(0.8 < kept / dense <= 0.9 for kept in reduced)
        assert row["rounds"] >= 6


# Eight bits


def by_loops(linear: nn.Linear, x: Tensor, how: str) -> Tensor:
    """Each output by its own sum in float64 over rounded factors."""
    largest = {"fp8": 448.0, "int8": 127.0}[how]

    def eight(values: Tensor) -> tuple[Tensor, float]:
        scale = float(values.abs().max()) / largest
        scaled = (values.float() / scale).clamp(-largest, largest)
        bits = scaled.to(torch.float8_e4m3fn).double() if how == "fp8" else scaled.round().double()
        return bits, scale

    (rows, row_scale), (weights, weight_scale) = eight(x.flatten(0, -2)), eight(linear.weight)
    out = torch.empty(len(rows), len(weights), dtype=torch.float64)
    for i, row in enumerate(rows):
        for j, weight in enumerate(weights):
            out[i, j] = sum(float(a) * float(b) for a, b in zip(row, weight, strict=True)) * row_scale * weight_scale
    return (out + linear.bias.double()).view(*x.shape[:-1], -1)


@pytest.mark.parametrize("how", ["fp8", "int8"])
def test_a_product_in_eight_bits_is_that_of_rounded_factors(how: Any) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(32, 16), torch.randn(2, 10, 32)
    made = QuantisedLinear(linear, float(x.abs().max()), how)
    with torch.no_grad():
        expected = by_loops(linear, x, how)
        torch.testing.assert_close(made(x).double(), expected, rtol=1e-3, atol=1e-3)
    plain = linear(x).double()
    assert 1e-4 < float((expected - plain).detach().norm() / plain.detach().norm()) < 0.1


def test_only_the_layers_of_blocks_that_fit_are_in_eight_bits(setting: Setting) -> None:
    model = models.dense("DeiT-T", setting)
    images = torch.randn(2, 3, 32, 32)
    made = quantised(model, models.block_names(model), images, "int8")
    names = {name for name, module in made.named_modules() if isinstance(module, QuantisedLinear)}
    layers = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert names == {f"blocks.{block}.{layer}" for block in (0, 1) for layer in layers}
    assert not any(isinstance(module, QuantisedLinear) for module in model.modules())


def test_a_model_far_from_the_plain_one_is_refused(monkeypatch: pytest.MonkeyPatch, setting: Setting) -> None:
    def wrong(*given: Any) -> nn.Module:
        made = quantised(*given)
        for module in made.modules():
            if isinstance(module, QuantisedLinear):
                module.input_scale.mul_(50.0)
        return made

    monkeypatch.setattr(variants, "quantised", wrong)
    variant = variants.Variant(about="eight bits", model="DeiT-T", batch=2, make=variants.in_eight_bits)
    with pytest.raises(Refused, match="of the norm away"):
        variants.in_eight_bits(variant, setting)


# Real weights are packed small, and on a GPU reduced, polished and judged as the commands would do it.

KWARGS = {"img_size": 32, "patch_size": 8, "num_classes": 0}


def pictures(count: int, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Blurred noise [N,3,32,32], normalised, which JPEG leaves about as it is."""
    noise = np.random.default_rng(seed).uniform(0, 255, (count, 4, 4, 3)).astype(np.uint8)
    large = [np.asarray(Image.fromarray(each).resize((32, 32), Image.Resampling.BICUBIC)) for each in noise]
    return packed.normalised(np.stack(large).transpose(0, 3, 1, 2)).numpy()


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make real` leaves, of a tiny model whose blocks all matter."""
    directory = tmp_path_factory.mktemp("real") / "ready"
    directory.mkdir()
    model = tiny.checkpoint(**KWARGS).model
    for name, parameter in model.named_parameters():
        if name.endswith(".gamma"):
            parameter.data.fill_(0.3)
    save_file(model.state_dict(), directory / "dinov2_s.safetensors")
    torch.manual_seed(0)
    save_file(SaliencyHead((48, 16, 8), patch=8).state_dict(), directory / "head.safetensors")
    for name, count, groups in (("calib", 24, 8), ("held", 6, 2)):
        np.save(directory / f"{name}.npy", pictures(count, seed=count))
        names = [f"{name}-{position % groups}.jpg" for position in range(count)]
        (directory / f"{name}_groups.json").write_text(json.dumps(names))
    return directory


@pytest.fixture(scope="module")
def folder(ready: Path) -> Path:
    packed.pack(ready, ready.with_name("packed"), tiny.checkpoint(**KWARGS).architecture)
    return ready.with_name("packed")


def test_what_is_unpacked_is_what_was_packed_but_for_rounding(ready: Path, folder: Path) -> None:
    found = packed.unpack(folder)
    dense = tiny.checkpoint(**KWARGS)
    for name, tensor in found.dense.model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, tensor.half().float()), name
    state = load_file(ready / "dinov2_s.safetensors")
    for name, tensor in state.items():
        torch.testing.assert_close(found.dense.model.state_dict()[name], tensor, rtol=1e-3, atol=1e-6)
    assert found.dense.architecture == dense.architecture
    assert not any(parameter.requires_grad for parameter in found.dense.model.parameters())
    for crops, name in ((found.calibration, "calib"), (found.held_out, "held")):
        images = np.load(ready / f"{name}.npy")
        assert relative_error(packed.normalised(crops.pixels), torch.from_numpy(images)) < 0.1
        assert list(crops.photographs) == json.loads((ready / f"{name}_groups.json").read_text())


@pytest.fixture(scope="module")
def real_record(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Row:
    """The part of a small run."""
    output = tmp_path_factory.mktemp("out")
    words = ["--output", str(output), "--small", "--device", "cpu", "--only", "real", "--packed", str(folder)]
    main(words, say=lambda line: None)
    written: Row = json.loads((output / "gpu_real.json").read_text())
    return written


@pytest.mark.slow("training")
def test_every_reduction_and_polish_is_made_and_judged(real_record: Row) -> None:
    assert {row["status"] for row in real_record["rows"]} == {"done"}
    first, *others = real_record["rows"]
    counts = ("images", "photographs", "held_out_images", "held_out_photographs")
    assert [first[name] for name in counts] == [24, 8, 6, 2]
    reductions = [row for row in others if row["row"] == "reduction"]
    assert {(row["widths"], row["loop"]) for row in reductions} == {
        (widths, loop) for widths in ("uniform", "by site") for loop in ("open", "closed")
    }
    for row in reductions:
        assert row["macs_share"] <= 0.8
        assert 0.0 < row["class_error"] < 1.0
        assert ("closed loop" in row["efforts"]) == (row["loop"] == "closed")


@pytest.mark.slow("training")
def test_a_polish_starts_from_the_closed_loop(real_record: Row) -> None:
    start = next(row for row in real_record["rows"] if row["key"] == "by site closed loop 80% of the MACs")
    row = next(row for row in real_record["rows"] if row["key"] == "polish layer 0.3 s 80% of the MACs")
    assert row["class_error_before"] == start["class_error"]
    assert row["macs_share"] == start["macs_share"]
    report = row["report"]
    assert report["error"] <= report["error_before"]
    assert report["held_out"] + report["fitted"] == 24


@pytest.mark.slow("training")
def test_a_row_is_what_the_commands_give(folder: Path, real_record: Row, tmp_path: Path) -> None:
    setting = Setting(device="cpu", small=True, everything=False, cache=tmp_path, packed=folder)
    subject = real.Subject(setting)
    model = subject.reduced(real.Case(share=0.8, widths="by site", loop="open"))
    assert subject.groups_B.unique().numel() == 8
    with torch.inference_mode():
        tokens = {
            name: net.get_submodule("norm")(_before_norm(net, subject.held_out))
            for name, net in (("dense", subject.dense.model), ("reduced", traced_model.exportable(model)))
        }
    expected = relative_error(tokens["reduced"][:, 0], tokens["dense"][:, 0])
    row = next(row for row in real_record["rows"] if row["key"] == "by site open loop 80% of the MACs")
    assert row["class_error"] == pytest.approx(expected, rel=1e-4)
    assert row["macs_share"] == macs(model) / macs(subject.dense.model)


def _before_norm(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    held: list[torch.Tensor] = []
    hook = model.get_submodule("norm").register_forward_pre_hook(lambda _, given: held.append(given[0]))
    model(images)
    hook.remove()
    return held[0]


def test_without_what_was_packed_every_row_says_so(tmp_path: Path) -> None:
    words = ["--output", str(tmp_path), "--small", "--device", "cpu", "--only", "real"]
    main([*words, "--packed", str(tmp_path / "none")], say=lambda line: None)
    rows = json.loads((tmp_path / "gpu_real.json").read_text())["rows"]
    assert {row["status"] for row in rows} == {"absent"}
    assert all("nothing packed here" in row["reason"] for row in rows)
