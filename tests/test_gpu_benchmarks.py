"""The GPU benchmark runs on tiny models, goes on where it stopped, lists what it skipped, and judges by its records."""

import copy
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu import (
    accuracy,
    calibration,
    engines,
    images,
    latency,
    load,
    models,
    race,
    reduction,
    subjects,
    training,
)
from benchmarks.gpu.goals import at_least, judged, together
from benchmarks.gpu.kernels import attention_kind, profiled
from benchmarks.gpu.needed import lacks
from benchmarks.gpu.page import page
from benchmarks.gpu.record import Budget, OtherMachine, Record, Refused, Task, work
from benchmarks.gpu.run import main
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.workshop import Workshop
from benchmarks.pages import measured
from benchmarks.pages.headline import NO_GPU as UNMEASURED
from benchmarks.pages.headline import headline
from corp_deploy.families import traced_model
from corp_deploy.families.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, save
from ground.errors import Missing
from ground.feeds import Feeds
from ground.gpu import require_cuda
from perf.runners.cuda import Staging
from perf.runners.protocol import HostBound

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


def test_a_part_of_the_blocks_is_scaled_to_all(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = load.Load(bare_every=1, cpu_blocks=1, seconds={}, reduction_s={})
    monkeypatch.setitem(load.LOADS, "DeiT-H", plan)
    row = reduction.reduced("DeiT-H", "cpu", setting)
    assert (row["blocks_timed"], row["blocks"], row["extrapolated"]) == (1, 2, True)
    assert row["seconds_timed"] < row["seconds"] <= 2 * row["seconds_timed"]


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
def test_accuracy_sweeps_presets_seeds_loops_and_sizes(output: Path) -> None:
    rows = rows_of(output, "accuracy", row="reduction")
    assert {(row["preset"], row["loop"], row["seed"], row["images"]) for row in rows} == {
        *((preset, "open", seed, 16) for preset in ("best", "corp") for seed in (0, 1)),
        *(("best", loop, seed, 8) for seed in (0, 1) for loop in ("open", "closed")),
        ("best", "polished", 0, 8),
    }
    assert all(0.0 < row["relative_error"] < 1.0 and row["reduced_on"] == "cpu" for row in rows)
    trained = rows_of(output, "accuracy", row="training")[0]
    assert trained["images"] == 24 * trained["steps"] > 0


@pytest.mark.slow("graph")
def test_the_page_tells_rows_absences_and_that_a_cpu_says_nothing_of_gpus(output: Path) -> None:
    text = (output / "gpu.md").read_text()
    assert text == page({part: read(output, part) for part in PARTS})
    assert "where these numbers only show that the scripts run" in text
    assert "| met |" not in text
    for row in read(output, "engines")["rows"]:
        assert row["status"] == "done" or f"* {row['key']}: absent ({row['reason']})" in text
    assert f"{rows_of(output, 'accuracy', preset='corp', seed=0)[0]['images']} |" in text


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


@pytest.mark.slow("graph")
def test_accuracy_begins_anew_without_its_weights(output: Path, setting: Setting) -> None:
    path = output / "gpu_accuracy.json"
    before = path.read_bytes()
    held = read(output, "accuracy")
    try:
        record = Record.opened(path, "accuracy", held["environment"], held["settings"], ())
        there = Setting(device="cpu", small=True, everything=False, cache=output / "cache")
        accuracy.tasks(there, record)
        assert len(record.rows) == len(held["rows"])
        accuracy.tasks(setting, record)
        assert record.rows == []
    finally:
        path.write_bytes(before)


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


def test_no_time_left_skips_rows_that_cost_nothing(tmp_path: Path) -> None:
    clock = Clock()
    record = new_record(tmp_path)
    worked(record, [clock.task("a", 0.0, 0.0)], clock, 0.0)
    assert record.skipped == {"a": "needs about 0 s, 0 s were left"}


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


def test_a_row_that_rests_on_a_later_one_waits_for_the_next_pass(tmp_path: Path, setting: Setting) -> None:
    clock, shop = Clock(), Workshop(setting)
    waiting = Task(key="judged", estimate_s=0.0, run=lambda: {"depth": traced_model.depth(shop.model())})
    record = new_record(tmp_path)
    worked(record, [waiting], clock, 1.0)
    assert (record.rows, list(record.skipped)) == ([], ["judged"])
    architecture = training.architecture(setting)
    save(Checkpoint(model=dense_from_architecture(architecture), architecture=architecture, lineage={}), shop.folder)
    worked(record, [waiting], clock, 1.0)
    assert (record.rows[0]["depth"], record.skipped) == (2, {})


def test_an_interrupt_loses_no_finished_row(tmp_path: Path) -> None:
    clock = Clock()

    def interrupted() -> Row:
        raise KeyboardInterrupt

    record = new_record(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        worked(record, [clock.task("a", 1.0, 1.0), Task(key="b", estimate_s=1.0, run=interrupted)], clock, 60.0)
    assert [row["key"] for row in new_record(tmp_path).rows] == ["a"]


def test_rows_of_another_machine_or_setting_are_not_gone_on_with(tmp_path: Path) -> None:
    worked(new_record(tmp_path), [Clock().task("a", 0.0, 0.0)], Clock(), 1.0)
    with pytest.raises(OtherMachine, match="gpu: 'one' then, 'two' now"):
        new_record(tmp_path, gpu="two")
    with pytest.raises(OtherMachine, match="settings"):
        Record.opened(tmp_path / "record.json", "part", {"gpu": "one"}, {"small": False}, ("gpu",))


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


class Pretended:
    """Staging on the CPU: the model's input and output stay at their addresses, as they do on a GPU."""

    def __init__(self, batch: torch.Tensor, shape: tuple[int, ...]) -> None:
        self.device_in, self.device_out = {"images": batch}, {"logits": torch.empty(shape)}
        self.host_out = {"logits": torch.zeros(shape)}

    def bound(self, launch: Callable[[], object], *, flush_l2: bool) -> Any:
        def call() -> None:
            launch()
            self.host_out["logits"].copy_(self.device_out["logits"])

        return HostBound(call)


@pytest.mark.parametrize(("replayed", "wrong"), [(True, ""), (False, "nan")])
def test_a_graph_must_write_the_plain_calls_answer(
    monkeypatch: pytest.MonkeyPatch, setting: Setting, replayed: bool, wrong: str
) -> None:
    made: list[Pretended] = []

    def hold(stream: object, feeds: Feeds, shapes: dict[str, tuple[int, ...]]) -> Pretended:
        made.append(Pretended(torch.from_numpy(feeds["images"]), shapes["logits"]))
        return made[-1]

    monkeypatch.setattr(subjects, "open_stream", object)
    monkeypatch.setattr(Staging, "hold", hold)
    monkeypatch.setattr(subjects, "captured", lambda stream, launch: launch if replayed else lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    batch = images.batch("check", 0, 2, size=32, device="cpu")[0].numpy()
    subject = subjects.Subject(module=models.dense("DeiT-T", setting), mode="graph", precision="fp32", device="cpu")
    bound, answer = subject._bound_on_gpu(batch, (2, 24))
    bound.laps(1, perf_counter_ns)
    if wrong:
        with pytest.raises(Refused, match=wrong):
            subjects.refuse_unequal(answer(), subject.plain(batch), 1e-4)
    else:
        subjects.refuse_unequal(answer(), subject.plain(batch), 1e-4)


@pytest.mark.slow("models")
def test_every_case_is_there_once_and_the_goals_come_first(setting: Setting) -> None:
    full = Setting(device="cpu", small=False, everything=True, cache=setting.cache)
    record = Record(setting.cache / "x.json", "latency", {}, {})
    keys = [task.key for task in latency.tasks(full, record, watch=lambda: None)]
    assert (len(keys), keys[5]) == (len(set(keys)), "DeiT-H graph 50% batch 16")
    assert set(keys[6:11]) == {f"{name} graph 50% batch 1" for name in full.models}
    wanted = {
        f"{name} {mode} {sparsity:.0%} batch {batch}"
        for name in full.models
        for mode in ("graph", "compiled")
        for sparsity in latency.SPARSITIES
        for batch in (1, 8, 16, 32, 64, 256)
    }
    assert wanted <= set(keys)


def test_half_of_a_huge_head_is_forty(setting: Setting) -> None:
    full = Setting(device="meta", small=False, everything=False, cache=setting.cache)
    with torch.device("meta"):
        dense = dense_from_architecture(Architecture(name="deit3_huge_patch14_224", kwargs={"depth": 1}))
    facts = models.facts(models.reduced(dense, 0.5, "ragged", full))
    assert {name: facts[name] for name in facts if name != "macs"} == {"hidden": 2560, "qk": 40, "v": 80}


def test_random_weights_are_lively(setting: Setting) -> None:
    model = models.dense("DeiT-H", setting)
    scales = [parameter for name, parameter in model.named_parameters() if name.endswith(".gamma")]
    assert len(scales) == 4
    assert all(bool((scale == models.LAYER_SCALE).all()) for scale in scales)
    damaged = copy.deepcopy(model)
    damaged.get_submodule(f"{models.block_names(damaged)[0]}.mlp.fc2").weight.data.zero_()  # type: ignore[operator]
    batch, _ = images.batch("check", 0, 4, size=32, device="cpu")
    one, two = model(batch), damaged(batch)
    assert float((one - two).norm() / one.norm()) > 0.05


def test_what_fails_on_the_gpu_is_made_on_the_cpu_and_says_why(tmp_path: Path) -> None:
    shop = Workshop(Setting(device="cuda", small=True, everything=False, cache=tmp_path))
    asked: list[str] = []

    def work(where: str) -> str:
        asked.append(where)
        if where == "cuda":
            raise RuntimeError("expected all tensors on one device")
        return "made"

    told = {"reduced_on": "cpu", "not_on_gpu": "RuntimeError: expected all tensors on one device"}
    assert [shop.somewhere("closed", work) for _ in range(2)] == [("made", told)] * 2
    assert asked == ["cuda", "cpu", "cpu"]
    assert shop.somewhere("open", lambda where: where) == ("cuda", {"reduced_on": "cuda"})


# Kernels


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("flash", ["void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128>>", "gemm_sm90"]),
        ("flash", ["aten::_scaled_dot_product_flash_attention_for_cpu", "aten::addmm"]),
        ("flash", ["void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<Mainloop>>>"]),
        ("mem-efficient", ["fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)"]),
        ("mem-efficient", ["aten::_scaled_dot_product_efficient_attention", "aten::_softmax"]),
        ("cudnn", ["cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x64_4x1x1"]),
        ("cudnn", ["aten::_scaled_dot_product_cudnn_attention"]),
        ("math", ["void (anonymous namespace)::softmax_warp_forward<float>", "gemm_sm90"]),
        ("math", ["aten::_scaled_dot_product_attention_math"]),
        ("cudnn + flash", ["aten::_scaled_dot_product_cudnn_attention", "pytorch_flash::flash_fwd_kernel"]),
        ("none seen", ["aten::layer_norm", "cudnn::nhwc_conv", "sm90_xmma_gemm_f16"]),
    ],
)
def test_kernels_are_told_apart_by_name(kind: str, names: list[str]) -> None:
    assert attention_kind(names) == kind


def test_a_profile_shows_the_attention_that_ran(setting: Setting) -> None:
    batch, _ = images.batch("check", 0, 2, size=32, device="cpu")
    model = models.dense("DeiT-T", setting)
    assert profiled(model, batch)["kind"] == "flash"
    with sdpa_kernel(SDPBackend.MATH):
        assert profiled(model, batch)["kind"] == "math"


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


def test_bytes_hold_the_images() -> None:
    held = images.held_in_bytes("calibration", 5, size=32, device="cpu")
    wanted, _ = images.batch("calibration", 0, images.DRAWN, size=32, device="cpu")
    assert held.shape == (5, 3, 32, 32)
    found = images.images_from_bytes(held, "cpu")
    assert float((found - wanted[:5].clamp(-2.0, 127 / 64)).abs().max()) <= 0.5 / images.STEPS + 1e-6


# Engines


@pytest.mark.slow("graph")
def test_the_chain_of_parity_runs_without_an_engine(setting: Setting) -> None:
    row = engines.proved(setting, None)
    assert [link["name"] for link in row["links"]] == ["reduced", "reduced-onnx-fp32", "reduced-onnx-fp16", "whole"]
    assert row["links"][1]["relative_error"] < 1e-5


def test_full_tensorrt_is_asked_for_before_anything_is_made(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def work() -> Row:
        made.append("made")
        return {}

    monkeypatch.setattr(engines, "import_module", lambda name: None)
    with pytest.raises(Missing, match="was asked for the CPU"):
        engines.in_full_tensorrt(work, setting)
    assert made == []


# Goals


def latency_row(model: str, batch: int, **speedups: list[float | None]) -> Row:
    measured = {name: {"speedup": value} for name, value in speedups.items()}
    return {"row": "latency", "status": "done", "mode": "graph", "sparsity": 0.5, "model": model, "batch": batch} | {
        "subjects": measured
    }


def calibration_rows(calibrate_s: float, reduce_s: float, images: int = 4000) -> list[Row]:
    head = {"status": "done", "model": "DeiT-H"}
    return [
        head | {"row": "calibration", "forward": "float32", "images": images, "seconds": calibrate_s},
        head | {"row": "reduction", "where": "cpu", "seconds": reduce_s + 5.0, "extrapolated": True},
        head | {"row": "reduction", "where": "cuda", "seconds": reduce_s, "extrapolated": False},
    ]


def verdicts(calibration: list[Row], latency: list[Row]) -> dict[str, str]:
    return {goal.wanted: goal.verdict for goal in judged(calibration, latency)}


def test_ratios_are_judged_by_their_intervals() -> None:
    assert at_least([1.7, 1.65, 1.8], 1.64) == "met"
    assert at_least([1.7, 1.60, 1.8], 1.64) == "undecided"
    assert at_least([1.5, 1.40, 1.6], 1.64) == "not met"
    assert at_least([1.7, 0.0, None], 1.64) == "undecided"
    assert at_least(None, 1.64) == "not measured"
    assert together(["met", "undecided"]) == "undecided"
    assert together(["undecided", "not met", "not measured"]) == "not met"
    assert together(["met", "met"]) == "met"


def test_goals_are_judged_from_the_rows() -> None:
    sizes = ("DeiT-T", "DeiT-S", "DeiT-B", "DeiT-L", "DeiT-H")
    rows = [latency_row(size, 1, padded=[1.1, 1.05, 1.2], ragged=[0.9, 0.8, 0.95]) for size in sizes]
    rows.append(latency_row("DeiT-H", 16, padded=[1.7, 1.65, 1.75], square=[1.5, 1.4, 1.6]))
    found = list(verdicts(calibration_rows(40.0, 15.0), rows).values())
    assert found == ["met", "met", "not met", "not measured", "met", "not measured", "not met"]
    assert next(iter(verdicts(calibration_rows(40.0, 21.0), rows).values())) == "not met"
    assert next(iter(verdicts(calibration_rows(4.0, 1.0, images=32), rows).values())) == "not measured"
    del rows[0]
    assert list(verdicts([], rows).values())[0::4] == ["not measured", "not measured"]


@pytest.mark.slow("graph")
def test_the_page_has_gpu_tables_only_from_records_of_a_gpu(
    output: Path, tmp_path: Path, gpu_record: Callable[[str], Row]
) -> None:
    assert measured.on_gpus(tmp_path) == []
    assert "There is no such record yet" in measured.of_gpus(tmp_path)
    assert measured.on_gpus(output) == []
    for part in ("calibration", "latency", "accuracy"):
        (tmp_path / f"gpu_{part}.json").write_text(json.dumps(gpu_record(part)))
    goals, *tables = measured.on_gpus(tmp_path)
    assert "DeiT-H" in goals
    assert len(tables) == 3
    assert all("on Some GPU (compute capability 9.0)" in table for table in tables)
    assert "| compiled |" not in tables[1]
    assert measured.of_gpus(tmp_path).endswith(tables[-1])


@pytest.mark.slow("graph")
def test_the_headline_has_a_gpus_figures_or_says_that_there_are_none(
    tmp_path: Path, gpu_record: Callable[[str], Row]
) -> None:
    for path in measured.RESULTS.glob("*.json"):
        if not path.name.startswith("gpu_"):
            (tmp_path / path.name).symlink_to(path)
    assert headline(tmp_path, "").endswith(UNMEASURED)
    latency, calibration = gpu_record("latency"), gpu_record("calibration")
    latency["rows"] = [latency_row("DeiT-H", 16, padded=[1.72, 1.65, 1.75], square=[1.5, 1.4, 1.6])]
    calibration["rows"] = calibration_rows(40.0, 15.0)
    for part, record in (("latency", latency), ("calibration", calibration)):
        (tmp_path / f"gpu_{part}.json").write_text(json.dumps(record))
    *_, throughput, calibrated = headline(tmp_path, "at/").splitlines()
    assert throughput.startswith("| [Some GPU, torch FP16](at/gpu.md) | throughput over dense of DeiT-H")
    assert throughput.endswith("| 1.72 times (padded), 1.50 times (square) |")
    assert calibrated.endswith("= 55.0 s: met |")


@pytest.fixture
def gpu_record(output: Path) -> Callable[[str], Row]:
    """A small record dressed up as a GPU's."""

    def dressed(part: str) -> Row:
        record = read(output, part)
        gpu = {"gpu": "Some GPU", "sm": "9.0", "driver": "1", "torch_cuda": "13.0"}
        return record | {
            "environment": record["environment"] | gpu,
            "settings": record["settings"] | {"small": False, "device": "cuda"},
        }

    return dressed


@pytest.mark.parametrize(
    ("found", "words"), [("1.0.31", ""), ("1.1.0.dev0", ""), ("1.0.25", "got 1.0.25"), (None, "got none")]
)
def test_a_timm_that_will_not_do_is_told_before_anything_runs(found: str | None, words: str) -> None:
    lines = lacks(lambda package: found if package == "timm" else "99.0")
    assert [words in line and line.startswith("timm") for line in lines[:-1]] == ([True] if words else [])
