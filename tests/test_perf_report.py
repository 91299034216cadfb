"""Reports in HTML, Markdown, CSV and JUnit show what their records hold."""

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from ground.ports import OutputPort, Role
from ground.quantity import format_number
from perf.parity.labels import Accuracy
from perf.parity.locate import FaultLocation
from perf.parity.parity import ImageSet, Parity
from perf.parity.structure import check_batch_sizes, check_output_values
from perf.parity.tolerance import user_tolerance
from perf.record.runs import Bench, BenchTrial, Flat, Row, SubjectRecord, TimedBlock
from perf.report import tables
from perf.report.content import (
    BudgetLine,
    Content,
    EffectLine,
    EffortLine,
    GateLine,
    GateLines,
    ModelLine,
    SiteLine,
    build_tiles,
)
from perf.report.numbers import count_text, error_text, number_text, percent_text, size_text
from perf.report.page import html_from_content
from perf.report.render import csv_from_content, junit_from_content, markdown_from_content
from tests.doubles import some
from tests.histories import block, row
from tests.links import link_between

LATENCY_MS = {1: (8.0, 6.4), 8: (40.0, 25.0)}
MACS = {"dense": 200, "reduced": 100}


def blocks(names: tuple[str, str], ms: tuple[float, float]) -> Iterator[TimedBlock]:
    """Yield the blocks of eight ABBA rounds with constant times and a ripple of 1 %."""
    for turn in range(8):
        for name in (*names, *names[::-1]):
            yield block(turn, name, [ms[names.index(name)] * (1 + 0.01 * ((turn + call) % 3 - 1)) for call in range(4)])


def timed_row(batch: int, ms: tuple[float, float]) -> Row:
    trials = dict.fromkeys(("dense", "reduced"), BenchTrial(status="ok", peak_memory_bytes=5_000_000))
    noise = tuple(blocks(("dense", "dense again"), (ms[0], ms[0])))
    return row(batch, blocks(("dense", "reduced"), ms), trials=trials, noise_blocks=noise)


def failed_row(batch: int) -> Row:
    trials = dict.fromkeys(("dense", "reduced"), BenchTrial(status="oom", message="out of memory"))
    return row(batch, (), trials=trials, stop="nothing to measure")


@cache
def bench() -> Bench:
    describe: Flat = {"backend": "onnxruntime", "precision": "fp32"}
    dense, reduced = (SubjectRecord(name=name, describe=describe, macs=macs) for name, macs in MACS.items())
    return Bench(
        created="2026-01-01T00:00:00+00:00",
        command=(),
        environment={"cpu": "a <fast> one"},
        settings={},
        subjects=(dense, reduced),
        rows=(*(timed_row(batch, ms) for batch, ms in LATENCY_MS.items()), failed_row(64)),
        warnings=("the clock <wandered>",),
    )


def parity(*, broken: bool = False) -> Parity:
    ref = np.random.default_rng(0).standard_normal((50, 10))
    bound = user_tolerance(max_error=0.001 if broken else 0.1)
    made = link_between(ref, {4: ref * 1.01}, kind="whole", tolerance=bound)
    return Parity(images=ImageSet(count=50, digest="sha256:00"), links=(made,))


def broken_parity() -> Parity:
    """Make the record of a graph that gives NaN, with the block where NaN first appears."""
    logits = np.random.default_rng(1).standard_normal((6, 3))
    structure = (
        *check_output_values("onnx fp16", {"logits": logits}),
        *check_output_values("onnx fp32", {"logits": logits * np.nan}),
        *check_batch_sizes("onnx fp16", {1: {"logits": logits}, 2: {"logits": logits}}, bound=0.0),
    )
    located = FaultLocation(link="fp16", site="blocks.1.attn", measure="nonfinite", value=np.inf, noise=1e-3,
                      largest_activation=7e4, half_limit=65504.0, reason="too large", command="keep it")  # fmt: skip
    return replace(parity(), structure=structure, located=(located,))


