"""The GPU benchmark runs on tiny models, goes on where it stopped, lists what it skipped, and judges by its records."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.gpu import (
    calibration,
    engines,
    images,
    models,
    race,
    subjects,
)
from benchmarks.gpu.goals import at_least, together
from benchmarks.gpu.kernels import attention_kind
from benchmarks.gpu.record import Budget, Record, Refused, Task, work
from benchmarks.gpu.run import main
from benchmarks.gpu.setting import Setting
from ground.errors import Missing
from ground.gpu import require_cuda

pytestmark = pytest.mark.nightly

try:
    require_cuda()
    NO_GPU = ""
except Missing as error:
    NO_GPU = str(error)

Row = dict[str, Any]
PARTS = ("calibration", "latency", "engines", "accuracy")


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(device="cpu", small=True, everything=False, cache=tmp_path / "cache")


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whole small run."""
    folder = tmp_path_factory.mktemp("gpu") / "out"
    only = ",".join(PARTS)  # the others have tests of their own
    main(["--output", str(folder), "--small", "--device", "cpu", "--only", only], say=lambda line: None)
    return folder


def read(folder: Path, part: str) -> Row:
    record: Row = json.loads((folder / f"gpu_{part}.json").read_text())
    return record


def rows_of(folder: Path, part: str, **wanted: Any) -> list[Row]:
    return [row for row in read(folder, part)["rows"] if all(row.get(key) == value for key, value in wanted.items())]


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
    return Record.opened(tmp_path / "record.json", "part", {"gpu": gpu}, {"small": True}, ("gpu",))


# The whole run


@pytest.mark.slow("graph", "engine", "training")
def test_every_part_writes_a_record_whose_rows_are_done_or_absent(output: Path) -> None:
    for part in PARTS:
        record = read(output, part)
        assert (record["kind"], record["version"], record["skipped"]) == (f"benchmarks/gpu/{part}", 1, [])
        unfinished = [row for row in record["rows"] if row["status"] not in ("done", "absent")]
        assert unfinished == []
        assert {row["status"] for row in record["rows"]} == {"done"} or part == "engines"


@pytest.mark.slow("graph")
def test_calibration_tells_ratio_share_and_the_papers_seconds(output: Path) -> None:
    row = rows_of(output, "calibration", key="calibrate DeiT-H float32")[0]
    assert (row["images"], len(row["part_seconds"])) == (32, calibration.PARTS)
    assert list(row["bare_seconds"]) == ["0", "4"]
    taken = [row["part_seconds"][int(part)] / bare for part, bare in row["bare_seconds"].items()]
    assert row["ratio_to_bare"] == pytest.approx(sum(taken) / 2)
    ideal_s = (row["forward_flops"] + row["sums_flops"]) / row["product_tflops"]["float32"] / 1e12
    assert row["share_of_peak"] == pytest.approx(ideal_s / sum(row["part_seconds"]))
    assert row["paper_seconds_rtx3090"] == 4920
    assert rows_of(output, "calibration", row="reduction")[0]["extrapolated"] is False


def test_flops_are_those_counted_by_hand(setting: Setting) -> None:
    tokens, dim, hidden, heads, head, patches = 17, 48, 192, 3, 16, 16
    block = tokens * dim * (4 * dim + 2 * hidden) + 2 * heads * tokens * tokens * head
    forward = 2 * block + patches * 3 * 64 * dim + dim * 24
    grams = tokens * hidden * (hidden + 1) // 2 + tokens * dim * (dim + 1) // 2 + 2 * tokens * heads * head**2
    count = tokens  # of every attention, beside the sums of its queries and keys
    assert calibration.work_flops(models.dense("DeiT-T", setting), "cpu") == (2 * forward, 2 * 2 * (grams + count))


