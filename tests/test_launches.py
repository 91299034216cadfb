"""Measurements in several fresh processes: their joint record, its statistics and views, and the processes."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from scipy import stats

import corp_deploy
from corp_deploy.api.models import Directory
from corp_deploy.invocation.running import BenchOptions, FedOptions
from corp_deploy.invocation.table import BENCH_OF
from corp_deploy.proof import launches as processes
from corp_deploy.release.baseline import Baseline
from corp_deploy.release.card import speed_lines
from corp_deploy.release.pace import limited_seconds
from corp_deploy.release.recipe_file import load_recipe
from corp_deploy.release.stages import stages_of
from corp_deploy.spec.trusted_code import trusting_code
from corp_deploy.views.speed import launch_lines, speed_record
from ground.errors import BadInput, Missing
from perf.bench.launches import join_launches
from perf.gate.evidence import Evidence
from perf.gate.gate import judge
from perf.gate.rule import rule_from_text
from perf.record.runs import OUT_OF_TIME, Bench, load_bench, save_bench
from perf.report.content import Content
from perf.report.render import markdown_from_content
from perf.stats.quiet import quiet_spans
from perf.stats.summary import SummaryRow, summarise
from perf.stats.trend import read_figures
from tests.command import invoked
from tests.doubles import some
from tests.histories import bench_of_release
from tests.powered import energy_of
from tests.recipes import recipe
from tests.refusals import rejects

SPEEDUPS = (1.25, 1.4, 1.3)


def launch_of(speedup: float, seed: int = 0, *, lost: float = 0.0, batches: Sequence[int] = (1,)) -> Bench:
    return bench_of_release(0, 5.0 / speedup, seed=seed, lost=lost, batches=batches)


def joined(speedups: Sequence[float] = SPEEDUPS) -> Bench:
    return join_launches([launch_of(speedup, seed) for seed, speedup in enumerate(speedups)])


def only_row(bench: Bench) -> SummaryRow:
    (row,) = summarise(bench).rows
    return row


def test_rounds_are_counted_over_launches_and_each_block_names_its_own() -> None:
    first, bench = launch_of(SPEEDUPS[0]), joined()
    (row,) = bench.rows
    assert [(block.round, block.launch) for block in row.blocks] == [
        (16 * launch + index, launch) for launch in range(3) for index in range(16) for _ in range(4)
    ]
    assert [block.compute_ms for block in row.blocks[:64]] == [block.compute_ms for block in first.rows[0].blocks]
    assert (bench.subjects, bench.settings) == (first.subjects, {"launches": 3})


def test_spread_is_that_between_launches_beside_that_expected_from_rounds() -> None:
    spread = some(only_row(joined()).launches)
    assert spread.speedups == pytest.approx(SPEEDUPS, rel=0.01)
    assert spread.between_rel == pytest.approx(np.std(np.log(spread.speedups), ddof=1), rel=1e-9)
    alone = [some(only_row(launch_of(each, seed)).speedup) for seed, each in enumerate(SPEEDUPS)]
    within = [(each.high - each.low) / 2 / each.value / stats.norm.ppf(0.975) for each in alone]
    assert spread.within_rel == pytest.approx(math.sqrt(sum(rel**2 for rel in within) / 3), rel=1e-9)
    assert spread.between_rel > 10 * some(spread.within_rel)
    assert only_row(launch_of(1.25)).launches is None


def test_intervals_of_times_and_rates_take_students_quantile_over_launches() -> None:
    row = only_row(joined())
    logs = np.log(some(row.launches).speedups)
    reach = stats.t.ppf(0.975, 2) * np.std(logs, ddof=1) / math.sqrt(3)
    interval = some(row.speedup)
    assert (interval.low, interval.high) == pytest.approx(
        (interval.value * math.exp(-reach), interval.value * math.exp(reach)), rel=1e-9
    )
    for each in (row.sides["reduced"].p50_ms, row.sides["reduced"].throughput):
        assert math.log(some(each).high / some(each).value) == pytest.approx(reach, rel=0.1)
    assert some(row.sides["dense"].p50_ms).half_width_rel < 0.05, "its time is the same in every launch"


def test_gate_and_trend_judge_by_the_variation_between_launches() -> None:
    rule, bench = rule_from_text("speedup@b1 < 1.2"), joined()
    assert judge([rule], Evidence(bench=launch_of(SPEEDUPS[0]))).rules[0].verdict == "PASS"
    judged = judge([rule], Evidence(bench=bench)).rules[0]
    assert judged.verdict == "INCONCLUSIVE"
    assert "more launches would decide" in judged.message
    assert judge([rule], Evidence(bench=joined([1.3, 1.3, 1.3]))).rules[0].verdict == "PASS"
    tail = rule_from_text("p90@b1 < 3.6")
    assert judge([tail], Evidence(bench=launch_of(1.3))).rules[0].verdict == "PASS"
    assert judge([tail], Evidence(bench=bench)).rules[0].verdict == "INCONCLUSIVE"
    row = only_row(bench)
    assert read_figures(bench, 1)[0] == (row.sides["dense"].p50_ms, row.sides["reduced"].p50_ms, row.speedup)


def test_spans_join_no_rounds_of_two_launches() -> None:
    """Each launch keeps the first of its two blocks a subject in a round, so that a span needs two rounds."""
    launches = [launch_of(1.3), launch_of(1.3)]
    for index, bench in enumerate(launches):
        blocks = bench.rows[0].blocks[:12]  # 3 rounds
        lost = [replace(each, lost_ms=(*each.compute_ms[:1], 0.0, *each.compute_ms[2:])) for each in blocks[::2]]
        busy = [replace(each, lost_ms=each.compute_ms) for each in blocks[1::2]]
        launches[index] = replace(bench, rows=(replace(bench.rows[0], blocks=(*lost, *busy)),))
    assert quiet_spans(join_launches(launches).rows[0].blocks) == [(0, 1), (3, 4)]


def test_disturbed_launch_makes_the_row_disturbed_and_its_rounds_count() -> None:
    bench = join_launches([launch_of(1.2), launch_of(1.4, lost=0.5)])
    row = only_row(bench)
    assert (row.disturbed, row.rounds) == (True, 32)
    assert some(row.launches).speedups == pytest.approx((1.2, 1.4), rel=0.02)
    assert judge([rule_from_text("speedup@b1 < 1")], Evidence(bench=bench)).rules[0].verdict == "INCONCLUSIVE"
    assert not only_row(join_launches([launch_of(1.2), launch_of(1.4)])).disturbed


@pytest.mark.parametrize(("status", "verdict"), [("oom", "FAIL"), (OUT_OF_TIME, "INCONCLUSIVE")])
def test_row_that_failed_in_one_launch_is_that_launchs(status: Any, verdict: str) -> None:
    good, bad = (launch_of(1.3, seed, batches=(1, 8)) for seed in range(2))
    trial = replace(bad.rows[1].trials["reduced"], status=status, message="no room")
    late = replace(bad.rows[1], blocks=(), stop="x", trials={**bad.rows[1].trials, "reduced": trial})
    bench = join_launches([good, replace(bad, rows=(bad.rows[0], late)), good])
    assert (len(bench.rows[0].blocks), bench.rows[1].blocks) == (3 * 64, ())
    assert bench.rows[1].trials["reduced"].message == "launch 2: no room"
    assert any("launch 2: no room" in warning for warning in bench.warnings)
    assert judge([rule_from_text("speedup@b8 < 1")], Evidence(bench=bench)).rules[0].verdict == verdict


def test_subject_that_changed_between_launches_is_refused() -> None:
    changed = bench_of_release(0, 4.0, sha256="b" * 64)
    rejects("dense changed between launches 2 and 3", join_launches, [launch_of(1.2), launch_of(1.2), changed])


def test_warnings_of_rows_are_those_of_all_launches_and_others_name_theirs() -> None:
    noisy = [bench_of_release(0, 4.0, seed=seed, spread=0.2) for seed in range(2)]
    told = [replace(each, warnings=("of both", *["of one"] * seed)) for seed, each in enumerate(noisy)]
    bench = join_launches(told)
    assert bench.warnings[:2] == ("of both", "launch 2: of one")
    varied = [warning for warning in bench.warnings if "samples vary" in warning]
    assert [warning.split(":")[0] for warning in varied] == ["batch 1, dense", "batch 1, reduced"]


def test_steady_launches_of_different_speed_are_no_drift() -> None:
    rising = [bench_of_release(0, 4.0, seed=seed, machine=1 + 0.2 * seed) for seed in range(4)]
    assert not [warning for warning in join_launches(rising).warnings if "drifted" in warning]


def test_energy_of_launches_is_joined_with_its_own_variation() -> None:
    spent = [energy_of({"dense": 2.0, "dense again": 2.0, "reduced": reduced}, spread=0.0) for reduced in (1.0, 1.5)]
    benches = [replace(launch_of(1.3), rows=(replace(launch_of(1.3).rows[0], energy=run),)) for run in spent]
    bench = join_launches(benches)
    joint = some(bench.rows[0].energy)
    rounds = max(block.round for block in spent[0].blocks) + 1
    assert [block.launch for block in joint.blocks] == [0] * len(spent[0].blocks) + [1] * len(spent[1].blocks)
    assert {block.round for block in joint.blocks} == set(range(2 * rounds))
    assert [block.joules for block in joint.idle] == [block.joules for run in spent for block in run.idle]
    energy = some(only_row(bench).energy)
    assert some(energy.ratio).high > 5, "two launches are few"
    assert some(energy.noise).half_width_rel < 0.01
    assert energy.joules["reduced"].half_width_rel > 1 > energy.joules["dense"].half_width_rel
    late = join_launches([benches[0], replace(benches[1], rows=(replace(benches[1].rows[0], energy=None),))])
    assert some(late.rows[0].energy) == replace(spent[0], blocks=some(late.rows[0].energy).blocks)


def test_records_of_launches_and_older_ones_are_read(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    save_bench(joined(), path)
    assert load_bench(path) == joined()
    save_bench(launch_of(1.3), path)
    record = json.loads(path.read_text())
    for block in record["rows"][0]["blocks"]:
        del block["launch"]
    path.write_text(json.dumps(record))
    assert load_bench(path) == launch_of(1.3)


def test_table_record_report_and_card_show_the_variation(tmp_path: Path) -> None:
    bench, one = joined(), launch_of(1.3)
    (line,) = launch_lines(bench)
    assert line.startswith("batch 1, speed-up of 3 launches: 1.2")
    between = f"{100 * some(only_row(bench).launches).between_rel:.2g} %"
    assert f"(standard deviation between launches {between}, within one " in line
    assert speed_record(bench)["rows"][0]["launches"]["speedups"] == some(only_row(bench).launches).speedups
    sentence = line.removeprefix("batch 1, ")
    for measured, count in ((bench, 1), (one, 0)):
        save_bench(measured, tmp_path / "bench.json")
        assert markdown_from_content(Content(title="digits", bench=measured)).count(sentence) == count
        assert "\n".join(speed_lines(tmp_path / "bench.json")).count(sentence) == count
    assert launch_lines(one) == []
    assert speed_record(one)["rows"][0]["launches"] is None


class FakeProcesses:
    """Launches that write planted records instead of a measurement."""

    def __init__(self, benches: Sequence[Bench]) -> None:
        self.benches, self.words = list(benches), list[list[str]]()

    def __call__(self, words: Sequence[str], name: str, report: Any) -> float:
        assert name == f"launch {len(self.words) + 1}"
        self.words.append([*words])
        report(5.0)
        save_bench(self.benches[len(self.words) - 1], Path(words[words.index("--output") + 1]))
        return 10.0


def launched(monkeypatch: pytest.MonkeyPatch, benches: Sequence[Bench], **options: Any) -> tuple[Bench, FakeProcesses]:
    started, said = FakeProcesses(benches), list[tuple[float, str]]()
    monkeypatch.setattr(processes, "_run", started)
    asked = BenchOptions(launches=len(benches), batches=(1, 8), time_limit=10.0, **options)
    fed = FedOptions(images=Path("samples.npy"))
    with trusting_code(True):
        bench = processes.time_launches(
            Path("a.onnx"), Path("b.onnx"), asked, fed=fed, command=("me",), progress=lambda *now: said.append(now)
        )
    shares = [(index + (0.25 if index == 0 else 0.5)) / len(benches) for index in range(len(started.words))]
    assert said == [(share, f"launch {index}") for index, share in enumerate(shares, 1)]
    return bench, started


def test_each_launch_is_a_bench_with_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, started = launched(monkeypatch, [launch_of(1.2), launch_of(1.3)], threads=2, half_width=0.05)
    assert bench == replace(join_launches([launch_of(1.2), launch_of(1.3)]), command=("me",))
    for words in started.words:
        assert words[:3] == ["bench", "a.onnx", "b.onnx"]
        options = {words[at]: words[at + 1] for at in range(3, len(words) - 1) if words[at].startswith("--")}
        assert {"--trust-code", "--quiet"} <= {*words}
        assert "--trust-engine" not in words
        assert (options["--threads"], options["--batch"], options["--launches"]) == ("2", "1,8", "1")
        assert (options["--images"], options["--half-width"], options["--time-limit"]) == (
            "samples.npy",
            "0.05",
            "10.0",
        )


def test_launches_end_if_nothing_can_be_timed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    late = launch_of(1.2)
    late = replace(late, rows=(replace(late.rows[0], blocks=(), stop=OUT_OF_TIME),))
    bench, started = launched(monkeypatch, [late, late, late])
    assert (len(started.words), bench.is_timed, bench.settings["launches"]) == (1, False, 1)


@pytest.mark.parametrize(
    ("ending", "error", "message"),
    [
        (
            "print('warning: x\\nError: a.onnx: gone', file=sys.stderr); sys.exit(2)",
            BadInput,
            "^launch 1: a.onnx: gone$",
        ),
        ("print('Error: no GPU', file=sys.stderr); sys.exit(4)", Missing, "^launch 1: no GPU$"),
        ("os.kill(os.getpid(), 9)", Missing, "^launch 1: it ended with code -9$"),
    ],
)
def test_launch_that_fails_raises_its_message(
    monkeypatch: pytest.MonkeyPatch, ending: str, error: type[Exception], message: str
) -> None:
    monkeypatch.setattr(processes, "PROGRAM", (sys.executable, "-c", f"import os, sys; {ending}"))
    with pytest.raises(error, match=message):
        processes._run((), "launch 1", lambda elapsed_s: None)


def test_interrupted_launch_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process writes a file if it is asked to end, and would otherwise run for a minute."""
    asked = tmp_path / "asked"
    code = (
        "import pathlib, signal, sys, time\n"
        f"def end(*_): pathlib.Path({str(asked)!r}).touch(); sys.exit(0)\n"
        f"signal.signal(signal.SIGTERM, end); pathlib.Path({str(tmp_path / 'ready')!r}).touch(); time.sleep(60)"
    )
    monkeypatch.setattr(processes, "PROGRAM", (sys.executable, "-c", code))
    monkeypatch.setattr(processes, "STEP_S", 0.01)

    def interrupt(elapsed_s: float) -> None:
        if (tmp_path / "ready").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processes._run((), "launch 1", interrupt)
    assert asked.exists()