def record(**changes: Any) -> Content:
    rule = GateLine(rule="speedup@b8 < 1.2", verdict="INCONCLUSIVE", message="about 12 more blocks are needed")
    sites = (
        SiteLine(site="blocks.0.mlp", width_dense="64", width_reduced="32", error_uncompensated=0.5, error=0.02,
                 error_held_out=0.031),
        SiteLine(site="blocks.0.attn", width_dense="qk 16", width_reduced="qk 8", error_uncompensated=None, error=None),
    )  # fmt: skip
    way = BudgetLine(name="by site", share=0.6, predicted_error=0.011, measured_error=0.013, median_error=0.012)
    whole: dict[str, Any] = {
        "title": "A & B",
        "bench": bench(),
        "parity": parity(),
        "gate": GateLines(verdict="INCONCLUSIVE", rules=(rule,)),
        "sites": sites,
        "models": (
            ModelLine(name="dense", params=1000, macs=2_500_000, accuracy=0.98),
            ModelLine(name="reduced", params=600, macs=1_000_000, accuracy=0.97, agreement=0.99996),
        ),
        "effects": (EffectLine(preset="none", relative_error=0.5), EffectLine(preset="best", relative_error=0.02)),
        "ways": (way,),
        "lineage": {"reduced/model.onnx": "sha256:ab"},
        "commands": ("corp-deploy bench a b --batch 1,8",),
    }
    return Content(**whole | changes)


def test_headline_comes_from_the_records() -> None:
    page = html_from_content(record())
    assert "Reduced is 1.60 times as fast as dense at batch 8" in page
    assert "a &lt;fast&gt; one · onnxruntime fp32 · 50 images · 2026-01-01" in page
    assert "same on 100\N{NO-BREAK SPACE}% of 50 images" in page
    assert '<span class="chip full note">Gate INCONCLUSIVE</span>' in page
    assert '<span class="chip full pass">Parity PASS (1 link judged)</span>' in page
    assert "about 12 more blocks are needed" in page


def test_long_words_wrap_where_a_narrow_page_would_overflow() -> None:
    style = html_from_content(record()).split("@media (max-width")[0]
    rules = {name.strip(): body for name, body in re.findall(r"([^{}]+){([^{}]*)}", style)}
    assert "overflow-wrap: anywhere" in rules["main"]
    assert "white-space: normal" in rules[".chip.full"]
    assert "overflow-x: auto" in rules[".scroll"]


def test_link_without_a_limit_is_measured_but_not_passed() -> None:
    (judged,) = parity().links
    free = replace(judged, name="free", status="UNJUDGED", reason="no limit was set")
    proof = replace(parity(), links=(judged, free))
    line = "PASS (1 link judged, 1 measured without a limit)"
    assert f"Parity {line}</span>" in html_from_content(record(parity=proof))
    assert f"**Parity {line}** on 50 images" in markdown_from_content(record(parity=proof))
    suite = ElementTree.fromstring(junit_from_content(record(parity=proof))).findall("testsuite")[0]
    assert (suite.get("tests"), suite.get("skipped")) == ("2", "1")
    assert some(suite.find("properties/property")).get("value") == f"{line} on 50 images"
    passed, skipped = suite.findall("testcase")
    assert passed.find("skipped") is None
    assert skipped.find("skipped") is not None
    alone = replace(parity(), links=(free,))
    assert "Parity UNJUDGED (0 links judged, 1 measured without a limit)" in html_from_content(record(parity=alone))


def test_report_contains_every_table_and_plot() -> None:
    page = html_from_content(record())
    titles = (
        "Dense beside reduced", "Latency by batch", "Throughput by batch", "Speed-up beside noise and promise",
        "Distribution of samples", "Error of each link", "Error of each site", "Structural tests", "Environment",
        "Lineage", "corp-deploy bench a b --batch 1,8",
    )  # fmt: skip
    for words in titles:
        assert (words in page) == (words != "Structural tests"), words
    assert page.count("<svg") == 6


def accuracies(*shares: tuple[str, float]) -> tuple[Accuracy, ...]:
    return tuple(
        Accuracy(model=name, correct=int(500 * share), images=500, accuracy=share, low=share - 0.01, high=share + 0.01)
        for name, share in shares
    )


@pytest.mark.parametrize(
    ("known", "shown"),
    [
        (accuracies(("dense", 0.988), ("reduced", 0.986)), "98.8 % → 98.6 %"),
        (accuracies(("dense", 0.988), ("reduced", 0.986), ("fp16", 0.5)), "98.8 % → 98.6 %"),
        (accuracies(("dense", 0.988), ("fp16", 0.5)), "98.8 % → 50.0 %"),
        (accuracies(("dense", 0.988)), ""),
    ],
)
def test_report_has_a_tile_for_dense_and_shipped_accuracy(known: tuple[Accuracy, ...], shown: str) -> None:
    content = record(parity=replace(parity(), accuracy=known))
    large = {words: value for value, words in build_tiles(content)}
    found = [value for words, value in large.items() if words.startswith("accuracy")]
    assert found == [shown] * bool(shown)


