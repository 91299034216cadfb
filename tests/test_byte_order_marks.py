"""Texts that begin with a byte-order mark are read as those without one; of another encoding they are told which."""

from collections.abc import Callable
from pathlib import Path

import pytest

from calib.texts import open_texts
from corp_deploy.families.tokenizer import content_of_tokenizer
from corp_deploy.invocation.source import JSON
from corp_deploy.proof.custom_metrics import metric_from_text
from corp_deploy.release.recipe_file import load_recipe
from corp_deploy.release.serving import read_class_names
from corp_deploy.spec.trusted_code import Code
from corp_deploy.store.library_model import code_of_file
from ground.files import text_from_file
from ground.records import record_from_file
from perf.record.runs import load_bench, save_bench
from tests.histories import bench_of_release
from tests.refusals import rejects

RECIPE = '[model]\nmodel = "vit"\n[calibration]\nimages = "a.npy"\n[held_out]\nimages = "b.npy"\n[reduce]\nmacs = 0.7\n'


def marked(path: Path) -> Path:
    """Write a byte-order mark in front of a file."""
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    return path


def test_recipe_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    assert load_recipe(path) == load_recipe(marked(path))


def test_first_class_name_has_no_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("cat\ndog\n")
    assert read_class_names(marked(path)) == ("cat", "dog")


def test_record_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    save_bench(bench_of_release(0, 4.0), path := tmp_path / "bench.json")
    assert load_bench(path) == load_bench(marked(path))


def test_metric_and_model_code_with_a_byte_order_mark_run(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("def build():\n    return 1\n")
    plain = Code(file=path.name, function="build", source=path.read_text())
    assert metric_from_text(f"module:{marked(path)}:build").code(tmp_path).source == plain.source
    assert code_of_file(f"module:{path}:build") == plain


def test_arguments_texts_and_group_labels_with_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    assert JSON.from_text('\ufeff{"depth": 2}') == {"depth": 2}
    for name, content in (("a.txt", "one\n"), ("a.json", '["x"]')):
        (tmp_path / name).write_text("\ufeff" + content, encoding="utf-8")
    assert text_from_file(tmp_path / "a.txt") == "one\n"
    assert record_from_file(tmp_path / "a.json", list[str]) == ["x"]


READERS: dict[str, Callable[[Path], object]] = {
    "a recipe": load_recipe,
    "class names": read_class_names,
    "a record": load_bench,
    "texts": lambda path: open_texts(path, encode=lambda texts: pytest.fail("read")),
    "a model's code": lambda path: code_of_file(f"module:{path}:build"),
    "a measure": lambda path: metric_from_text(f"module:{path}:build").code(path.parent),
    "a tokenizer": lambda path: content_of_tokenizer(path.parent),
    "any text": text_from_file,
}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_other_encodings_are_named(tmp_path: Path, kind: str, encoding: str) -> None:
    path = tmp_path / ("tokenizer.json" if kind == "a tokenizer" else "own.py")
    path.write_bytes(("\ufeff" if encoding == "utf-16-be" else "").encode(encoding) + "cat\n".encode(encoding))
    rejects(rf"the text is {encoding[:6].upper()}, expected UTF-8; save it as UTF-8", READERS[kind], path)
