"""One name made to harm, through everything that this tool writes or shows: it never leaves its place."""

import csv
import io
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from rich.table import Table

from calib.images import open_images
from corp_deploy.cli import main
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.sweep_points import DensePoint, OutputScore
from corp_deploy.proof.report_input import Covered, ReductionRecord
from corp_deploy.reduction.report import SiteReport
from corp_deploy.release.card import _removed
from corp_deploy.release.recipe_toml import rendered
from corp_deploy.views.console import Output
from corp_deploy.views.sweep import csv_of_sweep, sweep_plot, sweep_table
from corp_deploy.views.sweep_page import sweep_page
from export.engine.options import BatchProfile
from export.graph.ports import GraphPort
from export.triton.config import ServedModel, Serving, config_text
from export.triton.lint import lint_repository
from export.triton.pbtxt import parse
from export.triton.repository import write_repository
from export.triton.server_releases import build_script
from export.triton.signature import Signature
from export.triton.variants import Package
from ground.text import comment_line, csv_cell, markdown_line, printable
from perf.gate.gate import Gate, JudgedRule
from perf.gate.verdicts import junit_from_gate, markdown_from_gate
from perf.report import render
from perf.report.content import BudgetLine, Content
from perf.report.page import html_from_content
from perf.stats.compare import compare_records, markdown_from_comparison
from tests.export_served import write_onnx
from tests.refusals import rejects
from tests.test_corp_sweep_trials import point
from tests.test_perf_gate import plain as bench_of_times
from tests.test_perf_report_hostile import HOSTILE, TAG, cells, elements, hostile_record, whole_record

# A formula, a tag, a link, a code span, shell's words, a colour, letters turned about, rich's markup, the ends of XML
# and of a line. No slash: it is a file's name too.
NAME = "=1+1<img src=x onerror=y>[a](b)|`$(id)`'\";\x1b[31m\u202egnp\u2066[red]\r\x9b2J\x07-->]]>&{{ 1 }}"
PLAIN = "name"
DANGEROUS = {"\x1b", "\x9b", "\x07", "\r", "\x00", "\u202e", "\u2066", "\u2028"}
Write = Callable[[str], str]


def of_report(write: Callable[[Content], str]) -> Write:
    return lambda name: write(whole_record() if name == PLAIN else hostile_record(name))


def of_gate(write: Callable[[Gate], str]) -> Write:
    return lambda name: write(
        Gate(rules=(JudgedRule(rule=f"p50 > {name}", verdict="FAIL", message=name, metric="p50"),))
    )


def compared(name: str) -> str:
    benches = [bench_of_times(rounds=6, gpu=f"{name}{side}") for side in "ab"]
    return markdown_from_comparison(compare_records(*benches))


def swept(name: str) -> Any:
    scores = (OutputScore(name=name, relative_error=0.1, agreement=0.9),)
    return [
        replace(point(1.2, 0.9, error=error), preset=name, knobs={"select": name}, outputs=scores)
        for error in (0.1, 0.2)
    ]


def variant(name: str) -> ServedModel:
    ports = (GraphPort(name=name, dtype="float32", shape=("n", 3)),)
    signature = Signature(inputs=ports, outputs=ports, roles={name: "logits"})
    return ServedModel(name=name, backend="onnxruntime", kind="KIND_CPU", signature=signature, max_batch=8,
                   cc_filenames={})  # fmt: skip


def config(name: str) -> str:
    return config_text(variant(name), Serving(), 1, labelled=True)


def plan_script(name: str) -> str:
    profiles = [BatchProfile.from_text("1:2:4")]
    inputs = variant(name).signature.inputs
    return build_script(name=name, version=1, inputs=inputs, profiles=profiles, onnx_sha256="0" * 64,
                        cc_filenames={"8.6": name}, image_tag=name, pending=False)  # fmt: skip


def remaining(name: str) -> str:
    return rendered("remaining.sh", release=name, stages=[{"name": name, "why": name, "words": ["release", name]}])


def starter(name: str) -> str:
    words = ("file", "name", "model", "directory", "description", "weights", "images", "held_out", "labels")
    named = dict.fromkeys(words, name)
    return rendered("starter.toml", **named, hold_out=None, convolutions=True, linear=True, served=name)