def test_failed_batch_stays_in_the_table() -> None:
    lines = [line for line in markdown_from_content(record()).splitlines() if line.startswith("| 64 ")]
    assert lines == ["| 64 · out of memory | oom | – | – | – | – | – | – | – |"]
    assert ["latency", "dense", "64", "compute", "status", "oom", "", ""] in rows_of_csv()


def test_latency_table_equals_a_computation_by_hand() -> None:
    """From 40 to 25 ms saves 37.5 % of the time, which is 75 % of the 50 % saved multiply-adds."""
    line = next(line for line in markdown_from_content(record()).splitlines() if line.startswith("| 8 |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert (cells[:2], cells[3]) == (["8", "40.0 → 25.0"], "–")
    assert cells[4:6] == ["200 → 320", "5 MB → 5 MB"]
    assert cells[6].startswith("1.60 · 1.")
    assert cells[7].startswith("1.00 · ")
    assert cells[8] == "75 %"
    assert "A p99 needs 662 samples" in markdown_from_content(record())


def test_changes_are_rounded() -> None:
    text = markdown_from_content(record())
    assert "| Parameters | 1 k | 600 | −40.0 % |" in text
    assert "| Accuracy | 98.00 % | 97.00 % | −1.00 points |" in text
    assert "99.99 %" in text


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (percent_text(0.99999), "99.99 %"),
        (percent_text(1.0), "100 %"),
        (percent_text(0.99996, 1), "99.9 %"),
        (percent_text(-0.5, 0), "−50 %"),
        (number_text(0.01234), "0.0123"),
        (number_text(7.0), "7.00"),
        (number_text(179.4), "179"),
        (number_text(25_312.0), "25,312"),
        (count_text(22_050_664), "22.1 M"),
        (size_text(830_000), "830 kB"),
        (size_text(999_600_000), "1 GB"),
        (size_text(1_234_000_000), "1.23 GB"),
        (size_text(999_600), "1 MB"),
        (size_text(120), "0.12 kB"),
        (count_text(999_999), "1 M"),
        (count_text(3_400_000_000_000), "3.4 T"),
        (count_text(7), "7"),
        (number_text(999.96), "1,000"),
        (number_text(0.0000123), "0.0000123"),
        (number_text(0.0), "0.00"),
        (error_text(1234.5), "1,234"),
        (error_text(99.7), "100"),
        (error_text(0.00012), "0.00012"),
        (format_number(1_234_567.0, 6), "1,234,567"),
        (format_number(123.456, 4), "123.5"),
    ],
)
def test_numbers_are_formatted_for_people(made: str, words: str) -> None:
    assert made == words


def rows_of_csv(**changes: Any) -> list[list[str]]:
    return list(csv.reader(io.StringIO(csv_from_content(record(**changes)))))


def test_csv_has_every_number_once_without_rounding() -> None:
    rows = rows_of_csv()
    assert rows[0] == ["section", "subject", "batch", "measure", "name", "value", "low", "high"]
    assert ["sites", "blocks.0.mlp", "", "", "error_uncompensated", "0.5", "", ""] in rows
    assert ["sites", "blocks.0.mlp", "", "", "error_held_out", "0.031", "", ""] in rows
    assert ["ways", "by site", "", "", "predicted_error", "0.011", "", ""] in rows
    assert len({tuple(row[:5]) for row in rows}) == len(rows)
    speedup = next(row for row in rows if row[2:5] == ["8", "compute", "speedup"])
    value, low, high = map(float, speedup[5:])
    assert low <= value <= high
    assert value == pytest.approx(1.6)


def test_junit_separates_failures_from_unjudged_links() -> None:
    suites = ElementTree.fromstring(junit_from_content(record(parity=parity(broken=True))))
    parity_suite, gate_suite = suites.findall("testsuite")
    assert (parity_suite.get("failures"), gate_suite.get("errors"), gate_suite.get("skipped")) == ("1", "1", "0")
    failure = some(parity_suite.find("testcase/failure"))
    assert "relative error 0.01 over 0.001" in str(failure.get("message"))


def test_each_failure_has_a_line_and_passes_share_one() -> None:
    text = markdown_from_content(record(parity=broken_parity()))
    assert "| finite · onnx fp32 | FAIL | NaN or Inf on 6 of 6 images |" in text
    assert "| onnx fp16 | PASS | finite, constant, batch-size |" in text
    assert "| blocks.1.attn | fp16 | too large | keep it |" in text
    assert "**Parity FAIL (1 link judged)** on 50 images: finite of onnx fp32: NaN or Inf on 6 of 6 images" in text


def test_single_record_makes_a_report() -> None:
    page = html_from_content(Content(title="Nothing yet"))
    assert "No verdict: nothing was verified" in page
    assert "<svg" not in page
    assert markdown_from_content(Content(title="Nothing yet")).startswith("# Nothing yet")


