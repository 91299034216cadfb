"""What a proof costs: forward passes, copies and memory of the images; products in float16 by way of float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from corp_deploy.proof import chain
from corp_deploy.proof.candidates import candidate_from_path
from corp_deploy.proof.chain import prove
from corp_deploy.proof.half_products import HalfProducts
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


LAYERS = {
    "linear": (nn.Linear(300, 7), (5, 300)),
    "convolution": (nn.Conv2d(6, 4, 3, padding=1, groups=2), (2, 6, 5, 5)),
    "attention": (nn.MultiheadAttention(12, 3, batch_first=True), (2, 5, 12)),
}


def answered(layer: nn.Module, x: Tensor) -> Tensor:
    out = layer(x, x, x)[0] if isinstance(layer, nn.MultiheadAttention) else layer(x)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_what_comes_out_is_the_exact_product_rounded(name: str) -> None:
    layer, shape = LAYERS[name]
    half, x = layer.half().eval(), torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()
    with HalfProducts():  # type: ignore[no-untyped-call]
        given = answered(half, x)
    exact = answered(half.double(), x.double())
    assert given.dtype == torch.float16
    torch.testing.assert_close(given.double(), exact, rtol=2e-3, atol=2e-3 if name == "attention" else 1e-3)


@torch.no_grad()
def test_a_single_product_is_rounded_once() -> None:
    a, b = (torch.randn(9, 9, generator=torch.Generator().manual_seed(seed)).half() for seed in (0, 1))
    with HalfProducts():  # type: ignore[no-untyped-call]
        given = a @ b
    assert torch.equal(given, (a.float() @ b.float()).half())
    assert (given.double() - a.double() @ b.double()).abs().max() <= 2.0**-10 * (a.double() @ b.double()).abs().max()


@torch.no_grad()
def test_other_types_are_left_alone() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    with HalfProducts():  # type: ignore[no-untyped-call]
        assert torch.equal(x @ x.T, torch.mm(x, x.T))
        assert (x.bfloat16() @ x.T.bfloat16()).dtype == torch.bfloat16


@torch.no_grad()
def test_what_overflows_float16_is_infinite_as_it_is_there() -> None:
    big = torch.full((2, 64), 200.0).half()
    with HalfProducts():  # type: ignore[no-untyped-call]
        assert torch.isinf(big @ big.T).all()
