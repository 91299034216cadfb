"""Candidates of one proof get distinct names and labels, whatever their files are called."""

from pathlib import Path

import pytest

from corp_deploy.proof.candidates import Candidate, in_runtime
from corp_deploy.proof.prove import with_distinct_names
from ground.errors import BadInput
from ground.precision import FLOAT32
from tests.command import refuses
from tests.export_served import write_onnx


def graph(path: str, precision: str = "fp32") -> Candidate:
    """Return the candidate that candidate_from_path makes from a graph at this path."""
    place = Path(path)
    return Candidate(
        label=f"{place.parent.name}/{place.name} ONNX {precision}",
        name=f"{place.parent.name}-onnx-{precision}",
        form="graph",
        path=place,
        float_type=FLOAT32,
    )


def directory(path: str) -> Candidate:
    place = Path(path)
    return Candidate(label=f"{place.name} torch fp32", name=place.name, form="torch", path=place, float_type=FLOAT32)


def names(*candidates: Candidate) -> list[str]:
    return [each.name for each in with_distinct_names(candidates)]


def labels(*candidates: Candidate) -> list[str]:
    return [each.label for each in with_distinct_names(candidates)]


def test_distinct_candidates_keep_their_names() -> None:
    every = [directory("reduced"), graph("out/a.onnx"), graph("out/b.onnx", "fp16")]
    assert with_distinct_names(every) == every
    assert with_distinct_names([]) == []


def test_graphs_in_one_folder_are_named_by_file() -> None:
    pair = graph("out/a.onnx"), graph("out/b.v2.onnx")
    assert names(*pair) == ["a-onnx-fp32", "b.v2-onnx-fp32"]
    assert labels(*pair) == ["a.onnx ONNX fp32", "b.v2.onnx ONNX fp32"]
    assert in_runtime(with_distinct_names(pair)[0], "openvino-bf16").name == "a-openvino-bf16-fp32"
    assert names(graph("a.onnx"), graph("b.onnx")) == ["a-onnx-fp32", "b-onnx-fp32"], "in the working directory"


def test_equal_file_names_are_distinguished_by_folder() -> None:
    pair = graph("one/out/a.onnx"), graph("two/out/a.onnx")
    assert names(*pair) == ["one-out-a-onnx-fp32", "two-out-a-onnx-fp32"]
    assert labels(*pair) == ["one/out/a.onnx ONNX fp32", "two/out/a.onnx ONNX fp32"]
    assert names(directory("one/reduced"), directory("two/reduced")) == ["one-reduced", "two-reduced"]
    assert names(directory("reduced"), directory("other/reduced")) == ["reduced", "other-reduced"]


def test_clashing_file_name_takes_more_of_its_path() -> None:
    assert len(set(names(graph("out/a.onnx"), graph("out/b.onnx"), graph("a/model.onnx")))) == 3


def test_candidate_is_not_named_like_the_reference_or_the_chain() -> None:
    assert labels(directory("x/dense")) == ["candidate dense torch fp32"]
    assert names(directory("x/whole")) == ["candidate whole"]


def test_duplicate_path_is_refused() -> None:
    with pytest.raises(BadInput, match=r"a\.onnx: given twice as a candidate; give each candidate once"):
        with_distinct_names([graph("out/a.onnx"), graph("out/../out/a.onnx")])


def test_verify_refuses_a_duplicate_path_before_loading(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "model.onnx")
    refuses("given twice as a candidate", "verify", "absent", path, path,
            "--images", "x.npy", "-o", tmp_path / "p.json")  # fmt: skip
