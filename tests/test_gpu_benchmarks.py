"""The GPU benchmark runs on tiny models, goes on where it stopped, lists what it skipped, and judges by its records."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.gpu import engines, models, race, subjects, variants
from benchmarks.gpu.goals import at_least, together
from benchmarks.gpu.kernels import attention_kind
from benchmarks.gpu.quantised import QuantisedLinear, quantised
from benchmarks.gpu.record import Budget, Record, Refused, Task, work
from benchmarks.gpu.run import main
from benchmarks.gpu.setting import MODELS, Setting
from benchmarks.real import packed
from benchmarks.real.head import SaliencyHead
from benchmarks.real.measures import relative_error
from ground.errors import Missing
from ground.gpu import require_cuda
from tests import tiny

pytestmark = pytest.mark.nightly

try:
    require_cuda()
    NO_GPU = ""
except Missing as error:
    NO_GPU = str(error)

Row = dict[str, Any]
SMALL = ("--small", "--device", "cpu")


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(device="cpu", small=True, cache=tmp_path / "cache")


def run(folder: Path, part: str, *words: str) -> Row:
    """Run one part small and return its record."""
    main(["--output", str(folder), *SMALL, "--only", part, *words], say=lambda line: None)
    record: Row = json.loads((folder / f"gpu_{part}.json").read_text())
    return record


def row_of(record: Row, key: str) -> Row:
    found: Row = next(row for row in record["rows"] if row["key"] == key)
    return found


@pytest.fixture(scope="module")
def latency(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latency")
    run(folder, "latency")
    return folder


class Clock:
    """A clock that the work itself moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def task(self, key: str, estimate_s: float, takes_s: float, error: Exception | None = None) -> Task:
        def run() -> Row:
            self.now_s += takes_s
            if error is not None:
                raise error
            return {"value": key}

        return Task(key=key, estimate_s=estimate_s, run=run)


def worked(record: Record, tasks: list[Task], clock: Clock, limit_s: float) -> list[str]:
    told: list[str] = []
    work(record, tasks, Budget(clock() + limit_s, clock), state=lambda: None, say=told.append)
    return told


def new_record(tmp_path: Path, gpu: str = "one") -> Record:
    return Record(tmp_path / "record.json", "part", {"gpu": gpu}, {"small": True}, ("gpu",))


@pytest.mark.slow("graph")
def test_every_geometry_is_compared_with_dense_in_the_same_rounds(latency: Path) -> None:
    record = json.loads((latency / "gpu_latency.json").read_text())
    assert (record["kind"], record["version"], record["skipped"]) == ("benchmarks/gpu/latency", 1, [])
    assert {row["status"] for row in record["rows"]} == {"done"}
    row = row_of(record, "DeiT-H graph 50% batch 2")
    assert set(row["subjects"]) == {"dense", "dense again", "padded", "square", "ragged"}
    widths = {name: (each["qk"], each["v"]) for name, each in row["widths"].items()}
    assert widths == {"dense": (16, 16), "padded": (8, 16), "square": (8, 8), "ragged": (8, 16)}
    assert row["rounds"] >= 6
    rounds = {name: each["round_medians_ms"] for name, each in row["subjects"].items()}
    assert {len(each) for each in rounds.values()} == {row["rounds"]}
    assert row["refused"] == {}
    macs = {name: each["macs"] for name, each in row["widths"].items()}
    assert macs["square"] < macs["ragged"] < macs["padded"] < macs["dense"]
    square = row["subjects"]["square"]
    value, low, high = square["speedup"]
    assert value == pytest.approx(np.median(np.divide(rounds["dense"], rounds["square"])))
    assert low <= value <= high
    assert square["realised_share"] == pytest.approx((1 - 1 / value) / (1 - macs["square"] / macs["dense"]))
    assert square["images_per_s_compute"] == pytest.approx(2e3 / square["p50_ms"][0])
    assert row["subjects"]["dense"]["realised_share"] is None
    assert row["subjects"]["dense"]["speedup"] == [1.0, 1.0, 1.0]


