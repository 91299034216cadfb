"""Images as they are stored, in commands, recipes and Python: equal moments, labels by column, and URLs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import corp_deploy
from calib.groups import group_ids
from corp_deploy.invocation.input_choice import InputOptions
from corp_deploy.release.baseline import Baseline
from corp_deploy.release.digests import Digests, files_of
from corp_deploy.release.incremental import STATE
from corp_deploy.release.recipe_file import load_recipe
from corp_deploy.release.recipe_toml import text_of_recipe
from corp_deploy.release.stages import stages_of
from corp_deploy.store.checkpoint import save
from corp_deploy.store.input_sets import images_for_model, inputs_for_model
from corp_deploy.store.labels import labels_for
from ground.places import Url, place_from_text, require_path
from tests import tiny
from tests.command import invoked, refuses
from tests.recipes import recipe
from tests.refusals import rejects
from tests.stored import LABELS, STORED, encoded, memory, table, upload, write_dataset, write_folder, write_tar

__all__ = ["memory"]
S3 = "s3://bucket/photos"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "dense"
    save(tiny.checkpoint(), path)
    return path


@pytest.mark.slow("graph")
@pytest.mark.parametrize("form", ["tar.gz", "parquet of structs", "save_to_disk"])
def test_every_form_gives_the_same_moments(form: str, dense: Path, tmp_path: Path, memory: str) -> None:
    place = STORED[form](tmp_path)
    (tmp_path / "other").mkdir()
    expected = tmp_path / "folder.safetensors"
    corp_deploy.calibrate(dense, write_folder(tmp_path / "other"), expected)
    found = {
        "local": corp_deploy.calibrate(dense, place, tmp_path / "a.safetensors").path,
        "remote": corp_deploy.calibrate(dense, upload(tmp_path, place, memory), tmp_path / "b.safetensors").path,
    }
    whole = load_file(expected)
    for path in found.values():
        tensors = load_file(path)
        assert tensors.keys() == whole.keys()
        assert all(torch.equal(tensors[name], value) for name, value in whole.items())


@pytest.mark.slow("graph")
def test_commands_take_urls_and_labels_by_column(dense: Path, tmp_path: Path, memory: str) -> None:
    url = upload(tmp_path, STORED["parquet of bytes"](tmp_path), memory)
    moments = tmp_path / "m.safetensors"
    invoked("calibrate", "--model", dense, "--images", url, "-o", moments)
    invoked("reduce", "--model", dense, "--moments", moments, "--mlp", "0.5", "-o", tmp_path / "reduced")
    words = ("verify", dense, tmp_path / "reduced", "--images", url, "-o", tmp_path / "parity.json")
    invoked(*words, "--labels", "label", code=3)
    record = json.loads((tmp_path / "parity.json").read_text())
    own = tmp_path / "labels.json"
    own.write_text(json.dumps(list(LABELS)))
    invoked(*words, "--labels", own, code=3)
    assert json.loads((tmp_path / "parity.json").read_text())["links"] == record["links"]
    assert "accuracy" in json.dumps(record)
    refuses("no such file, expected labels: .npy, ", *words, "--labels", "class")
    refuses("or a column of the images: label", *words, "--labels", "class")
    refuses("no such file or folder", "calibrate", "--model", dense, "--images", f"{memory}/none", "-o", moments)
    refuses("s3fs", "calibrate", "--model", dense, "--images", S3, "-o", moments, code=4)


@pytest.mark.parametrize("form", ["tar", "tar.gz", "parquet of structs", "save_to_disk"])
def test_labels_for_reads_the_column_of_drawn_images(form: str, tmp_path: Path) -> None:
    model = tiny.checkpoint().model
    images, column = (
        images_for_model(model, Path(STORED[form](tmp_path)), samples=3),
        "cls" if form[0] == "t" else "label",
    )
    assert labels_for(column, images, model).tolist() == [LABELS[place] for place in images.places]
    message = f"classes: no such file, expected labels: .*, or the word folders, or a column of the images: {column}"
    rejects(message, labels_for, "classes", images, model)


def test_labels_beyond_the_classes_and_texts_are_refused(tmp_path: Path) -> None:
    from pyarrow import parquet

    model, path = tiny.checkpoint().model, tmp_path / "x.parquet"
    contents = [encoded(each) for each in range(3)]
    parquet.write_table(table(contents, [0, -1, 1], struct=True).append_column("name", [["a", "b", "c"]]), path)
    images = images_for_model(model, path)
    rejects("labels from -1 to 1, expected 0 to 6", labels_for, "label", images, model)
    rejects("no such file.* a column of the images: label$", labels_for, "name", images, model)


def test_files_are_groups_of_their_rows_and_members(tmp_path: Path) -> None:
    model = tiny.checkpoint().model
    for form, files in {"tar": 2, "tar.gz": 2, "parquet of bytes": 2, "save_to_disk": 2}.items():
        (root := tmp_path / form).mkdir()
        assert len(group_ids(images_for_model(model, Path(STORED[form](root))), "file").unique()) == files


def test_urls_stay_whole_in_options_and_are_of_images_alone() -> None:
    assert InputOptions(images=place_from_text(S3)).images == S3
    assert isinstance(InputOptions(images=place_from_text(S3)).images, Url)
    assert InputOptions(images=Path("a")).images == Path("a")
    rejects("only images are read from URLs; copy the file", require_path, Url("s3://bucket/texts.txt"))


def written(folder: Path, url: str, **held_out: Any) -> Path:
    tables = {"calibration": {"images": url}, "held_out": {"images": url, **held_out}, "reduce": {"mlp": 0.5}}
    (folder / "recipe.toml").write_text(recipe(tables))
    return folder / "recipe.toml"


def test_urls_in_recipes_are_kept_if_they_are_trusted(tmp_path: Path) -> None:
    path = written(tmp_path, S3, labels="label")
    rejects("calibration.images leads out of .*, to s3://bucket/photos.*give --trust-paths", load_recipe, path)
    read = load_recipe(path, trust_paths=True)
    assert read.calibration.images == Url(S3)
    assert f'images = "{S3}"' in text_of_recipe(read, tmp_path / "out")
    commands = {stage.name: stage.command for stage in stages_of(read, tmp_path / "out", Baseline())}
    assert f"--images {S3} " in commands["moments"]
    assert f"--images {S3} --labels ../label" in commands["parity"]
    settings = {stage.name: stage.settings for stage in stages_of(read, tmp_path / "out", Baseline())}
    assert settings["parity"]["held_out.labels"] == "label"
    rejects("'a\\\\x00b', expected a text", load_recipe, written(tmp_path, "a\0b"), trust_paths=True)


def test_starter_recipe_names_a_url(dense: Path, tmp_path: Path) -> None:
    words = ("--init", dense, "--images", S3, "--labels", "label")
    done = invoked("release", tmp_path / "own" / "recipe.toml", *words)
    assert "--trust-paths" in done.output
    text = (tmp_path / "own" / "recipe.toml").read_text()
    assert f'images = "{S3}"' in text
    assert "hold_out = 128" in text


def test_digests_follow_what_a_folder_is_read_as(tmp_path: Path, memory: str) -> None:
    for form in ("folder of parquet", "save_to_disk"):
        (root := tmp_path / form).mkdir()
        place = Path(str(STORED[form](root)))
        (place / "cover.png").write_bytes(encoded(0))
        if form == "folder of parquet":
            (place / "cover.png").unlink()
        files = files_of(place, pictures=True)
        assert {path.suffix for path in files} & {".parquet", ".arrow"}
        before = Digests(tmp_path / "digests.json").of_path(place, pictures=True)
        files[0].write_bytes(files[0].read_bytes() + b" ")
        assert Digests(tmp_path / "digests.json").of_path(place, pictures=True) != before
    assert len(files_of(Path(f"{tmp_path}/folder of parquet/t/x-{{0..1}}.parquet#image"))) == 2
    digests, url = Digests(tmp_path / "digests.json"), Url(upload(tmp_path, place, memory))
    first = digests.of_path(url)
    upload(tmp_path, place, memory)
    assert digests.of_path(url) == first, "asked for once"
    assert Digests(tmp_path / "digests.json").of_path(url) != first


@pytest.mark.slow("graph")
def test_release_of_images_behind_a_url(tmp_path: Path, memory: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    save(tiny.checkpoint(), home / "dense")
    write_tar(tmp_path / "fit.tar.gz", {f"{each:02}.png": encoded(each) for each in range(24)})
    write_tar(tmp_path / "judge.tar", {
        f"{each:02}.{kind}": content for each in range(30, 50)
        for kind, content in (("cls", b"%d" % (each % 7)), ("png", encoded(each)))
    })  # fmt: skip
    upload(tmp_path, "", memory)
    tables: Mapping[str, Mapping[str, Any]] = {
        "calibration": {"images": f"{memory}/fit.tar.gz", "batch_size": 8},
        "held_out": {"images": f"{memory}/judge.tar", "labels": "cls"},
        "reduce": {"mlp": 0.3},
        "gate": {"fail_if": ["accuracy < 0"]},
    }
    (home / "recipe.toml").write_text(recipe(tables))
    words = ("release", home / "recipe.toml", "-o", home / "out", "--trust-paths")
    invoked(*words)
    assert "accuracy" in (home / "out" / "parity.json").read_text()
    assert "a URL: sha256 over the names" in (home / "out" / "provenance.json").read_text()
    assert "nothing to do" in invoked(*words, "--dry-run").stdout
    upload(tmp_path, "", memory)
    assert (home / "out" / STATE).is_dir()
    again = json.loads(invoked(*words, "--dry-run", "--json").stdout)["stages"]
    assert {row["stage"]: row["why"] for row in again}["moments"] == "changed: calibration.images"
    assert {row["stage"]: row["state"] for row in again}["dense"] == "cached"


@pytest.mark.slow("graph")
def test_arrays_behind_a_url_are_inputs_of_verify_and_bench(dense: Path, tmp_path: Path, memory: str) -> None:
    np.save(tmp_path / "x.npy", tiny.images(4))
    url = upload(tmp_path, tmp_path / "x.npy", memory)
    local, remote = (inputs_for_model(tiny.checkpoint().model, each) for each in (tmp_path / "x.npy", Url(url)))
    assert remote.digest == local.digest
    invoked("bench", dense, dense, "--images", url, "--batch", "2", "--time-limit", "0.5", code=0)


def test_saved_data_sets_and_opened_ones_have_equal_labels(tmp_path: Path) -> None:
    model = tiny.checkpoint().model
    assert labels_for("label", images_for_model(model, Path(write_dataset(tmp_path))), model).tolist() == list(LABELS)