def card(name: str) -> str:
    site = SiteReport(
        site=name, part="mlp", width_dense=16, width_asked=8.0, width=8, energy=2.0, error_uncompensated=1.0,
        error=0.5, r2=0.5, condition=1.0, ridge=0.0,
    )  # fmt: skip
    way = BudgetLine(name=name, share=0.5, predicted_error=0.1, measured_error=0.2, median_error=0.1)
    coverage = Covered(verdict=name, refused={name: name})
    record = ReductionRecord(sites=(site,), ways=(way,), decided=(name,), coverage=coverage)
    recipe: Any = SimpleNamespace(reduce=ReduceOptions(mlp=0.5))
    return "\n".join(_removed(record, recipe))


def terminal(name: str) -> str:
    table = Table(name, title=name)
    table.add_row(name)
    with CliRunner().isolation(color=True) as (stdout, stderr, _):
        out = Output(json=False, quiet=False)
        with out.progress(name, 1, unit=printable(name)) as done:
            done(1)
        out.result({}, name, table, sweep_table(swept(name)))
        out.note(name)
        out.warn(name)
        return (stdout.getvalue() + stderr.getvalue()).decode()


def as_json(name: str) -> str:
    with CliRunner().isolation() as (stdout, _, _):
        Output(json=True, quiet=False).result({name: name})
        return stdout.getvalue().decode()


HTML: dict[str, Write] = {
    "report": of_report(html_from_content),
    "sweep": lambda name: sweep_page(swept(name), DensePoint(macs=20, parameters=2, inputs=4), title=name),
}
XML: dict[str, Write] = {"report": of_report(render.junit_from_content), "gate": of_gate(junit_from_gate)}
XML |= {"drawing": lambda name: sweep_plot(swept(name))}
MARKDOWN: dict[str, Write] = {
    "report": of_report(render.markdown_from_content),
    "gate": of_gate(markdown_from_gate),
    "comparison": compared,
    "card": card,
}
CSV: dict[str, Write] = {"report": of_report(render.csv_from_content), "sweep": lambda name: csv_of_sweep(swept(name))}
SHELL: dict[str, Write] = {"build_plan.sh": plan_script, "remaining.sh": remaining}


def every() -> Iterator[tuple[str, Write]]:
    kinds = {"html": HTML, "xml": XML, "markdown": MARKDOWN, "csv": CSV}
    for kind, writers in kinds.items():
        yield from ((f"{kind} {name}", write) for name, write in writers.items())
    yield from (("pbtxt config", config), ("toml starter", starter), ("terminal", terminal), ("json", as_json))


@pytest.mark.parametrize(("output", "write"), list(every()), ids=[name for name, _ in every()])
def test_control_and_bidi_characters_are_escaped(output: str, write: Write) -> None:
    """What is shown to people has none of it; what is read back by machines spells it out."""
    text = write(NAME)
    seen = set(text) & DANGEROUS
    if output in ("terminal", "csv report", "csv sweep"):
        seen -= {"\r"}
    assert not seen, output


@pytest.mark.parametrize("output", HTML)
def test_html_gets_no_element(output: str) -> None:
    hostile, plain = elements(HTML[output](NAME)), elements(HTML[output](PLAIN))
    assert not [tag for tag, attributes in hostile.seen if tag in ("img", "script") or "onerror" in attributes]
    assert {tag for tag, _ in hostile.seen} == {tag for tag, _ in plain.seen}
    assert "<img src=x onerror=y>" in "".join(hostile.text), "the words themselves are shown"


@pytest.mark.parametrize("name", [NAME, HOSTILE], ids=["name", "hostile"])
@pytest.mark.parametrize("output", XML)
def test_junit_and_svg_stay_valid_xml(output: str, name: str) -> None:
    hostile, plain = (ElementTree.fromstring(XML[output](each)) for each in (name, PLAIN))
    assert [each.tag for each in hostile.iter()] == [each.tag for each in plain.iter()]


@pytest.mark.parametrize("name", [NAME, HOSTILE], ids=["name", "hostile"])
@pytest.mark.parametrize("output", MARKDOWN)
def test_markdown_gets_no_tag_link_or_line(output: str, name: str) -> None:
    hostile, plain = (MARKDOWN[output](each).partition("\n## Commands")[0] for each in (name, PLAIN))
    outside_of_code = re.sub(r"`p50 > [^\n]*?` \|", "|", hostile)
    assert not re.search(TAG, outside_of_code)
    assert not re.search(r"\](?=[(\[:])", outside_of_code)
    assert len(hostile.splitlines()) == len(plain.splitlines())
    for line, simple in zip(hostile.splitlines(), plain.splitlines(), strict=True):
        if simple.startswith("|") and "p50 >" not in simple:
            assert cells(line) == cells(simple), line


