"""verify --polygraphy: its files, read and compared by Polygraphy's command line."""

import io
import json
import shutil
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from corp_deploy.store.checkpoint import save
from corp_deploy.store.onnx_file import export_checkpoint
from tests import tiny
from tests.command import invoked, refuses

COUNT, BATCH = 20, 8
LACKING = "the extra `interop` (Polygraphy) is not installed"
polygraphy_json = pytest.importorskip("polygraphy.json", reason=LACKING)
polygraphy_tools = pytest.importorskip("polygraphy.tools", reason=LACKING)


def polygraphy(line: str, directory: Path) -> tuple[int, str]:
    """Run a line of Polygraphy's command line and return its exit code and output."""
    words = line.replace("'", "").split()
    assert words[0] == "polygraphy", line
    printed = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(printed),
        redirect_stderr(printed),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # Polygraphy warns
        patch.setattr(sys, "argv", words)
        patch.chdir(directory)
        code = polygraphy_tools.main()
    return int(code or 0), printed.getvalue()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, dense = tmp_path_factory.mktemp("home"), tiny.checkpoint(depth=1)
    save(dense, root / "dense")
    for precision in ("fp32", "fp16"):
        export_checkpoint(dense, root / f"{precision}.onnx", precision=precision)
    np.save(root / "images.npy", tiny.images(COUNT))
    words = ("--images", root / "images.npy", "--batch", f"1,{BATCH}", "-o", root / "parity.json")
    models = [root / name for name in ("dense", "fp32.onnx", "fp16.onnx")]
    (root / "printed.txt").write_text(invoked("verify", *models, *words, "--polygraphy", root / "p").stdout)
    return root


def lines_of(home: Path, place: int) -> tuple[str, list[str]]:
    """Return the command that compares a graph, and the commands that debug it."""
    script = [line for line in (home / "p" / "compare.sh").read_text().splitlines() if line.startswith("polygraphy")]
    readme = [line for line in (home / "p" / "README.md").read_text().splitlines() if line.startswith("polygraphy")]
    own = [line for line in readme[len(script) :] if f"{place + 1}-" in line]
    assert set(script) <= set(readme)
    return script[place], own


@pytest.mark.slow("graph")
def test_inputs_and_golden_outputs_equal_those_of_the_proof(home: Path) -> None:
    pixels = np.load(home / "images.npy")
    fed = polygraphy_json.load_json(str(home / "p" / "1-fp32.inputs.json"))
    (name,) = fed[0]
    assert [len(part[name]) for part in fed] == [8, 8, 4]
    assert np.array_equal(np.concatenate([part[name] for part in fed]), pixels)
    golden = polygraphy_json.load_json(str(home / "p" / "1-fp32.golden.json"))
    ((_, iterations),) = golden.items()
    with torch.inference_mode():
        expected = tiny.checkpoint(depth=1).model(torch.from_numpy(pixels)).numpy()
    assert np.allclose(np.concatenate([part["logits"] for part in iterations]), expected, atol=1e-5)
    links = json.loads((home / "parity.json").read_text())["links"]
    wide = np.sqrt(np.square(expected.astype(np.float64)).mean(1)).max()
    bound = links[0]["tolerance"]["max_relative_error"] * wide
    assert float(lines_of(home, 0)[0].rpartition("logits:")[2]) == pytest.approx(bound, rel=1e-4)


@pytest.mark.parametrize("place", [0, 1])
def test_printed_polygraphy_command_passes(home: Path, place: int) -> None:
    line, _ = lines_of(home, place)
    assert line in (home / "printed.txt").read_text()
    code, printed = polygraphy(line, home / "p")
    assert code == 0, printed
    assert "Passed: 3/3 iterations" in printed


@pytest.mark.slow("models")
def test_damaged_graph_fails_in_both_tools(home: Path) -> None:
    model = onnx.load(str(home / "fp32.onnx"))
    weight = [each for each in model.graph.initializer if len(each.dims) == 2][-1]
    values = numpy_helper.to_array(weight).copy()
    values[:, 0] += 0.5
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    onnx.save(model, str(home / "damaged.onnx"))
    line, (kept, inside, merged, cut) = lines_of(home, 0)
    assert polygraphy(line.replace("fp32.onnx", "damaged.onnx"), home / "p")[0] == 1
    for good in (kept, inside, merged):
        code, printed = polygraphy(good, home / "p")
        assert code == 0, printed
    assert polygraphy(inside.replace("fp32.onnx", "damaged.onnx"), home / "p")[0] == 1
    code, printed = polygraphy(cut.replace("../fp32.onnx", "../damaged.onnx"), home / "p")
    if code != 0:
        assert "'onnx_graphsurgeon' is required" in printed
        pytest.skip("polygraphy debug reduce needs onnx-graphsurgeon, which is not installed")
    assert len(onnx.load(str(home / "p" / "1-fp32.smallest.onnx")).graph.node) < len(model.graph.node)


def test_unwritable_second_opinion_is_refused_before_the_proof(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "dense", tmp_path / "reduced")
    words = ("--images", home / "images.npy", "-o", tmp_path / "parity.json", "--polygraphy", tmp_path / "p")
    refuses("none of the candidates is an ONNX graph", "verify", home / "dense", tmp_path / "reduced", *words)
    refuses("--polygraphy", "verify", home / "fp32.onnx", home / "fp16.onnx", *words)
    assert not (tmp_path / "parity.json").exists()
    assert not (tmp_path / "p").exists()


def test_missing_polygraphy_names_the_package(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polygraphy.json", None)
    words = ("--images", home / "images.npy", "-o", tmp_path / "parity.json", "--polygraphy", tmp_path / "p")
    refuses("install the extra `interop`", "verify", home / "dense", home / "fp32.onnx", *words, code=4)
    assert not list(tmp_path.iterdir())