@pytest.mark.slow("graph")
def test_latency_compares_every_geometry_with_dense_in_the_same_rounds(output: Path) -> None:
    row = rows_of(output, "latency", key="DeiT-H graph 50% batch 2")[0]
    compilers = [rows_of(output, "latency", mode=mode)[0]["compiler"] for mode in ("compiled", "graph")]
    assert compilers == ["eager", None]
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
def test_a_second_run_makes_nothing_again_and_one_row_that_is_gone(output: Path) -> None:
    before = read(output, "calibration")
    kept = [row for row in before["rows"] if row["key"] != "reduce DeiT-H cpu"]
    (output / "gpu_calibration.json").write_text(json.dumps(before | {"rows": kept}))
    told: list[str] = []
    main(["--output", str(output), "--small", "--device", "cpu", "--only", "calibration"], say=told.append)
    assert [line.split(":")[1].strip() for line in told[:-1]] == ["reduce DeiT-H cpu"]
    assert read(output, "calibration")["rows"][:-1] == kept
    assert "## Latency\n\ntorch fp32" in (output / "gpu.md").read_text()


def test_wrong_options_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path), "--only", "speed"])
    assert "expected some of calibration, latency, variants, engines, accuracy, real" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path), "--budget-s", "0"])


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU here")
def test_a_gpu_asked_for_and_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="sees no CUDA GPU"):
        main(["--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)
def test_every_part_runs_small_on_the_gpu(tmp_path: Path) -> None:
    main(["--output", str(tmp_path), "--small", "--device", "cuda"], say=lambda line: None)
    for row in rows_of(tmp_path, "latency", row="latency"):
        assert (row["status"], row["refused"], row["cuda_graph"]) == ("done", {}, True), row
    for row in rows_of(tmp_path, "latency", row="attention"):
        assert row["kernels"]["dense"]["kind"] != "none seen"
    assert {row["status"] for row in rows_of(tmp_path, "accuracy")} == {"done"}


# Rows, time and interruptions


def test_what_the_time_does_not_allow_is_listed_and_made_by_the_next_run(tmp_path: Path) -> None:
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


def test_errors_are_rows_and_are_tried_again_by_the_next_run_alone(tmp_path: Path) -> None:
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


def test_an_interrupt_loses_no_finished_row(tmp_path: Path) -> None:
    clock = Clock()

    def interrupted() -> Row:
        raise KeyboardInterrupt

    record = new_record(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        worked(record, [clock.task("a", 1.0, 1.0), Task(key="b", estimate_s=1.0, run=interrupted)], clock, 60.0)
    assert [row["key"] for row in new_record(tmp_path).rows] == ["a"]


# What is timed


def test_a_timed_call_with_another_answer_is_refused(setting: Setting) -> None:
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


def test_a_refused_geometry_is_told_and_a_refused_dense_model_ends_the_row() -> None:
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
def test_kernels_are_told_apart_by_name(kind: str, names: list[str]) -> None:
    assert attention_kind(names) == kind


# Images


def test_images_follow_from_part_seed_and_number() -> None:
    one, labels = images.batch("train", 3, 48, size=32, device="cpu")
    same, _ = images.batch("train", 3, 48, size=32, device="cpu")
    assert torch.equal(one, same)
    assert torch.bincount(labels).tolist() == [2] * 24
    others = [("train", 4, 0), ("check", 3, 0), ("train", 3, 1)]
    for part, number, seed in others:
        assert not torch.equal(one, images.batch(part, number, 48, size=32, device="cpu", seed=seed)[0])
    with pytest.raises(ValueError, match="got 'test'"):
        images.batch("test", 0, 1, size=32, device="cpu")


# Engines


@pytest.mark.slow("graph")
def test_the_chain_of_parity_runs_without_an_engine(setting: Setting) -> None:
    row = engines.proved(setting, None)
    assert [link["name"] for link in row["links"]] == ["reduced", "reduced-onnx-fp32", "reduced-onnx-fp16", "whole"]
    assert row["links"][1]["relative_error"] < 1e-5


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
