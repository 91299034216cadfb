"""The report says what its records say, in every format, and needs nothing from outside."""

import csv as comma_separated
import io
import json
import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from perf.errors import BadInput
from perf.parity import ImageSet, Parity, link
from perf.report import csv, html, junit, markdown, svgs
from perf.tolerance import limits

LATENCY_MS = {1: (8.0, 6.4), 8: (40.0, 25.0)}


def blocks(names: tuple[str, str], ms: tuple[float, float]) -> list[dict[str, Any]]:
    """Eight rounds ABBA, constant times with a ripple of 1 %."""
    made = []
    for turn in range(8):
        for name in (*names, *names[::-1]):
            times = [ms[names.index(name)] * (1 + 0.01 * ((turn + call) % 3 - 1)) for call in range(4)]
            made.append({"round": turn, "subject": name, "at_s": 0.0, "calls": 4, "wall_ms": sum(times),
                         "compute_ms": times, "end_to_end_ms": None, "enqueue_ms": None, "dropped": None,
                         "gpu": None})  # fmt: skip
    return made


def trial(status: str, message: str | None = None) -> dict[str, Any]:
    return {"status": status, "message": message, "warm_up_samples_ms": [], "warm_up_flat": True,
            "peak_memory_bytes": None, "peak_memory_method": None}  # fmt: skip


def bench() -> dict[str, Any]:
    rows = [
        {"batch": batch, "trials": {"dense": trial("ok"), "reduced": trial("ok")}, "calls_per_block": 4,
         "settle_calls": 0, "stop": "narrow", "blocks": blocks(("dense", "reduced"), ms),
         "noise_blocks": blocks(("dense", "dense again"), (ms[0], ms[0]))}
        for batch, ms in LATENCY_MS.items()
    ]  # fmt: skip
    failed = {name: trial("oom", "batch 64 does not fit") for name in ("dense", "reduced")}
    rows.append({"batch": 64, "trials": failed, "calls_per_block": 1, "settle_calls": 0, "stop": "nothing to measure",
                 "blocks": [], "noise_blocks": []})  # fmt: skip
    subjects = [{"name": name, "describe": {"backend": "onnxruntime"}, "macs": macs, "params": None, "size_bytes": None,
                 "sha256": None, "fused_attention": None}
                for name, macs in (("dense", 200), ("reduced", 100))]  # fmt: skip
    return {"kind": "bench", "version": 1, "created": "2026-01-01T00:00:00+00:00", "command": [],
            "environment": {"cpu": "a <fast> one"}, "settings": {}, "subjects": subjects, "rows": rows,
            "warnings": []}  # fmt: skip


def parity(*, broken: bool = False) -> Parity:
    ref = np.random.default_rng(0).standard_normal((50, 10))
    bound = limits(max_error=0.001 if broken else 0.1)
    made = link(name="whole", kind="whole", reference="dense", candidate="reduced", reference_NC=ref,
                candidate_by_batch={4: ref * 1.01}, tolerance=bound)  # fmt: skip
    return Parity(images=ImageSet(count=50, digest="sha256:00"), links=(made,))


def record(**changes: Any) -> dict[str, Any]:
    rule = {"rule": "speedup@b8 < 1.2", "verdict": "INCONCLUSIVE", "message": "about 12 more blocks are needed"}
    whole: dict[str, Any] = {
        "title": "A & B",
        "bench": bench(),
        "parity": parity().to_json(),
        "gate": {"verdict": "INCONCLUSIVE", "rules": [rule]},
        "sites": [
            {"site": "blocks.0.mlp", "width_dense": 64, "width_reduced": 32, "error_uncompensated": 0.5, "error": 0.02},
            {"site": "blocks.0.attn", "width_dense": "qk 16", "width_reduced": "qk 8", "error_uncompensated": None,
             "error": None},
        ],
        "models": [
            {"name": "dense", "params": 1000, "macs": 2_500_000, "accuracy": 0.98},
            {"name": "reduced", "params": 600, "macs": 1_000_000, "accuracy": 0.97, "agreement": 0.99996},
        ],
        "effects": [{"preset": "none", "relative_error": 0.5}, {"preset": "best", "relative_error": 0.02}],
        "lineage": {"reduced/model.onnx": "sha256:ab"},
        "environment": None,
        "commands": ["corp-deploy bench a b --batch 1,8"],
    }  # fmt: skip
    return whole | changes


