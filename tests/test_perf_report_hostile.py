"""Reports escape hostile text of records in HTML, Markdown and XML."""

import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corp_deploy.proof.report_input import gather_report
from ground.records import json_from_record
from ground.text import printable
from perf.parity.labels import accuracy_by_class, accuracy_on_labels, mcnemar
from perf.parity.shift import Shift, SiteShift
from perf.report.content import Content, ModelLine
from perf.report.page import html_from_content
from perf.report.render import markdown_from_content
from tests.test_perf_report import broken_parity, record

HOSTILE = (
    "'\"><script src=//x>alert(1)</script><img src=x onerror=y> &amp; <!-- ]]> | `` ```` \\| [a](b) \x1b[31m\x00\ud800"
)
# The start of a tag that is not escaped: an even number of backslashes before it.
TAG = r"(?<!\\)(\\\\)*<[A-Za-z/!?]"
# Fields whose values come from fixed lists, which readers check before showing them, and fields whose keys are names.
CHOSEN = ("kind", "status", "verdict", "stop", "measure", "test", "role")
NAMED = ("environment", "lineage", "trials")


def planted(value: Any, word: str = HOSTILE) -> Any:
    """Prefix every text in a value, and keys that are names, with `word`."""
    if isinstance(value, str):
        return word + value
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value) if field.name not in CHOSEN}
        named = {name: {word + key: item for key, item in parts[name].items()} for name in NAMED if name in parts}
        return replace(value, **{name: planted(part, word) for name, part in (parts | named).items()})
    if isinstance(value, Mapping):
        return {key: planted(item, word) for key, item in value.items()}
    return tuple(planted(item, word) for item in value) if isinstance(value, list | tuple) else value


def whole_record() -> Content:
    """Make a record with every part."""
    logits, labels = np.eye(4)[[0, 1, 2, 3, 0]], np.array([0, 1, 2, 3, 1])
    sites = (SiteShift(site="blocks.0.mlp", mean_distance=1.0, mean_noise=0.1, covariance_distance=2.0,
                       covariance_noise=0.2, status="NOTED"),)  # fmt: skip
    parity = replace(
        broken_parity(),
        shift=Shift(images=5, status="NOTED", reason="they differ", sites=sites),
        accuracy=(accuracy_on_labels("dense", logits, labels),),
        comparisons=(mcnemar("dense", logits, "reduced", logits[::-1], labels),),
        classes=accuracy_by_class(logits, logits[::-1], labels, {1: "cat"}),
    )
    lineage = {"weights": "a.safetensors", "nested": {"libraries": ["one", "two"]}}
    return record(parity=parity, coverage="8 of 12 sites", lineage=lineage)


def hostile_record(word: str = HOSTILE) -> Content:
    """Make a record whose texts, and keys that are names, all begin with `word`."""
    hostile: Content = planted(whole_record(), word)
    return hostile


class Elements(HTMLParser):
    """A parser that lists elements with their attribute names and checks that each is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, frozenset[str]]] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, frozenset(name for name, _ in attrs if name != "class")))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, frozenset(name for name, _ in attrs if name != "class")))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def elements(page: str) -> Elements:
    parser = Elements()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def test_record_text_adds_no_html_element() -> None:
    page = html_from_content(hostile_record())
    plain, hostile = elements(html_from_content(whole_record())), elements(page)
    assert hostile.seen == plain.seen
    assert "".join(hostile.text).count(printable(HOSTILE)) > 60, "hostile text is shown, not dropped"
    assert not set(page) & {"\x1b", "\x00", "\ud800"}
    page.encode("utf-8")


def test_command_text_cannot_end_its_code_block() -> None:
    _, fence, commands = re.split(r"^(`{3,})$", markdown_from_content(hostile_record()), maxsplit=1, flags=re.MULTILINE)
    assert fence not in commands[: commands.rindex(fence)]


def test_report_loads_no_external_resource() -> None:
    page = html_from_content(record())
    loading = {"src", "href", "xlink:href", "data", "action"}
    assert not [tag for tag, attributes in elements(page).seen if tag == "script" or attributes & loading]
    assert "@import" not in page
    assert "url(" not in page
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def cells(line: str) -> int:
    return len(re.findall(r"(?:\\.|[^|\\])+", line))


@pytest.mark.parametrize("words", ["a\nb", "a\r\nb"])
def test_line_break_in_a_name_does_not_break_markdown(words: str) -> None:
    def lines_with(name: str) -> int:
        models = (ModelLine(name=name, params=1), ModelLine(name="other", params=2))
        return len(markdown_from_content(Content(title=name, models=models)).splitlines())

    assert lines_with(words) == lines_with("a")


def directory_of(whole: Content, word: str, folder: Path) -> Path:
    """Write the files that a report is made from, every text in them beginning with `word`."""
    site = {"site": f"{word}blocks.0", "part": "mlp", "width": 4, "width_asked": 4.0, "width_dense": 8,
            "energy": 1.0, "error": 0.1, "error_uncompensated": 0.2, "r2": 0.5, "condition": 1.0,
            "ridge": 0.0}  # fmt: skip
    reduction = {"sites": [site], "coverage": {"verdict": f"{word}1 of 2 sites"}}
    config = {"kind": "corp-deploy/model", "version": 1}
    config |= {"timm": {"name": f"{word}vit", "kwargs": {}}, "sites": {}, "weights_sha256": 64 * "0"}
    config |= {"input": {"preprocessing": {f"{word}crop_mode": f"{word}center"}}}
    config |= {"lineage": {"reduction": reduction, f"{word}weights": f"{word}w.safetensors"}}
    made = {"sha256": f"{word}ab", "made_by": f"corp-deploy {word}bench"}
    manifest = {"kind": "corp-deploy/manifest", "version": 1, "versions": {f"{word}torch": f"{word}2"}}
    manifest |= {"files": {f"{word}bench.json": made}}
    effects = {"kind": "corp-deploy/effects", "version": 1, "rows": [{"preset": f"{word}none"}]}
    files = {"reduced/config.json": config, "manifest.json": manifest, "effects.json": effects}
    for kind in ("bench", "gate"):
        files[f"{kind}.json"] = {"kind": kind, "version": 1, **json_from_record(getattr(whole, kind))}
    assert whole.parity is not None
    files["parity.json"] = whole.parity.to_json()
    (folder / "reduced").mkdir(parents=True)
    for name, value in files.items():
        # A lone surrogate is invalid in JSON files, so each becomes a question mark.
        (folder / name).write_bytes(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return folder


def test_directory_reports_escape_hostile_text(tmp_path: Path) -> None:
    plain = html_from_content(gather_report(directory_of(whole_record(), "", tmp_path / "plain"), title="A title"))
    folder = directory_of(hostile_record(), HOSTILE, tmp_path / "hostile")
    hostile = html_from_content(gather_report(folder, title=HOSTILE))
    assert elements(hostile).seen == elements(plain).seen
    for word in ("blocks.0", "1 of 2 sites", "torch", "w.safetensors", "bench.json", "none"):
        assert printable(HOSTILE.replace("\ud800", "?")) + word in "".join(elements(hostile).text), word


def test_printable_escapes_control_characters() -> None:
    assert printable("a\x1b\x7f\x9b\r\ud800\ufffe") == "a\\x1b\\x7f\\x9b\\x0d\\ud800\\ufffe"
    assert printable("a\tb\nç 名 \U0001f600") == "a\tb\nç 名 \U0001f600"
