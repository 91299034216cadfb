"""Accuracy by class: counts against loops, names of classes, and the report's table of those that lose most."""

import csv
import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from corp_deploy.invocation.proof import ProofOptions
from corp_deploy.proof.limits import ParityLimits
from corp_deploy.proof.model_inputs import inputs_from_set
from corp_deploy.proof.prove import candidates_from_paths, run_proof
from corp_deploy.store.checkpoint import Checkpoint, save
from corp_deploy.store.class_names import CLASS_NAMES
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.store.labels import labels_for
from perf.parity.labels import ClassAccuracy, accuracy_by_class, accuracy_on_labels, mcnemar
from perf.parity.parity import Parity, parity_from_value
from perf.report.page import html_from_content
from perf.report.parity_tables import MOST_CLASSES, accuracy_table, classes_table
from perf.report.render import csv_from_content, markdown_from_content
from perf.stats.decision import paired_interval
from tests import tiny
from tests.refusals import rejects
from tests.test_perf_report import parity, record


def counts(index: int, *, images: int = 50, correct: int = 40, lost: int = 0, gained: int = 0) -> ClassAccuracy:
    name = f"kind {index}"
    return ClassAccuracy(index=index, name=name, images=images, correct=correct, lost=lost, gained=gained)


def test_counts_by_class_equal_those_of_a_loop() -> None:
    rng = np.random.default_rng(0)
    dense, shipped, labels = rng.standard_normal((90, 7)), rng.standard_normal((90, 7)), rng.integers(0, 6, 90)
    labels[labels == 2] = 3
    shipped[0] = np.nan
    found = accuracy_by_class(dense, shipped, labels, {3: "fox"})
    assert [each.index for each in found] == [0, 1, 3, 4, 5], "classes without images are left out"
    assert [each.name for each in found] == [None, None, "fox", None, None]
    for each in found:
        rows = [
            (dense[place].argmax() == label, np.isfinite(shipped[place]).all() and shipped[place].argmax() == label)
            for place, label in enumerate(labels)
            if label == each.index
        ]
        assert each.images == len(rows)
        assert each.accuracy_dense == sum(one for one, _ in rows) / len(rows)
        assert each.accuracy == sum(other for _, other in rows) / len(rows)
        gained, lost = sum(not one and other for one, other in rows), sum(one and not other for one, other in rows)
        assert (each.change.low, each.change.high) == paired_interval(gained, lost, len(rows))
        assert each.change.value == pytest.approx(each.accuracy - each.accuracy_dense)


def test_single_logit_has_two_classes() -> None:
    found = accuracy_by_class(
        np.array([[1.0], [-1.0], [2.0]]), np.array([[1.0], [1.0], [-2.0]]), np.array([1, 0, 1]), {}
    )
    assert [(each.index, each.images, each.correct, each.lost, each.gained) for each in found] == [
        (0, 1, 1, 1, 0), (1, 2, 2, 1, 0)]  # fmt: skip


@pytest.mark.parametrize(
    "odd", [{"lost": 41}, {"gained": 11}, {"images": 0, "correct": 0}, {"lost": -1}, {"gained": -1}]
)
def test_impossible_counts_are_refused(odd: Mapping[str, int]) -> None:
    rejects(r"^class 3: got \d+ right of \d+", lambda: counts(3, **odd))


def test_record_keeps_classes_and_leaves_them_out_without_labels() -> None:
    proof = replace(parity(), classes=(counts(0), counts(1, lost=3)))
    assert parity_from_value(proof.to_json(), where="parity.json") == proof
    assert "classes" not in parity().to_json()


def test_table_lists_the_worst_classes_and_the_others_together() -> None:
    every = [counts(index, lost=index % 31, gained=3) for index in range(60)]
    table = classes_table(replace(parity(), classes=tuple(every)))
    assert len(table.rows) == MOST_CLASSES + 1
    worst = sorted(every, key=lambda each: (each.gained - each.lost, each.index))
    assert [row[0] for row in table.rows[:-1]] == [f"{each.name}\nclass {each.index}" for each in worst[:MOST_CLASSES]]
    assert table.rows[0] == ("kind 30\nclass 30", "80.0 % → 26.0 %\nof 50 images", "−54.0\n−68.6 to −34.7")
    rest = worst[MOST_CLASSES:]
    lost, images = sum(each.lost for each in rest), 50 * len(rest)
    low, high = paired_interval(3 * len(rest), lost, images)
    change = (3 * len(rest) - lost) / images
    assert table.rows[-1][0] == "the other 40 classes"
    assert table.rows[-1][1].endswith("\nof 2,000 images")
    assert table.rows[-1][-1] == f"{100 * change:+.1f}\n{100 * low:+.1f} to {100 * high:+.1f}".replace("-", "−")
    sure = sum(each.change.high < 0 for each in every)
    assert f"{sure} of 60 lie wholly below 0, and up to about 2 do by chance" in table.note
    whole = classes_table(replace(parity(), classes=tuple(every[: MOST_CLASSES + 1])))
    assert len(whole.rows) == MOST_CLASSES + 1, "a single other class has its own line"
    assert "other" not in whole.rows[-1][0]


