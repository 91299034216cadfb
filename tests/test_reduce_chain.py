"""The way from `corp-deploy reduce` to the solver is short, as ARCHITECTURE.md has it; moments are opened once."""

import re
import traceback
from pathlib import Path

import pytest
import torch

from calib import store
from corp_deploy.algebra import channels, quadratic
from tests import tiny
from tests.command import invoked
from tests.sources import ROOT


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny.written(tmp_path_factory.mktemp("home"), 12)
    words = ("--model", root / "dense", "--images", root / "images.npy", "--hold-out", 4)
    invoked("calibrate", *words, "-o", root / "m.safetensors")
    return root


def test_nine_calls_lead_from_the_command_to_the_solver(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains, solve = set[tuple[str, ...]](), quadratic.solve_ridge

    def spied(*args: torch.Tensor, ridge_rel: float) -> object:
        frames = [Path(each.filename) for each in traceback.extract_stack()[:-1]]
        names = [each.name for each in traceback.extract_stack()[:-1]]
        start, ours = names.index("reduce_command"), (ROOT / "corp_deploy", ROOT / "ground", ROOT / "calib")
        chain = zip(frames[start:], names[start:], strict=True)
        chains.add(tuple(name for path, name in chain if any(path.is_relative_to(room) for room in ours)))
        return solve(*args, ridge_rel=ridge_rel)

    monkeypatch.setattr(channels, "solve_ridge", spied)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # workers have stacks of their own
    words = ("--model", home / "dense", "--moments", home / "m.safetensors", "--mlp", 0.5, "-o", tmp_path / "reduced")
    invoked("reduce", *words)
    (chain,) = chains
    assert len(chain) <= 9, chain
    text = (ROOT / "ARCHITECTURE.md").read_text().partition("From `corp-deploy reduce` to the solver")[2]
    named = re.findall(r"`(\w+)`", text.partition("\n## ")[0])
    assert [name for name in named if name in (*chain, "solve_ridge")] == [*chain, "solve_ridge"]


@pytest.mark.parametrize(
    ("words", "opened"),
    [
        (("reduce", "--mlp", 0.5), ["m"]),
        (("reduce", "--mlp", 0.5, "--held-out", "m.held-out.safetensors"), ["m", "m.held-out"]),
        (("sweep", "--sparsity", 0.5, "--preset", "none", "--images", "images.npy"), ["m"]),
    ],
)
def test_command_opens_each_moments_file_once(
    words: tuple[object, ...], opened: list[str], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, read = list[str](), store._read_header

    def counted(path: Path, *remedy: str) -> object:
        paths.append(path.stem)
        return read(path, *remedy)

    monkeypatch.setattr(store, "_read_header", counted)
    monkeypatch.chdir(home)
    command, *options = words
    invoked(command, "--model", "dense", "--moments", "m.safetensors", *options, "-o", tmp_path / "out")
    assert sorted(paths) == opened