def test_site_table_omits_empty_columns() -> None:
    text = markdown_from_content(record())
    assert "| Error, compensated | Held out |" in text
    assert "Stream error" not in text
    assert "| by site | 60.00 % |" in text
    plain = SiteLine(site="a", width_dense="4", width_reduced="2", error_uncompensated=0.5, error=0.1)
    assert "Held out" not in markdown_from_content(record(sites=(plain,)))
    looped = replace(plain, stream_error=0.01, stream_error_held_out=0.02)
    assert "| Stream error | Stream error, held out |" in markdown_from_content(record(sites=(looped,)))


def parity_of_role(role: Role) -> Parity:
    """Make the record of one output of this role with an error of 1 %."""
    rows, port = np.random.default_rng(0).standard_normal((5, 4)), OutputPort(name="vectors", role=role)
    single = link_between(rows, rows * 1.01, tolerance=user_tolerance(max_error=0.1), port=port)
    return Parity(images=ImageSet(count=5, digest="", kind="documents"), links=(single,))


def test_embedding_is_reported_by_neighbour_agreement() -> None:
    text = markdown_from_content(record(parity=parity_of_role("embedding")))
    assert "the nearest neighbour is the same on 100 % of 5 inputs" in text
    assert "Errors of the embedding on 5 real documents" in text
    assert "| Agreement |" in text
    assert "Top-1" not in text
    assert "relative error of the embedding" in html_from_content(record(parity=parity_of_role("embedding")))
    rows = rows_of_csv(parity=parity_of_role("embedding"))
    assert ["parity", "reduced", "1", "", "neighbour_agreement"] in [row[:5] for row in rows]


def test_feature_map_is_reported_by_relative_error() -> None:
    text = markdown_from_content(record(parity=parity_of_role("feature map")))
    assert "relative error, 5 inputs" in html_from_content(record(parity=parity_of_role("feature map")))
    assert "is the same on" not in text
    line = next(line for line in text.splitlines() if line.startswith("| reduced · dense"))
    assert [cell.strip() for cell in line.strip("|").split("|")][4:7] == ["–", "–", "–"]


def test_total_effort_is_shown_if_all_parts_are_known() -> None:
    one = EffortLine(step="select", seconds=2.5, peak_bytes=3_000_000, machine="a CPU")
    two = EffortLine(step="build", seconds=1234.5, device_peak_bytes=8_000_000, machine="a CPU")
    table = tables.effort_table((one, two))
    assert table.columns == ("Step", "Seconds", "Peak memory", "Peak on the GPU")
    assert table.rows == (
        ("select", "2.50", "3 MB", "–"),
        ("build", "1,234", "–", "8 MB"),
        ("all together", "1,237", "3 MB", "8 MB"),
    )
    assert table.note.startswith("On a CPU. ")
    assert "effort,build,,,seconds,1234.5,,\n" in csv_from_content(Content(title="t", effort=(one, two)))
    table = tables.effort_table((one, replace(two, machine="another", gpu="a GPU"), EffortLine(step="recover")))
    assert [row[0] for row in table.rows] == ["select", "build", "recover"]
    assert [row[-1] for row in table.rows] == ["a CPU", "another, a GPU", ""]
    assert table.rows[2][1] == "not recorded"
    assert "effort" not in tables.build_tables(Content(title="t"))


def test_engine_memory_is_shown() -> None:
    lines = (ModelLine(name="dense", device_memory_bytes=80_000_000), ModelLine(name="reduced"))
    assert [row[:2] for row in tables.models_table(lines).rows] == [("Device memory", "80 MB")]


def test_inconclusive_proof_is_shown_as_inconclusive() -> None:
    rows = np.random.default_rng(0).standard_normal((50, 10))
    undecided = link_between(rows, rows, kind="whole", tolerance=user_tolerance(min_agreement=0.98))
    proof = Parity(images=ImageSet(count=50, digest="sha256:00"), links=(undecided,))
    shown = record(parity=proof)
    reason = f"**Parity INCONCLUSIVE (1 link judged)** on 50 images: whole: {undecided.reason}"
    assert reason in markdown_from_content(shown)
    page = html_from_content(shown)
    assert '<span class="chip full note">Parity INCONCLUSIVE' in page
    assert undecided.reason in page
    suite = ElementTree.fromstring(junit_from_content(shown)).findall("testsuite")[0]
    assert (suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("0", "1", "0")
    assert some(suite.find("testcase/error")).get("message") == f"INCONCLUSIVE: {undecided.reason}"