def test_decoders_and_modules_in_memory_are_timed_in_one_process(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--launches"):
        BENCH_OF.refuse([("", "decoders")], {"launches": 2})
    import torch

    directory = Directory(path=tmp_path, module=torch.nn.Identity())
    rejects("launches=2: a module in memory", corp_deploy.bench, directory, directory, launches=2)


def test_recipe_passes_launches_and_their_time_on(tmp_path: Path) -> None:
    seconds = dict[int, float]()
    for count in (1, 3):
        path = tmp_path / "recipe.toml"
        path.write_text(recipe({"bench": {"launches": count}, "reduce": {"mlp": 0.5}}))
        read = load_recipe(path)
        stage = next(each for each in stages_of(read, tmp_path, Baseline()) if each.name == "bench.onnxruntime-cpu")
        words = stage.command.split()
        assert words[words.index("--launches") + 1] == str(count)
        seconds[count] = limited_seconds(read)[stage.name]
    assert seconds[3] == 3 * seconds[1] > 0


def tiny_graph(path: Path, width: int) -> Path:
    """Write a graph of two layers for images of 8x8."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    rng = np.random.default_rng(0)
    shapes = {"up": (192, width), "down": (width, 10)}
    weights = [onnx.numpy_helper.from_array(rng.standard_normal(s).astype("f4"), name) for name, s in shapes.items()]
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["images"], ["flat"]),
            helper.make_node("MatMul", ["flat", "up"], ["wide"]),
            helper.make_node("MatMul", ["wide", "down"], ["logits"]),
        ],
        "tiny",
        [helper.make_tensor_value_info("images", kind, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info("logits", kind, ["batch", 10])],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


@pytest.mark.slow("measurement")
def test_two_graphs_are_timed_in_two_processes(tmp_path: Path) -> None:
    graphs = [tiny_graph(tmp_path / f"{width}.onnx", width) for width in (64, 32)]
    quick = ("--batch", "1,8", "--time-limit", 0.5, "--half-width", 0.9, "--min-rounds", 6)
    bench = tmp_path / "bench.json"
    said = invoked("bench", *graphs, *quick, "--launches", 2, "-o", bench).stdout
    assert "batch 8, speed-up of 2 launches: " in said
    record = load_bench(bench)
    assert record.settings["launches"] == 2
    for row in record.rows:
        assert {block.launch for block in row.blocks} == {0, 1}
        assert [block.round for block in row.blocks] == sorted(block.round for block in row.blocks)
        assert {block.launch for block in row.noise_blocks} <= {0, 1}
    assert "gate" in invoked("gate", bench, "--fail-if", "speedup@b1 < 0.0001").stdout
    from_python = corp_deploy.bench(*graphs, batches=(1,), time_limit=0.5, half_width=0.9, min_rounds=6, launches=2)
    assert len(some(from_python.summary.rows[0].launches).speedups) == 2
