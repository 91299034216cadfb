"""What a proof costs: forward passes, copies and memory of the images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from corp_deploy.proof import chain
from corp_deploy.proof.candidates import candidate_from_path
from corp_deploy.proof.chain import prove
from corp_deploy.proof.inputs import inputs_from_set
from corp_deploy.proof.link_rules import ParityLimits
from corp_deploy.store.checkpoint import load_checkpoint, save
from corp_deploy.store.inputs import images_for_model
from corp_deploy.store.onnx_file import export_checkpoint
from ground.feeds import Feeds, batch_size
from perf.runners.module import ModuleRunner
from perf.runners.onnx import OnnxRunner

from . import tiny

IMAGES = 64


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, the second one's graph, and images."""
    folder = tmp_path_factory.mktemp("chain")
    dense = tiny.checkpoint()
    save(dense, folder / "dense")
    with torch.no_grad():
        for parameter in dense.model.parameters():
            parameter.mul_(1.001)
    save(dense, folder / "reduced")
    export_checkpoint(dense, folder / "fp32.onnx", precision="fp32")
    np.save(folder / "images.npy", tiny.images(IMAGES))
    return folder


@pytest.mark.slow("graph")
def test_a_proof_runs_at_most_twice_the_images_it_judges(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[str, int]] = []
    for runner in (ModuleRunner, OnnxRunner):
        monkeypatch.setattr(runner, "__call__", counted(runner, runs))
    dense = load_checkpoint(home / "dense")
    given = inputs_from_set(images_for_model(dense.model, home / "images.npy"))
    export_checkpoint(load_checkpoint(home / "reduced"), home / "fp16.onnx", precision="fp16")
    candidates = [candidate_from_path(home / name) for name in ("reduced", "fp32.onnx", "fp16.onnx")]
    proof = prove(dense, candidates, given, batches=(1, 7, 32), limits=ParityLimits(max_error=1.0))
    assert proof.parity.verdict == "PASS"
    assert IMAGES * 4 < sum(count for _, count in runs) <= 2 * IMAGES * 4
    for each in proof.parity.links:
        assert [(row.batch, row.images) for row in each.batches] == [(1, 4), (7, 7), (32, None)]
        assert each.measures.images == IMAGES


def counted(runner: type, runs: list[tuple[str, int]]) -> Any:
    call = runner.__call__

    def __call__(self: Any, feeds: Feeds) -> Any:
        runs.append((runner.__name__, batch_size(feeds)))
        return call(self, feeds)

    return __call__


@pytest.mark.slow("graph")
def test_one_candidate_is_open_at_a_time(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    for runner in (ModuleRunner, OnnxRunner):
        enter, leave = runner.__enter__, runner.__exit__

        def entered(self: Any, enter: Any = enter) -> Any:
            opened.append(len(opened) - 2 * sum(each < 0 for each in opened))
            return enter(self)

        def left(self: Any, *error: Any, leave: Any = leave) -> None:
            opened.append(-1)
            leave(self, *error)

        monkeypatch.setattr(runner, "__enter__", entered)
        monkeypatch.setattr(runner, "__exit__", left)
    dense = load_checkpoint(home / "dense")
    given = inputs_from_set(images_for_model(dense.model, home / "images.npy"))
    prove(dense, [candidate_from_path(home / "reduced")], given, batches=(8,), limits=ParityLimits())
    assert opened == [0, -1, 0, -1]


def test_images_are_held_in_a_file(home: Path) -> None:
    dense = load_checkpoint(home / "dense")
    source = images_for_model(dense.model, home / "images.npy")
    given = inputs_from_set(source)
    assert isinstance(given.feeds["images"], np.memmap)
    np.testing.assert_array_equal(given.feeds["images"], np.concatenate([batch.numpy() for batch in source.batches(5)]))


def test_blocks_are_looked_at_only_when_a_link_fails(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(chain, "located", lambda name, *_: asked.append(name))
    dense = load_checkpoint(home / "dense")
    given = inputs_from_set(images_for_model(dense.model, home / "images.npy", samples=8))
    steps = [candidate_from_path(home / name) for name in ("reduced", "fp32.onnx")]
    prove(dense, steps, given, batches=(8,), limits=ParityLimits())
    assert asked == []
    prove(dense, steps, given, batches=(8,), limits=ParityLimits(max_error=1e-9))
    assert asked == ["reduced"]


def test_a_module_that_runs_as_it_is_is_not_copied() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4)).eval()
    feeds = {"images": tiny.images(2)}
    with ModuleRunner(module) as runner:
        expected = runner(feeds)["logits"]
        assert runner._ready is module
    module.train()
    with ModuleRunner(module) as runner:
        assert runner._ready is not module
        np.testing.assert_array_equal(runner(feeds)["logits"], expected)
    assert module.training
    with ModuleRunner(module.eval(), precision="bf16") as runner:
        assert runner._ready is not module
    assert all(parameter.requires_grad for parameter in module.parameters())