@pytest.mark.parametrize("output", CSV)
def test_csv_cells_are_never_formulas(output: str) -> None:
    rows = list(csv.reader(io.StringIO(CSV[output](NAME))))
    plain = list(csv.reader(io.StringIO(CSV[output](PLAIN))))
    assert [len(row) for row in rows] == [len(row) for row in plain]
    texts = [cell for row in rows for cell in row if not re.fullmatch(r"-?[0-9.e+-]+", cell)]
    assert not [cell for cell in texts if cell.startswith(tuple("=+-@\t\r"))]
    assert any(cell.startswith("'=1+1") for cell in texts)


@pytest.mark.parametrize("first", ["=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠"])
def test_csv_cell_like_a_formula_becomes_text(first: str) -> None:
    assert str(csv_cell(f"{first}1")).startswith("'")
    assert csv_cell(-1.5) == -1.5
    assert csv_cell("a=1") == "a=1"


def test_escaped_texts_round_trip() -> None:
    assert json.loads(as_json(NAME)) == {NAME: NAME}
    message = parse(config(NAME))
    assert message.text("name") == NAME
    assert [each.text("name") for each in message.messages("input")] == [NAME]
    assert len(config(NAME).splitlines()) == len(config(PLAIN).splitlines())
    assert [field.name for field in message.fields] == [field.name for field in parse(config(PLAIN)).fields]
    content = tomllib.loads(starter(NAME))
    assert content["model"] == {"model": NAME, "weights": NAME}
    assert content["held_out"] == {"images": NAME, "labels": NAME}
    assert content.keys() == tomllib.loads(starter(PLAIN)).keys()


@pytest.mark.parametrize("output", SHELL)
def test_shell_reads_a_quoted_name_as_one_word(output: str) -> None:
    """A comment ends with its line, and elsewhere the name is one word of the same words."""
    hostile, plain = (shlex.split(SHELL[output](name), comments=True) for name in (NAME, PLAIN))
    assert len(hostile) == len(plain)
    assert [each.replace(NAME, PLAIN) for each in hostile] == plain
    assert any(NAME in each for each in hostile)


def test_names_in_comments_stay_on_their_line() -> None:
    assert "\n" not in comment_line(NAME + "\nid") + markdown_line(NAME + "\nid")


def test_commands_accept_hostile_file_names(tmp_path: Path) -> None:
    folder = tmp_path / NAME
    folder.mkdir()
    (folder / f"{NAME}.png").write_bytes(b"no picture")
    calls: list[list[object]] = [
        ["inspect", "--model", folder],
        ["package", "lint", folder],
        ["check", folder],
        ["report", folder, "-o", tmp_path / "r.html"],
        ["verify", folder, folder / "m.onnx", "--random", 2, "-o", tmp_path / "p.json"],
        ["bench", folder / "m.plan", folder / "m.plan", "-o", tmp_path / "b.json"],
        ["release", folder / "r.toml", "-o", folder / "out"],
        ["gate", folder / "bench.json", "--fail-if", f"p50@b1 > {NAME}"],
        ["inspect", "redundancy", "--moments", folder],
        ["build", folder / "m.onnx", "-o", folder / "m.plan", "--no-such-option"],
        [NAME],
    ]
    for words in calls:
        done = CliRunner().invoke(main, [str(word) for word in words], color=True)
        assert done.exit_code == 2, (words, done.output)
        assert not set(done.output) & (DANGEROUS - {"\r"}), words
    images = open_images(folder, image_shape=(3, 4, 4), transform=lambda _: pytest.fail("no picture"))
    rejects("not a readable image", next, images.batches(1))


def test_class_name_with_control_characters_is_refused(tmp_path: Path) -> None:
    graph = write_onnx(tmp_path / "m.onnx")
    labels = ("cat", "dog", "=1+1", "ç名", NAME)
    rejects("has unprintable characters", Package, name="vit", onnx=graph, labels=labels)
    write_repository(Package(name="vit", onnx=graph, labels=(*labels[:4], "<b>")), tmp_path / "repo")
    assert lint_repository(tmp_path / "repo") == ()