def test_every_report_shows_classes() -> None:
    unnamed = ClassAccuracy(index=4, images=50, correct=40, lost=4, gained=0)
    made = record(parity=replace(parity(), classes=(counts(0), unnamed, counts(7, lost=10, gained=1))))
    page, text = html_from_content(made), markdown_from_content(made)
    assert page.index("Accuracy by class") < page.index("kind 7<small>class 7</small>") < page.index("<td>class 4</td>")
    assert "| kind 7 · class 7 | 80.0 % → 62.0 % · of 50 images | −18.0 · " in text
    rows = [row for row in csv.DictReader(io.StringIO(csv_from_content(made))) if row["section"] == "classes"]
    of_seven = {row["name"]: row for row in rows if row["subject"] == "kind 7"}
    assert {name: row["value"] for name, row in of_seven.items()} == {
        "index": "7", "images": "50", "accuracy_dense": "0.8", "accuracy": "0.62", "change": "-0.18"}  # fmt: skip
    assert float(of_seven["change"]["low"]) < -0.18 < float(of_seven["change"]["high"]) < 0
    assert "Accuracy by class" not in html_from_content(record())


def test_difference_of_two_models_has_a_paired_interval() -> None:
    labels, dense = np.zeros(200, int), np.tile([1.0, 0.0], (200, 1))
    shipped = np.where(np.arange(200)[:, None] < 9, 1 - dense, dense)
    found = [accuracy_on_labels(name, rows, labels) for name, rows in (("dense", dense), ("small", shipped))]
    pair = mcnemar("dense", dense, "small", shipped, labels)
    cells = accuracy_table(replace(parity(), accuracy=tuple(found), comparisons=(pair,))).rows[-1]
    low, high = paired_interval(0, 9, 200)
    ends = f"{100 * low:+.1f} to {100 * high:+.1f}".replace("-", "−")
    for odd in ((), tuple(replace(each, images=8) for each in found)):
        rejects(
            "right in dense alone.* but an accuracy of [08] images",
            replace,
            parity(),
            accuracy=odd,
            comparisons=(pair,),
        )
    assert cells == ("small\nminus dense", f"−4.5\n{ends}", "0 against 9 right alone\np = 0.0039")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for index in range(21):
        folder = root / f"animal-{'gfedcba'[index % 7]}"
        folder.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (32, 32, 3), np.uint8)).save(folder / f"{index}.png")
    return root


def proved(dense: Checkpoint, photos: Path, labels: Any, folder: Path) -> Parity:
    images = images_for_model(dense.model, photos)
    save(dense, folder / "same")
    inputs = inputs_from_set(images, labels_for(labels, images, dense.model))
    limits = ParityLimits.from_options(ProofOptions().values)
    return run_proof(dense, candidates_from_paths([folder / "same"]), inputs, limits, output=None).parity


def test_classes_are_named_by_the_model_or_else_by_their_folders(photos: Path, tmp_path: Path) -> None:
    dense = tiny.checkpoint()
    by_folder = proved(dense, photos, "folders", tmp_path)
    assert [each.name for each in by_folder.classes] == [f"animal-{letter}" for letter in "abcdefg"]
    assert all((each.images, each.lost, each.gained) == (3, 0, 0) for each in by_folder.classes)
    assert sum(each.correct for each in by_folder.classes) == by_folder.accuracy[0].correct
    named = replace(dense, lineage={**dense.lineage, CLASS_NAMES: [*"tuvwxyz"]})
    assert [each.name for each in proved(named, photos, "folders", tmp_path).classes] == [*"tuvwxyz"]
    mixed = proved(dense, photos, [place % 2 for place in range(21)], tmp_path)
    assert [each.name for each in mixed.classes] == [None, None], "images of one class lie in several folders"