@pytest.mark.slow("graph")
def test_second_run_measures_only_missing_rows(latency: Path) -> None:
    path = latency / "gpu_latency.json"
    before = json.loads(path.read_text())
    kept = [row for row in before["rows"] if row["key"] != "DeiT-H graph 50% batch 2"]
    path.write_text(json.dumps(before | {"rows": kept}))
    told: list[str] = []
    main(["--output", str(latency), *SMALL, "--only", "latency"], say=told.append)
    assert [line.split(":")[1].strip() for line in told[:-1]] == ["DeiT-H graph 50% batch 2"]
    assert json.loads(path.read_text())["rows"][:-1] == kept
    assert "## Latency\n\ntorch fp32" in (latency / "gpu.md").read_text()


def test_invalid_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path), "--only", "speed"])
    assert "expected some of latency, variants, engines, real" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path), "--budget-s", "0"])


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU here")
def test_absent_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="sees no CUDA GPU"):
        main(["--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)
def test_latency_and_variants_run_small_on_the_gpu(tmp_path: Path) -> None:
    main(["--output", str(tmp_path), "--small", "--only", "latency,variants"], say=lambda line: None)
    record = json.loads((tmp_path / "gpu_latency.json").read_text())
    for row in record["rows"]:
        assert row["status"] == "done"
        assert row["kernels"]["dense"]["kind"] != "none seen" if row["row"] == "attention" else row["cuda_graph"]


# Rows, time and interruptions


def test_rows_beyond_the_budget_are_listed_and_made_by_the_next_run(tmp_path: Path) -> None:
    clock = Clock()
    tasks = [clock.task("a", 1.0, 4.0), clock.task("b", 2.0, 2.0), clock.task("c", 1.0, 1.0)]
    record = new_record(tmp_path)
    worked(record, tasks, clock, 9.0)  # a takes four times its estimate, so b is expected to take eight seconds
    assert [row["key"] for row in record.rows] == ["a", "c"]
    assert record.skipped == {"b": "needs about 8 s, 5 s were left"}
    again = new_record(tmp_path)
    assert again.as_json() == record.as_json()
    worked(again, tasks, clock, 9.0)
    assert [row["key"] for row in again.rows] == ["a", "c", "b"]
    assert new_record(tmp_path).as_json()["skipped"] == []


def test_failed_rows_are_retried_by_the_next_run(tmp_path: Path) -> None:
    clock = Clock()
    cases: dict[str, Exception] = {
        "absent": Missing("no such library"),
        "absent too": ModuleNotFoundError("No module named 'x'"),
        "refused": Refused("another answer"),
        "oom": RuntimeError("CUDA out of memory. Tried to allocate"),
        "failed": ValueError("two\nlines"),
    }
    tasks = [clock.task(key, 0.0, 0.5, error) for key, error in cases.items()]
    record = new_record(tmp_path)
    told = worked(record, tasks, clock, 60.0)
    assert [row["status"] for row in record.rows] == ["absent", "absent", "refused", "oom", "failed"]
    assert record.rows[-1]["reason"] == "ValueError: two lines"
    assert told[0] == "part: absent: absent in 0.5 s Missing: no such library"
    assert worked(record, tasks, clock, 60.0) == []
    again = new_record(tmp_path)
    worked(again, [clock.task(key, 0.0, 0.5) for key in cases], clock, 60.0)
    assert {row["status"] for row in again.rows} == {"done"}
    assert len(again.rows) == len(cases)


def test_interrupt_keeps_finished_rows(tmp_path: Path) -> None:
    clock = Clock()

    def interrupted() -> Row:
        raise KeyboardInterrupt

    record = new_record(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        worked(record, [clock.task("a", 1.0, 1.0), Task(key="b", estimate_s=1.0, run=interrupted)], clock, 60.0)
    assert [row["key"] for row in new_record(tmp_path).rows] == ["a"]


# What is timed


def test_timed_call_with_different_outputs_is_refused(setting: Setting) -> None:
    plain = torch.ones(2, 3)
    subjects.refuse_unequal(plain * 1.005, plain, 1e-2)
    for wrong in (plain * 1.02, torch.full_like(plain, torch.nan), torch.zeros_like(plain)):
        with pytest.raises(Refused):
            subjects.refuse_unequal(wrong, plain, 1e-2)


class Forgetful(nn.Module):
    """Answers otherwise from its second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.flatten(1) * self.calls


def test_refused_geometry_is_reported_and_refused_dense_model_ends_the_row() -> None:
    batch = np.ones((1, 3, 2, 2), dtype=np.float32)

    def subject(module: nn.Module) -> subjects.Subject:
        return subjects.Subject(module=module, mode="graph", precision="fp32", device="cpu")

    bounds, refused = race.bounds_of({"dense": subject(nn.Flatten()), "square": subject(Forgetful())}, batch)
    assert list(bounds) == ["dense", "dense again"]
    assert "differs from the plain one by 1" in refused["square"]
    with pytest.raises(Refused):
        race.bounds_of({"dense": subject(Forgetful())}, batch)


# Kernels


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("flash", ["void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128>>", "gemm_sm90"]),
        ("flash", ["void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<Mainloop>>>"]),
        ("mem-efficient", ["fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)"]),
        ("cudnn", ["cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x64_4x1x1"]),
        ("math", ["void (anonymous namespace)::softmax_warp_forward<float>", "gemm_sm90"]),
        ("cudnn + flash", ["aten::_scaled_dot_product_cudnn_attention", "pytorch_flash::flash_fwd_kernel"]),
        ("none seen", ["aten::layer_norm", "cudnn::nhwc_conv", "sm90_xmma_gemm_f16"]),
    ],
)
def test_kernels_are_classified_by_name(kind: str, names: list[str]) -> None:
    assert attention_kind(names) == kind


# Engines


@pytest.mark.slow("engine")
def test_engines_are_built_in_parts_carried_over_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "PART_BYTES", 100_000)
    monkeypatch.setattr(engines, "VARIANTS", ("dense", "padded", "merged"))
    monkeypatch.setattr(Setting, "models", {"DeiT-T": MODELS["DeiT-T"]})
    folder = tmp_path / "engines"
    built = CliRunner().invoke(engines.main, ["--output", str(folder), "--small"], catch_exceptions=False)
    assert "attentions fused" in built.output
    parts = sorted((folder / "DeiT-T-padded").glob("part.*"))
    assert len(parts) > 1
    record = run(tmp_path, "engines", "--engines", str(folder))
    padded, merged = record["rows"]
    assert (padded["status"], merged["status"]) == ("done", "done")
    assert [row["batch"] for row in padded["rows"]] == list(engines.BATCHES)
    assert padded["attention_sites"] == padded["dense"]["attention_sites"] == 2
    assert "| DeiT-T | padded |" in (tmp_path / "gpu.md").read_text()
    parts[-1].write_bytes(b"damaged")
    (folder / "DeiT-T-merged" / "part.000").unlink()
    again = run(tmp_path / "again", "engines", "--engines", str(folder))
    assert ["those of another plan" in again["rows"][0]["reason"], "are not here" in again["rows"][1]["reason"]] == [
        True
    ] * 2


# Goals


def test_ratios_are_judged_by_their_intervals() -> None:
    assert at_least([1.7, 1.65, 1.8], 1.64) == "met"
    assert at_least([1.7, 1.60, 1.8], 1.64) == "undecided"
    assert at_least([1.5, 1.40, 1.6], 1.64) == "not met"
    assert at_least([1.7, 0.0, None], 1.64) == "undecided"
    assert at_least(None, 1.64) == "not measured"
    assert together(["met", "undecided"]) == "undecided"
    assert together(["undecided", "not met", "not measured"]) == "not met"
    assert together(["met", "met"]) == "met"


# Variants


@pytest.mark.slow("models")
def test_every_variant_is_measured_at_its_requested_share(tmp_path: Path) -> None:
    record = run(tmp_path, "variants")
    assert [(row["about"], row["model"], row["status"], row["refused"]) for row in record["rows"]] == [
        ("bf16", "DeiT-T", "done", {}),
        ("merging", "DeiT-T", "done", {}),
        ("eight bits", "DeiT-T", "done", {}),
        ("convnet", "ResNet-50", "done", {}),
        ("convnet", "ConvNeXt-B", "done", {}),
    ]
    row = row_of(record, "merging DeiT-T batch 2")
    shares = {name.split(" ")[0]: kept / row["macs"]["dense"] for name, kept in row["macs"].items()}
    assert list(shares) == ["dense", "merge", "drop", "square"]
    assert all(0.85 < share <= 0.92 for name, share in shares.items() if name != "dense")
    for row in record["rows"][-2:]:
        dense, *reduced = row["macs"].values()
        assert all(0.8 < kept / dense <= 0.9 for kept in reduced)


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
def test_eight_bit_product_equals_that_of_rounded_factors(how: Any) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(32, 16), torch.randn(2, 10, 32)
    made = QuantisedLinear(linear, float(x.abs().max()), how)
    with torch.no_grad():
        expected = by_loops(linear, x, how)
        torch.testing.assert_close(made(x).double(), expected, rtol=1e-3, atol=1e-3)
    plain = linear(x).double()
    assert 1e-4 < float((expected - plain).detach().norm() / plain.detach().norm()) < 0.1


def test_only_fitting_block_layers_use_eight_bits(setting: Setting) -> None:
    model = models.dense("DeiT-T", setting)
    images = torch.randn(2, 3, 32, 32)
    made = quantised(model, models.block_names(model), images, "int8")
    names = {name for name, module in made.named_modules() if isinstance(module, QuantisedLinear)}
    layers = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert names == {f"blocks.{block}.{layer}" for block in (0, 1) for layer in layers}
    assert not any(isinstance(module, QuantisedLinear) for module in model.modules())


def test_quantised_model_far_from_the_plain_one_is_refused(monkeypatch: pytest.MonkeyPatch, setting: Setting) -> None:
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


# Real weights are packed small, and on a GPU reduced and judged.

KWARGS = {"img_size": 32, "patch_size": 8, "num_classes": 0}


def pictures(count: int, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Blurred noise [N,3,32,32], normalised, which JPEG leaves about as it is."""
    noise = np.random.default_rng(seed).uniform(0, 255, (count, 4, 4, 3)).astype(np.uint8)
    large = [np.asarray(Image.fromarray(each).resize((32, 32), Image.Resampling.BICUBIC)) for each in noise]
    return packed.normalised(np.stack(large).transpose(0, 3, 1, 2)).numpy()


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files of `make real` for a tiny model whose blocks all matter."""
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


def test_packed_weights_round_trip_up_to_rounding(ready: Path, folder: Path) -> None:
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


@pytest.mark.slow("training")
def test_every_real_weight_reduction_is_made_and_judged(folder: Path, tmp_path: Path) -> None:
    record = run(tmp_path, "real", "--packed", str(folder))
    assert {row["status"] for row in record["rows"]} == {"done"}
    first, *reductions = record["rows"]
    counts = ("images", "photographs", "held_out_images", "held_out_photographs")
    assert [first[name] for name in counts] == [24, 8, 6, 2]
    assert {(row["widths"], row["loop"]) for row in reductions} == {
        (widths, loop) for widths in ("uniform", "by site") for loop in ("open", "closed")
    }
    for row in reductions:
        assert row["macs_share"] <= 0.8
        assert 0.0 < row["class_error"] < 1.0
        assert ("closed loop" in row["efforts"]) == (row["loop"] == "closed")


def test_missing_packed_weights_are_reported_in_every_row(tmp_path: Path) -> None:
    rows = run(tmp_path, "real", "--packed", str(tmp_path / "none"))["rows"]
    assert {row["status"] for row in rows} == {"absent"}
    assert all("nothing packed here" in row["reason"] for row in rows)
