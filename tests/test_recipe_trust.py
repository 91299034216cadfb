"""A recipe's paths stay below its own directory, and its commands are run, where the user says so alone."""

from pathlib import Path

import pytest

from corp_deploy.release.baseline import Baseline
from corp_deploy.release.recipe import trusted_metrics
from corp_deploy.release.recipe_file import load_recipe
from corp_deploy.release.stage import release_call, stage_call
from corp_deploy.spec.trusted_code import trusting_code
from tests.command import invoked, refuses, run
from tests.refusals import rejects

TABLES = {
    "model": {"model": '"dense"'},
    "calibration": {"images": '"train"'},
    "held_out": {"images": '"val"'},
    "reduce": {"mlp": "0.5"},
}


def written(folder: Path, *added: tuple[str, str, str], name: str = "recipe.toml", head: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tables = {table: dict(keys) for table, keys in TABLES.items()} if not head else {}
    for table, key, value in added:
        tables.setdefault(table, {})[key] = value
    lines = [f"[{table}]\n" + "".join(f"{key} = {value}\n" for key, value in tables[table].items()) for table in tables]
    (folder / name).write_text(head + "".join(lines))
    return folder / name


OUTSIDE = [
    ("model", "model", '"../dense/model"'), ("model", "model", '"/etc/model"'), ("model", "model", '"hf:../dense"'),
    ("model", "model", '"module:../net.py:net"'), ("model", "weights", '"../secret.pth"'),
    ("calibration", "images", '"../photos"'), ("calibration", "images", '"inside/../../photos"'),
    ("calibration", "group_labels", '"/root/labels.npy"'), ("held_out", "images", '"/home/somebody/photos"'),
    ("held_out", "labels", '"../labels.npy"'), ("parity", "head", '["below", "../head.onnx"]'),
    ("gate", "history", '"../../history"'), ("package", "labels", '"/etc/passwd"'),
]  # fmt: skip


@pytest.mark.parametrize("outside", OUTSIDE, ids=lambda entry: f"{entry[0]}.{entry[1]}-{entry[2]}")
def test_every_escaping_path_is_refused_by_its_key(tmp_path: Path, outside: tuple[str, str, str]) -> None:
    table, key, value = outside
    recipe = written(tmp_path / "own", outside)
    rejects(rf"{table}\.{key} leads out of .*/own, .* give --trust-paths if you agree", load_recipe, recipe)
    known = load_recipe(recipe, trust_paths=True)
    assert known == load_recipe(recipe, trust_paths=True)
    inside = value.replace("../", "").replace('"/', '"')
    assert load_recipe(written(tmp_path / "own", (table, key, inside)))


def test_metric_files_count_as_paths(tmp_path: Path) -> None:
    metric = ("parity", "metric", "[\"map=python score.py {outputs}\"]")  # fmt: skip
    away = written(tmp_path / "own", metric, ("parity", "metric_files", '["../score.py"]'))
    rejects(r"parity\.metric_files leads out", load_recipe, away)
    assert load_recipe(written(tmp_path / "own", metric, ("parity", "metric_files", '["score.py"]')))


def test_symlinks_are_resolved(tmp_path: Path) -> None:
    recipe = written(tmp_path / "own")
    (tmp_path / "photos").mkdir()
    (tmp_path / "own" / "train").symlink_to(tmp_path / "photos")
    rejects(r"calibration\.images leads out of .*/own, .* to .*/photos", load_recipe, recipe)
    assert load_recipe(recipe, trust_paths=True).calibration.images == tmp_path.resolve() / "photos"


def test_extended_recipe_is_confined_to_the_typed_recipes_directory(tmp_path: Path) -> None:
    written(tmp_path / "own" / "bases", ("calibration", "images", '"../train"'), name="base.toml")
    recipe = written(tmp_path / "own", ("reduce", "mlp", "0.25"), head='extends = "bases/base.toml"\n')
    assert load_recipe(recipe).calibration.images == tmp_path.resolve() / "own" / "train"
    base = tmp_path / "own" / "bases" / "base.toml"
    rejects(r"base\.toml: calibration\.images leads out of .*/bases", load_recipe, base)
    written(tmp_path / "own" / "bases", ("calibration", "images", '"../../train"'), name="base.toml")
    rejects(r"base\.toml: calibration\.images leads out of .*/own, ", load_recipe, recipe)
    away = written(tmp_path / "own", ("reduce", "mlp", "0.25"), head='extends = "../other.toml"\n')
    rejects("extends leads out", load_recipe, away)


def test_nothing_is_written_until_paths_are_trusted(tmp_path: Path) -> None:
    recipe = written(tmp_path / "own", ("calibration", "images", '"../photos"'))
    for way in ([], ["--dry-run"], ["--plan-only"], ["--only", "recipe"]):
        refuses("give --trust-paths", "release", recipe, "-o", tmp_path / "out", *way)
        trusted = run("release", recipe, "-o", tmp_path / "out", "--trust-paths", "--dry-run")
        assert "leads out" not in trusted.output
    assert not (tmp_path / "out").exists()


def test_starter_recipe_reports_outside_files(tmp_path: Path) -> None:
    words = ("--init", "vit_tiny_patch16_224")
    for photos in (tmp_path / "own" / "photos", tmp_path / "photos"):
        photos.mkdir(parents=True)
        (photos / "one.png").touch()
    near = run("release", tmp_path / "own" / "a.toml", *words, "--images", tmp_path / "own" / "photos")
    far = run("release", tmp_path / "own" / "b.toml", *words, "--images", tmp_path / "photos")
    assert (near.exit_code, far.exit_code) == (0, 0), near.output + far.output
    assert "--trust-paths" not in near.output
    assert "--trust-paths" in far.output
    invoked("release", tmp_path / "own" / "b.toml", "-o", tmp_path / "out", "--dry-run", code=2)


def test_recipe_commands_run_only_if_trusted(tmp_path: Path) -> None:
    text = "hits=python score.py {outputs}"
    rejects(r"parity\.metric: .*score\.py.* give --trust-code if you trust it", trusted_metrics, [text])
    with trusting_code(True):
        (request,) = trusted_metrics([text])
    assert request.argv == ["python", "score.py", "{outputs}"]
    assert trusted_metrics([]) == ()


def test_printed_commands_include_trust_options(tmp_path: Path) -> None:
    """A release's own recipe names its inputs from the directory of the release, which they lie beyond."""
    plain = load_recipe(written(tmp_path))
    measured = load_recipe(written(tmp_path, ("parity", "metric", '["map=python score.py {outputs}"]')))
    coded = load_recipe(written(tmp_path, ("model", "model", '"module:net.py:net"')))
    for recipe, stage, runs_code in (
        (plain, "bench", False),
        (measured, "bench", False),
        (measured, "parity.onnxruntime-cpu", True),
        (coded, "bench", True),
    ):
        words = stage_call(stage, recipe).argv
        trusts = ["--trust-paths", *(["--trust-code"] if runs_code else [])]
        assert [word for word in words if word.startswith("--trust")] == trusts
    assert "--trust-code" in release_call(measured, Baseline(), tmp_path).argv
    assert "--trust-code" not in release_call(plain, Baseline(), tmp_path).argv
