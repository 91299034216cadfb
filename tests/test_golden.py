"""Golden files read as they did when they were written; files of other versions are refused with the remedy."""

import ast
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from corp_deploy.store.checkpoint import load_checkpoint
from tests import tiny
from tests.command import invoked, refuses, run
from tests.golden.answers import FIGURES, answers_of
from tests.golden.versions import KEPT, change_head, head_of, set_version
from tests.refusals import rejects
from tests.sources import ROOT, trees

GOLDEN = Path(__file__).with_name("golden") / "files"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "reference" / "files.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([\w./-]+)`, version (\d+) \|.*\| ([^|]*) \|$", PAGE, re.MULTILINE)
VERSIONS = {kind: int(version) for kind, version, _ in ROWS}
OTHERS_OF = {kind: other for kind, _, other in ROWS}
"""By kind what becomes of a file of another version."""
READ = {kind: name for kind, name in KEPT.items() if OTHERS_OF[kind] != "not read"}
REFUSED = {kind: name for kind, name in READ.items() if "counts as missing" not in OTHERS_OF[kind]}
NO_FILE = {"corp-deploy/digests", "server-releases"}
"""Kinds without a golden file: absolute paths of one machine, and a table of the tool itself."""


def plain(value: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(value))


def require_same(got: Any, expected: Any, where: str, tolerance: float = 1e-5) -> None:
    """Numbers to the tolerance, of their own size where that is above 1; all else equal."""
    if isinstance(expected, dict):
        assert list(got) == list(expected), where
        for key, value in expected.items():
            require_same(got[key], value, f"{where}: {key}", tolerance)
    elif isinstance(expected, list):
        assert len(got) == len(expected), where
        for index, value in enumerate(expected):
            require_same(got[index], value, f"{where}[{index}]", tolerance)
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, rel=tolerance, abs=tolerance), where
    else:
        assert got == expected, where


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy of every file, to spoil."""
    return shutil.copytree(GOLDEN, tmp_path / "golden")


def files_of(folder: Path) -> dict[Path, int]:
    """Folders may have held something in between."""
    return {path: path.stat().st_mtime_ns if path.is_file() else 0 for path in folder.rglob("*")}


def figures(folder: Path, name: str) -> dict[str, Any]:
    return FIGURES[name](folder / name)


@pytest.mark.parametrize("name", FIGURES)
def test_golden_file_is_read_unchanged(name: str) -> None:
    require_same(plain(figures(GOLDEN, name)), EXPECTED[name], name)


def test_changed_golden_file_is_noticed(golden: Path) -> None:
    """Else the test above would be decoration."""
    shutil.rmtree(golden / "models/vit")
    (golden / "models/vit-padded").rename(golden / "models/vit")
    with pytest.raises(AssertionError):
        require_same(plain(figures(golden, "models/vit")), EXPECTED["models/vit"], "vit")


def test_golden_moments_give_the_golden_model(tmp_path: Path) -> None:
    own = ("--model", GOLDEN / "models/vit", "--moments", GOLDEN / "moments/vit.safetensors")
    options = ("--mlp", "0.5", "--attn", "0.4", "--heads", "padded", "--align", "mlp=8,head=8,conv=8")
    invoked("reduce", *own, *options, "-o", tmp_path / "again")
    # Another processor may solve to other last digits, which a model takes through float32.
    expected = EXPECTED["models/vit-padded"]["outputs"]
    require_same(plain(answers_of(load_checkpoint(tmp_path / "again").model)), expected, "vit", tolerance=1e-3)


def kind_in(node: ast.AST) -> ast.expr | None:
    """Return what a dictionary, a struct or a reader says the kind of a record is."""
    if isinstance(node, ast.Dict):
        entries = {getattr(key, "value", ""): value for key, value in zip(node.keys, node.values, strict=True)}
        return entries["kind"] if entries.keys() >= {"kind", "version"} else None
    if isinstance(node, ast.ClassDef):
        given = {each.arg: each.value for each in node.keywords}
        fields = {ast.unparse(each.target): each.value for each in node.body if isinstance(each, ast.AnnAssign)}
        return (
            given["tag"]
            if {"tag", "tag_field"} <= given.keys()
            else fields.get("kind")
            if "version" in fields
            else None
        )
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("record_from_"):
        return next((each.value for each in node.keywords if each.arg == "kind"), None)
    return None


def kinds_of_source() -> Iterator[str]:
    for path, tree in trees().items():
        for kind in filter(None, map(kind_in, ast.walk(tree))):
            if isinstance(kind, ast.Name) and kind.id.isupper():
                yield getattr(import_module(".".join(path.with_suffix("").parts)), kind.id)
            elif isinstance(kind, ast.Constant) and isinstance(kind.value, str):
                yield kind.value


def test_every_file_kind_is_documented_and_has_a_golden_file() -> None:
    assert set(kinds_of_source()) == VERSIONS.keys()
    assert VERSIONS.keys() - KEPT.keys() == NO_FILE


@pytest.mark.parametrize("kind", KEPT)
def test_every_kind_has_a_golden_file_of_its_version(kind: str) -> None:
    assert head_of(GOLDEN / KEPT[kind], kind) == (kind, VERSIONS[kind]), "run python -m tests.golden.make"


def whoever_reads(golden: Path, name: str) -> None:
    """Read a golden file as expected.json has it: by its directory where it is read as one."""
    own = next(each for each in (name, *(str(each) for each in Path(name).parents)) if each in FIGURES)
    figures(golden, own)


@pytest.mark.parametrize("kind", REFUSED)
def test_file_of_another_version_is_refused_with_the_command_to_remake_it(kind: str, golden: Path) -> None:
    words = r"(corp-deploy [a-z]+|run calibrate|run the step|remove (it|the file)|write it again|delete it)"
    _, written = head_of(golden / REFUSED[kind], kind)
    for version in (written - 1, None, str(written), True, written + 1):
        change_head(golden / REFUSED[kind], kind, lambda head, version=version: _of_version(head, version))  # type: ignore[misc]
        newer = ", written by a newer corp-deploy" if version == written + 1 else ""
        said = rf"{re.escape(kind)} record of version {version}{newer}; this tool reads version {written}: .*{words}"
        rejects(said, whoever_reads, golden, REFUSED[kind])


def _of_version(head: dict[str, Any], version: object) -> None:
    """Leave nothing as it was but the kind."""
    kept = {key: head[key] for key in ("kind", "lineage") if key in head}
    head.clear()
    head.update(kept | {"version": version})


@pytest.mark.parametrize("kind", sorted(READ.keys() - REFUSED.keys()))
def test_state_of_another_version_is_ignored(kind: str, golden: Path) -> None:
    set_version(golden / READ[kind], kind, 2)
    with pytest.raises(AssertionError, match="json"):  # the figures assert that something was read
        whoever_reads(golden, READ[kind])


COMMANDS: dict[str, Sequence[str]] = {
    "corp-deploy/model": ("export", "--model", "models/vit-padded", "-o", "made.onnx"),
    "calib.moments": ("reduce", "--model", "models/vit", "--moments", "moments/vit.safetensors", "--mlp", "0.5",
                      "-o", "made"),
    "bench": ("gate", "records/bench.json", "--fail-if", "params >= dense", "-o", "made.json", "--history", "made"),
    "history": ("report", "records", "-o", "made.html"),
    "expected": ("package", "release", "-o", "release/repository", "--model-version", "2"),
    "calib.resume": ("calibrate", "--model", "models/vit", "--images", "images.npy", "--checkpoint-every", "8", "-o",
                     "states/calibration.safetensors"),
    "corp-deploy/polish-state": ("reduce", "--model", "models/vit", "--moments", "moments/vit.safetensors", "--images",
                                 "images.npy", "--mlp", "0.5", "--polish", "layer", "--polish-steps", "1",
                                 "-o", "made"),
}  # fmt: skip
"""A command that reads a kind."""
PLACES = {
    "calib.resume": "states/calibration.partial.safetensors",
    "corp-deploy/polish-state": "made.polish-unfinished.safetensors",
}
"""Where those look for a state."""


@pytest.mark.parametrize("kind", COMMANDS)
def test_newer_file_is_refused_and_nothing_is_written(kind: str, golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, version = head_of(golden / REFUSED[kind], kind)
    set_version(golden / REFUSED[kind], kind, version + 1)
    if kind in PLACES:
        (golden / REFUSED[kind]).rename(golden / PLACES[kind])
        np.save(golden / "images.npy", tiny.images(24, size=16))
    monkeypatch.chdir(golden)
    before = files_of(golden)
    done = invoked(*COMMANDS[kind], code=2)
    said = " ".join(done.stderr.split())
    assert f"written by a newer corp-deploy; this tool reads version {version}: install that one, or" in said
    assert files_of(golden) == before


def test_history_skips_newer_records_and_reports_them(golden: Path) -> None:
    kept = golden / "kept"
    kept.mkdir()
    shutil.copyfile(golden / "release/bench.json", kept / "newer.json")
    set_version(kept / "newer.json", "bench", 2)
    done = run("gate", golden / "records/bench.json", "--history", kept, "-o", golden / "gate.json")
    assert done.exit_code in (0, 3), done.output
    (left_out,) = json.loads((golden / "history.json").read_text(encoding="utf-8"))["left_out"]
    assert left_out["name"] == "newer.json"
    assert "of version 2, written by a newer corp-deploy" in left_out["reason"]


def test_newer_release_is_refused_by_an_older_tool(golden: Path) -> None:
    """A recipe has no version: a key of later is refused by its name."""
    path = golden / "release" / "recipe.toml"
    path.write_text(path.read_text(encoding="utf-8") + tomli_w.dumps({"later": {"key": 1}}), encoding="utf-8")
    refuses("later", "release", path, "-o", golden / "again", "--plan-only")
    assert not (golden / "again").exists()


def test_golden_files_contain_no_local_paths() -> None:
    for path in GOLDEN.rglob("*"):
        if path.suffix in (".json", ".md", ".toml", ".html", ".xml"):
            assert not re.search(r'["\s=(]/(?:home|root|tmp|work|Users)/', path.read_text(encoding="utf-8")), path
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 2_000_000
