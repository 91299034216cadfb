"""Records are typed where they are read: bounded, and refused in one message that names the entry."""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.trust.fuzz import GOLDEN, VALUES, paths_of, replaced
from ground.errors import BadInput
from ground.records import (
    DEEPEST,
    Figure,
    json_from_record,
    record_from_bytes,
    record_from_file,
    record_from_text,
    record_from_value,
)
from perf.parity.parity import parity_from_value
from perf.record.runs import Bench
from perf.report.content import Content
from perf.report.page import html_from_content
from tests.refusals import rejects


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    batch: Annotated[int, msgspec.Meta(ge=1)] = 1
    error: Figure = 0.0
    errors: tuple[Figure, ...] = ()
    status: Literal["ok", "failed"] = "ok"
    shape: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        if self.batch == 7:
            raise BadInput("seven images are never run")


class Whole(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: str = "whole"
    version: int = 1
    first: Part
    rows: tuple[Part, ...] = ()
    named: Mapping[str, Part] = {}
    counts: dict[Literal["p", "q"], int] = {}


REFUSED = {
    '{"first": {"error": "s"}}': "r.json: first.error: got 's', expected a number; make the record again",
    '{"first": {"error": true}}': "first.error: got true, expected a number",
    '{"first": {"error": 1e999}}': "first.error: number out of range",
    '{"first": {"errors": [1, null, "s"]}}': "first.errors[2]: got 's', expected a number",
    '{"first": {"batch": 0}}': "first.batch: got 0, expected a whole number >= 1",
    '{"first": {"batch": null}}': "first.batch: got null, expected a whole number",
    '{"first": {"batch": 1.5}}': "first.batch: got 1.5, expected a whole number",
    '{"first": {"batch": 7}}': "first: seven images are never run; make the record again",
    '{"first": {"status": "odd"}}': "first.status: got 'odd', expected failed or ok",
    '{"first": {}, "rows": [{}, {"shape": [1]}]}': "rows[1].shape: got a list of 1, expected a list of length 2",
    '{"first": {}, "rows": [{}, {"shape": [1, "x"]}]}': "rows[1].shape[1]: got 'x', expected a whole number",
    '{"first": {}, "rows": {}}': "rows: got an object, expected a list",
    '{"first": {}, "named": {"a": {"batch": "s"}}}': "named[...].batch: got a text, expected a whole number",
    '{"first": {}, "counts": {"z": 1}}': "a key of counts: got 'z', expected p or q",
    '{"first": {"shape": ["x", 1]}, "first": 3}': "first.shape[0]: got a text, expected a whole number",
    '{"frist": 1}': "r.json: unknown key 'frist'; did you mean 'first'; make",
    '{"elsewhere": 1}': "unknown key 'elsewhere'; known are kind, version, first, rows, named, counts",
    "{}": "r.json: the key 'first' is missing; make the record again",
    "[]": "got a list of 0, expected a JSON object",
    '"text"': "got 'text', expected a JSON object",
    '{"first": {"batch": "' + "y" * 1000 + '"}}': "got '" + "y" * 99 + "..., expected a whole number",
    '{"first": ': "r.json: not JSON (Input data was truncated); it may be cut short; make the record again",
    '{"first": {"error": NaN}}': "r.json: not JSON",
    "": "r.json: not JSON",
}


@pytest.mark.parametrize("text", REFUSED)
def test_errors_state_path_got_and_expected(text: str) -> None:
    with pytest.raises(BadInput) as refused:
        record_from_text(text, Whole, where="r.json")
    assert REFUSED[text] in str(refused.value)
    assert str(refused.value).startswith("r.json: ")
    assert "\n" not in str(refused.value)


def test_kind_and_version_are_checked_first() -> None:
    for head, said in {
        '"kind": "other", "version": 2': "r.json: expected a whole record, got 'other'",
        '"kind": "whole", "version": 2': "r.json: whole record of version 2, written by a newer corp-deploy; this tool "
        "reads version 1: install that one, or make the record again",
        '"kind": "whole", "version": 0': "r.json: whole record of version 0; this tool reads version 1: make the",
        '"kind": "whole"': "whole record of version None; this tool reads version 1: make the record again",
        '"kind": "whole", "version": "2"': "whole record of version 2; this tool reads version 1: make the",
        '"kind": "whole", "version": true': "whole record of version True; this tool reads version 1",
        '"kind": "whole", "version": 1.0': "whole record of version 1.0; this tool reads version 1",
        '"version": 1': "expected a whole record, got a file without a kind",
    }.items():
        rejects(said, record_from_text, "{" + head + ', "first": "wrong"}', Whole, where="r.json", kind="whole")
    text = '{"kind": "whole", "version": 3, "first": {}}'
    assert record_from_text(text, Whole, where="r.json", kind="whole", version=3).first == Part()
    rejects("got a list of 1, expected a JSON object", record_from_text, "[1]", Whole, where="r.json", kind="whole")


def test_nonfinite_numbers_are_stored_as_null() -> None:
    part = Part(error=-math.inf, errors=(1.5, math.nan))
    plain = json_from_record({"parts": [part]})
    assert plain["parts"][0]["error"] is None
    assert plain["parts"][0]["errors"] == [1.5, None]
    read = record_from_value(plain["parts"][0], Part, where="r")
    assert read == Part(error=math.inf, errors=(1.5, math.inf))
    assert isinstance(record_from_text('{"error": 3}', Part, where="r").error, float)
    said = "r: error: got a list of 0, expected a number; do it again"
    rejects(said, record_from_value, {"error": []}, Part, where="r", remedy="do it again")


def test_non_utf8_names_round_trip() -> None:
    text = '{"first": {}, "named": {"\\udc80": {}}}'
    assert list(record_from_text(text, Whole, where="r").named) == ["\udc80"]
    assert record_from_text('["\udc80"]', list[str], where="r") == ["\udc80"]
    rejects("not JSON", record_from_bytes, b'["\xff"]', list[str], where="r")


def nested(depth: int, opening: str, closing: str) -> str:
    return opening * depth + closing * depth


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":[', "]}")])
def test_deep_nesting_is_refused(opening: str, closing: str) -> None:
    levels = len(opening.replace('"a":', ""))
    assert record_from_text(nested(DEEPEST // levels, opening, closing), Any, where="r") is not None
    for depth in (DEEPEST // levels + 1, 100_000):
        said = "r: its JSON is nested too deep; records have 40 levels at most"
        rejects(said, record_from_text, nested(depth, opening, closing), Any, where="r")
    rejects("nested too deep", record_from_text, "[" * 10_000_000, Any, where="r")
    rejects("r: not JSON", record_from_text, "\x08\n" + "[" * 100, Any, where="r")


@pytest.mark.parametrize(
    "text", ['"' + "[" * 500 + '"', r'["\"' + "[" * 500 + r'\\"]', r'{"\\": "' + "{" * 500 + '"}', '["[", "[", "]"]']
)
def test_brackets_in_strings_are_not_nesting(text: str) -> None:
    assert record_from_text(text, Any, where="r") is not None


def test_bracket_after_an_escape_counts() -> None:
    rejects("nested too deep", record_from_text, r'["a\\", ' + nested(50, "[", "]") + "]", Any, where="r")


def test_huge_texts_are_refused_without_parsing() -> None:
    began = perf_counter()
    data = b'{"first": [' + b"{}," * 5_000_000 + b"{}]}"
    rejects("first: got a list, expected a JSON object", record_from_bytes, data + b" " * 2_000_000, Whole, where="r")
    assert perf_counter() - began < 30


def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    rejects("cannot be read: no such file", record_from_file, path, Whole)
    os.mkfifo(path)
    rejects("expected a regular file", record_from_file, path, Whole)
    path.unlink()
    path.write_text('{"first": {}, "kind": "whole", "version": 1}')
    assert record_from_file(path, Whole, kind="whole").rows == ()
    monkeypatch.setattr("ground.records.MOST_BYTES", 20)
    rejects(f"{path}: 44 bytes, a record has 20 at most", record_from_file, path, Whole)
    rejects("r: 24 bytes, a record has 20 at most", record_from_bytes, b" " * 24, Whole, where="r")


# Reports from records with a wrong value

ROOT = Path(__file__).resolve().parents[1]


QUICK = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("kind", ["bench", "parity"])
@given(data=st.data())
@QUICK
def test_single_value_of_wrong_type_is_reported(kind: str, data: st.DataObject) -> None:
    document = json.loads((GOLDEN / "records" / f"{kind}.json").read_text())
    path = data.draw(st.sampled_from(list(paths_of(document))))
    changed = replaced(document, path, data.draw(VALUES | st.sampled_from([1e308, 1e-308, []])))
    with suppress(BadInput):
        bench = record_from_value(changed, Bench, where="r", kind="bench") if kind == "bench" else None
        parity = parity_from_value(changed, where="r") if kind == "parity" else None
        assert html_from_content(Content(title="changed", bench=bench, parity=parity))
