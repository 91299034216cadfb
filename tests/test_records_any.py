"""What a report is made of, and files that hold no JSON at all; what was written before still loads."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.trust.fuzz.changes import VALUES, paths_of, replaced
from benchmarks.trust.fuzz.valid import Record, valid_records
from corp_deploy.store.model_config import load_model_config
from ground.errors import BadInput
from ground.records import record_from_file
from perf.report.render import html

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def records(folder: Path) -> dict[str, Record]:
    return valid_records(folder / "any.json")


KINDS = (
    *("bench", "parity", "gate", "table", "engine", "config", "snapshot", "manifest", "expected", "stamp", "digests"),
    "moments",
)
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("kind", ["bench", "parity"])
@given(data=st.data())
@QUICK
def test_a_report_of_one_value_of_another_type(kind: str, data: st.DataObject, records: dict[str, Any]) -> None:
    document = records[kind][1]
    path = data.draw(st.sampled_from(list(paths_of(document))))
    changed = replaced(document, path, data.draw(VALUES | st.sampled_from([1e308, 1e-308, []])))
    with suppress(BadInput):
        assert html({"title": "changed", kind: changed})


@pytest.mark.parametrize("content", [b"", b"\xff", b'"\xff"', b"[" * 10**6, b'{"kind": "', b"9" * 10**5, b"nul", b"\0"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_json_at_all(kind: str, content: bytes, folder: Path, records: dict[str, Any]) -> None:
    name, _, reader = records[kind]
    (folder / name).write_bytes(content)
    with pytest.raises(BadInput, match=name):
        reader(folder / name)


def test_what_was_written_before_still_loads() -> None:
    digits = load_model_config(ROOT / "examples/digits/model")
    assert (digits.built.name, digits.family, len(digits.sites)) == ("vit_tiny_patch16_224", "timm", 12)
    for path in sorted((ROOT / "benchmarks/results").glob("*.json")):
        text = json.loads(path.read_text())
        assert record_from_file(path, type(text)) == text, path
