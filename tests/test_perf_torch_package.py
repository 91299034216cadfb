"""AOTInductor packages: compilation, trust, refusals, and answers equal to the model's."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from corp_deploy.invocation.table import BENCH
from corp_deploy.proof.contender import port_of_images
from corp_deploy.store.checkpoint import save
from export.graph.package_notes import LARGEST_BATCH
from export.graph.to_package import package_from_model
from ground.ports import LOGITS, OutputPort, image_port
from perf.runners.torch_package import CHECKED, PackageRunner
from tests import tiny
from tests.command import invoked, refused, refuses
from tests.refusals import rejects

IMAGES = np.random.default_rng(0).standard_normal((3, 3, 4, 4)).astype(np.float32)


class Compiled:
    """A loaded package that takes one batch size, or any if `batch` is None."""

    def __init__(self, batch: int | None) -> None:
        self.batch = batch

    def get_metadata(self) -> dict[str, str]:
        return {"AOTI_CPU_ISA": "AVX2"}

    def __call__(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        if self.batch is not None and len(images) != self.batch:
            raise RuntimeError(f"input_handles[0]: unmatched dim value at 0, expected: {self.batch}")
        return torch.stack([flat.sum(1), flat.square().sum(1)], dim=1)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "m.pt2").write_bytes(b"code")
    return tmp_path / "m.pt2"


def replace_loader(monkeypatch: pytest.MonkeyPatch, batch: int | None = None) -> list[str]:
    """Replace torch's loader of packages and return the list that it adds loaded paths to."""
    loaded: list[str] = []

    def load(path: str) -> Compiled:
        loaded.append(path)
        return Compiled(batch)

    monkeypatch.setattr(torch._inductor, "aoti_load_package", load)
    monkeypatch.setenv(CHECKED, "0")
    return loaded


def test_package_runs_and_reports_itself(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_loader(monkeypatch)
    before = torch.get_num_threads()
    with PackageRunner(package, (image_port((3, 4, 4)),), threads=1) as runner:
        answers = runner({"images": IMAGES})["output_0"]
        told = runner.describe()
        assert runner.bind({"images": IMAGES}).laps(2, lambda: 0).calls == 2
        assert runner.outputs == (OutputPort(name="output_0", role="logits"),)
    flat = IMAGES.reshape(3, -1).astype(np.float64)
    np.testing.assert_allclose(answers, np.stack([flat.sum(1), (flat**2).sum(1)], axis=1), rtol=1e-5, atol=1e-5)
    assert (told["backend"], told["compiled_for"], told["compiled_batch"]) == ("aotinductor", "AVX2", "unknown")
    assert torch.get_num_threads() == before


def test_uncompiled_batch_is_refused(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_loader(monkeypatch, batch=2)
    outputs = (OutputPort(name="logits", role="logits"),)
    with PackageRunner(package, (image_port((3, 4, 4)),), outputs) as runner:
        assert os.environ[CHECKED] == "1", "the compiled code would read past the end"
        assert runner({"images": IMAGES[:2]})["logits"].shape == (2, 2)
        rejects(r"doesn't run on \[3, 3, 4, 4\].*compiled for another batch", runner, {"images": IMAGES})


def test_other_files_are_refused(package: Path) -> None:
    rejects(r"m\.pt2: torch .* cannot load this package", PackageRunner(package, (image_port((3, 4, 4)),)).__enter__)
    rejects("no such package", PackageRunner(package.with_name("none.pt2"), ()).__enter__)
    rejects("threads", PackageRunner, package, (), threads=0)


@pytest.mark.slow("models")
def test_package_counts_as_code_that_needs_trust(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = replace_loader(monkeypatch)
    np.save(package.parent / "images.npy", IMAGES)
    quick = ["--batch", "2", "--time-limit", "0.5", "--half-width", "0.9", "--min-rounds", "6", "--block-ms", "2"]
    words = ["bench", package, package, *quick, "-o", package.parent / "b.json"]
    refused(invoked(*words, "--images", package.parent / "images.npy", code=2), "is code", "--trust-code")
    assert loaded == []
    refuses("a package doesn't record its inputs", *words, "--trust-code")
    assert loaded == []
    invoked(*words, "--images", package.parent / "images.npy", "--trust-code")
    assert set(loaded) == {str(package)}
    cast = [*words, "--images", package.parent / "images.npy", "--trust-code", "--dtype", "bf16"]
    refuses("a package is compiled in its precision", *cast)
    assert BENCH.variants["aotinductor"].supports("dtype", "bf16")


def test_package_takes_an_array_of_inputs(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", IMAGES)
    assert port_of_images(tmp_path / "x.npy", tmp_path / "m.pt2") == image_port((3, 4, 4))
    (tmp_path / "bad.npy").write_bytes(b"no array")
    rejects(r"bad\.npy: not a valid \.npy file", port_of_images, tmp_path / "bad.npy", tmp_path / "m.pt2")
    rejects(r"expected --images FILE\.npy .* got none", port_of_images, None, tmp_path / "m.pt2")


def test_missing_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    save(tiny.checkpoint(), tmp_path / "dense")
    words = ["bench", tmp_path / "dense", tmp_path / "dense", "--backend", "aotinductor", "--batch", 1]
    refuses("needs a C++ compiler", *words, "-o", tmp_path / "b.json", code=4)


class Small(nn.Module):
    """A linear layer and a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(48, 5)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.layer(images.flatten(1)).relu()
        return out


def test_batch_one_is_compiled_separately(tmp_path: Path) -> None:
    save(tiny.checkpoint(), tmp_path / "dense")
    words = ["bench", tmp_path / "dense", tmp_path / "dense", "--backend", "aotinductor", "--batch", "1,8,32"]
    refuses("measure --batch 1 by itself, and --batch 8,32 in another run", *words, "-o", tmp_path / "b.json")
    assert not (tmp_path / "b.json").exists()


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("bf16", 0.1)])
def test_model_is_compiled_for_any_batch_in_its_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, bound: float
) -> None:
    """The compiler takes a minute, so the program that it would get is run instead."""
    programs: list[Any] = []
    configs: list[dict[str, Any]] = []

    def compile_it(program: Any, package_path: str, inductor_configs: dict[str, Any]) -> None:
        programs.append(program)
        configs.append(inductor_configs)

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_it)
    module = Small().eval()
    weight, bias = (tensor.detach().double().numpy() for tensor in (module.layer.weight, module.layer.bias))
    before = torch.get_num_threads()

    def compiled(batch: int | None) -> Any:
        ports = (image_port((3, 4, 4)),), (LOGITS,)
        package_from_model(module, tmp_path / "m.pt2", *ports, precision=precision, batch=batch, threads=1)
        return programs.pop()

    program, alone = compiled(None), compiled(1)
    (limits,) = program.range_constraints.values()
    assert (limits.lower, limits.upper) == (1, LARGEST_BATCH)
    assert not alone.range_constraints
    assert [each["cpp.dynamic_threads"] for each in configs] == [False, False]
    held = {tensor.dtype for tensor in program.state_dict.values()}
    assert held == {torch.float32 if precision == "fp32" else torch.bfloat16}
    for count in (1, 2, 3):
        got = (alone if count == 1 else program).module()(torch.from_numpy(IMAGES[:count]))
        expected = np.maximum(IMAGES[:count].reshape(count, -1) @ weight.T + bias, 0.0)
        assert got.dtype == torch.float32
        np.testing.assert_allclose(got.detach().numpy(), expected, rtol=bound, atol=bound)
    assert torch.get_num_threads() == before
    assert module.layer.weight.dtype == torch.float32, "the caller's model is unchanged"