class Links(HTMLParser):
    """Open tags and every attribute that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [f"{tag} {key}" for key, _ in attrs if key in ("src", "href", "xlink:href", "data", "action")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("line", "circle", "rect", "path", "polyline"), tag

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_loads_nothing() -> None:
    page = html(record())
    links = Links()
    links.feed(page)
    assert links.open == []
    assert links.outside == []
    assert "<script" not in page
    assert "@import" not in page
    assert "url(" not in page
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_the_headline_is_from_the_records() -> None:
    page = html(record())
    assert "Reduced answers 1.60 times as fast as dense at batch 8" in page
    assert "same on 100 % of 50 images" in page
    assert '<span class="chip note">gate INCONCLUSIVE</span><span class="chip pass">parity PASS</span>' in page
    assert "about 12 more blocks are needed" in page


@pytest.mark.parametrize(("broken", "verdict"), [(False, "PASS"), (True, "FAIL")])
def test_the_verdict_is_the_records_own(broken: bool, verdict: str) -> None:
    made = record(parity=parity(broken=broken).to_json(), gate=None)
    assert f"parity {verdict}</span>" in html(made)
    assert f"**parity {verdict}**" in markdown(made)


def test_words_of_the_user_are_escaped() -> None:
    page = html(record(title="<script>alert(1)</script>"))
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "a &lt;fast&gt; one" in page


def test_every_table_and_plot_is_there() -> None:
    page = html(record())
    for words in ("Dense beside reduced", "Latency by batch", "Throughput by batch",
                  "Speed-up beside noise and promise", "Distribution of samples", "Error of each link",
                  "Error of each site", "Structural tests", "Environment", "Lineage", "corp-deploy bench a b --batch 1,8"):  # fmt: skip
        assert (words in page) == (words != "Structural tests"), words
    assert page.count("<svg") == 6


def test_a_failed_batch_stays_in_the_table() -> None:
    rows = [row for row in comma_separated.reader(io.StringIO(csv(record()))) if row[0] == "latency" and row[2] == "64"]
    assert [row[4] for row in rows if row[3] == "p50 ms"] == ["oom", "oom"]


def test_change_and_rounding() -> None:
    text = markdown(record())
    assert "| Parameters | 1 k | 600 | -40.0% |" in text
    assert "| Accuracy | 98.00 % | 97.00 % | -1.00 points |" in text
    assert "99.99 %" in text


def test_csv_has_every_cell_once() -> None:
    rows = list(comma_separated.reader(io.StringIO(csv(record()))))
    assert rows[0] == ["table", "row", "name", "column", "value"]
    assert ["sites", "1", "blocks.0.mlp", "Error, only cut", "0.5"] in rows
    assert len({tuple(row[:4]) for row in rows}) == len(rows)


def test_junit_tells_failures_from_what_could_not_be_judged() -> None:
    suites = ElementTree.fromstring(junit(record(parity=parity(broken=True).to_json())))
    parity_suite, gate_suite = suites.findall("testsuite")
    assert (parity_suite.get("failures"), gate_suite.get("skipped")) == ("1", "1")
    failure = parity_suite.find("testcase/failure")
    assert failure is not None
    assert "relative error 0.01 over 0.001" in str(failure.get("message"))


def test_plots_are_files_of_their_own() -> None:
    made = svgs(record())
    assert set(made) == {"latency", "throughput", "speedup", "samples", "parity", "sites"}
    for text in made.values():
        assert ElementTree.fromstring(text.split("?>", 1)[1]).tag == "{http://www.w3.org/2000/svg}svg"
        assert "--reduced" in text


def test_a_bare_record_is_a_report_too() -> None:
    page = html({"title": "Nothing yet"})
    assert "no verdict: nothing was verified" in page
    assert "<svg" not in page
    assert markdown({"title": "Nothing yet"}).startswith("# Nothing yet")
    assert svgs({"title": "Nothing yet"}) == {}


def test_the_same_record_gives_the_same_bytes() -> None:
    assert html(record()) == html(json.loads(json.dumps(record())))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"title": None}, "title is missing"),
        ({"parity": {"kind": "bench"}}, "no parity record"),
        ({"bench": {"kind": "parity"}}, "expected a bench record"),
        ({"models": [{"params": 1}]}, r"models\[0\]: the key 'name' is missing"),
        ({"sites": [{"site": "a"}]}, "'width_dense' is missing"),
        ({"effects": {"preset": "none"}}, "expected a list"),
        ({"gate": {"verdict": "PASS", "rules": ["x"]}}, r"rules\[0\]: expected a JSON object"),
    ],
)
def test_foreign_parts_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        html(record(**changes))
