"""Recipes, records, class names and texts that begin with a byte-order mark are read as those without one."""

from pathlib import Path

from corp_deploy.release.recipe_file import load_recipe
from corp_deploy.release.serving import class_names
from perf.record.runs import load_bench, save_bench
from tests.histories import bench_of_release

RECIPE = '[model]\nmodel = "vit"\n[calibration]\nimages = "a.npy"\n[held_out]\nimages = "b.npy"\n[reduce]\nmacs = 0.7\n'


def marked(path: Path) -> Path:
    """Write a byte-order mark in front of a file."""
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    return path


def test_a_recipe_with_a_mark_is_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    assert load_recipe(path) == load_recipe(marked(path))


def test_the_first_class_name_has_no_mark(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("cat\ndog\n")
    assert class_names(marked(path)) == ("cat", "dog")


def test_a_record_with_a_mark_is_read(tmp_path: Path) -> None:
    save_bench(bench_of_release(0, 4.0), path := tmp_path / "bench.json")
    assert load_bench(path) == load_bench(marked(path))
