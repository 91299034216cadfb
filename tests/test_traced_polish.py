"""Polish of traced models: tangents of segments against finite differences, planted layers, and resumption."""

import math
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calib.images import Images
from calib.inputs import InputSet
from corp_deploy.families import traced_model
from corp_deploy.families.module_facts import facts_of_module
from corp_deploy.families.traced_model import steps, tracing
from corp_deploy.polish.newton import LayerGroup, Newton, SweepBudget
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import Polished, PolishProgress, fitted_steps, polished
from corp_deploy.polish.segments import segment_sublayer
from corp_deploy.polish.walk import BlockSteps, StreamPair, stream_pairs, walk
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.spec.architecture import Architecture, Preprocessing
from corp_deploy.spec.merging import Merging
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.traced.models.module import replace_submodules, traced_module
from corp_deploy.traced.models.steps import SegmentStep, StreamState
from tests import tiny
from tests.layer_fits import fit_layers_
from tests.traced_examples import with_structure

DIM, HEADS, TOKENS = 24, 2, 16
HALF: dict[str, Any] = {"mlp_sparsity": 0.5, "attention_sparsity": 0.5, "align_hidden": 4, "align_head": 4}


class Mlp(nn.Module):
    """An MLP without an output bias, which updates the stream in place if `in_place`."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(DIM, 64), nn.ReLU(inplace=in_place)
        self.down, self.in_place = nn.Linear(64, DIM, bias=False), in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            x += self.down(self.act(self.up(x)))
            return x
        return x + self.down(self.act(self.up(x)))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(DIM, 48), nn.Linear(DIM, 48), nn.Linear(48, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class NormBehind(nn.Module):
    """An MLP with a norm on its output, as in Swin V2."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(DIM, 64), nn.Linear(64, DIM), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.down(nn.functional.gelu(self.up(x))))


class Pointwise(nn.Module):
    """An MLP of 1x1 convolutions with a depthwise convolution between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(DIM, 64, 1), nn.Conv2d(64, DIM, 1)
        self.near = nn.Conv2d(64, 64, 3, padding=1, groups=64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.gelu(self.near(self.up(x.mT.unflatten(-1, (4, 4))))))
        return x + out.flatten(2).mT


class Attention(nn.Module):
    """Attention, with rotary positions if `is_turned`."""

    angle_NP: Tensor

    def __init__(self, *, is_turned: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM)
        self.norm, self.proj = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        angle_NP = torch.arange(TOKENS)[:, None] / 3.0 ** torch.arange(DIM // HEADS // 2)
        self.register_buffer("angle_NP", angle_NP if is_turned else torch.zeros_like(angle_NP))

    def turned(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, dim=-1)
        cos, sin = self.angle_NP.cos(), self.angle_NP.sin()
        return torch.cat((one * cos - other * sin, one * sin + other * cos), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (each(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        z = nn.functional.scaled_dot_product_attention(self.turned(q), self.turned(k), v)
        return x + self.proj(z.transpose(1, 2).flatten(2))


class Net(nn.Module):
    """A model that classifies images by the mean of the first `tokens` tokens after its blocks."""

    def __init__(self, *blocks: nn.Module, tokens: int = TOKENS) -> None:
        super().__init__()
        self.input_size, self.tokens = (3, 32, 32), tokens
        self.patch, self.blocks = nn.Conv2d(3, DIM, 8, 8), nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 7)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patch(images).flatten(2).mT))[:, : self.tokens].mean(1))


def net(*blocks: nn.Module, tokens: int = TOKENS) -> nn.Module:
    model = with_structure(Net(*blocks, tokens=tokens)).eval()
    return traced_module(model, facts_of_module(model, Preprocessing()))


def halved(dense: nn.Module, images: InputSet, preset: str = "none") -> nn.Module:
    checkpoint = Checkpoint(model=dense, architecture=Architecture(name="own"), lineage={})
    return reduce(dense, calibrate(checkpoint, images, batch_size=16), method_from_preset(preset, **HALF)).model


def shown(model: nn.Module, count: int, seed: int = 0) -> Images:
    return tiny.opened(Path(tempfile.mkdtemp()) / "images.npy", tiny.images(count, seed), model)


def moved(
    group: LayerGroup, change_RD: Tensor, passage: SegmentStep, x_BNC: Tensor, weights_BN: Tensor | None = None
) -> Tensor:
    """Run the segment with its layers changed by this much."""
    start_RD = group.rows_RD
    group.set_(start_RD + change_RD)
    out_BNC = passage(x_BNC, weights_BN)
    group.set_(start_RD)
    return out_BNC


@pytest.mark.parametrize(
    ("build", "layers", "first"),
    [
        (Mlp, [1, 1], [0]),
        (Gated, [2, 1], [0]),
        (NormBehind, [1, 1], [0]),
        (Pointwise, [1, 1], [0, 1, 4, 5]),
        (Attention, [2, 1, 1], None),  # keys have no bias, so they are a group of their own
        (lambda: Attention(is_turned=True), [2, 1, 1], None),
    ],
)
@torch.no_grad()
def test_segment_linearisation_equals_finite_differences(
    build: Callable[[], nn.Module], layers: list[int], first: list[int] | None
) -> None:
    """Classes depend on the first token only; `first` are the tokens after block 0 that it reads, None for all."""
    torch.manual_seed(1)  # with no rectifier near its kink
    dense = net(build(), build(), tokens=1)
    every = [step for step in steps(dense) if step.name.startswith("blocks")]
    passages = [step for step in every if isinstance(step, SegmentStep)]
    sublayers = [segment_sublayer(dense, passage) for passage in passages]
    tracing(dense).program.graph.double()
    generator = torch.Generator().manual_seed(0)
    for passage, sublayer, expected in zip(passages, sublayers, (first, [0]), strict=True):
        x_BNC, dense_BNC = (torch.randn(3, TOKENS, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
        assert [len(step.matrices) for step in sublayer.groups] == layers
        read = sublayer.read
        assert (None if read is None else read.tolist()) == expected
        tokens = range(TOKENS) if expected is None else expected
        for step in sublayer.groups:
            change_RD = torch.randn(step.rows_RD.shape, generator=generator, dtype=torch.float64)
            (piece,) = step.linearised([StreamPair(dense_BNC, None, StreamState.of(x_BNC, None))])
            ahead, behind = (moved(step, sign * 1e-5 * change_RD, passage, x_BNC) for sign in (1, -1))
            expected_XC = ((ahead - behind) / 2e-5)[:, tokens].flatten(0, 1)
            along_XC = piece.tangent.along(change_RD)
            torch.testing.assert_close(along_XC, expected_XC, rtol=1e-6, atol=1e-6)
            lacking_XC = (dense_BNC - passage(x_BNC))[:, tokens].flatten(0, 1)
            torch.testing.assert_close(piece.residual_XO, lacking_XC, rtol=1e-9, atol=1e-9)
            back_RD = piece.tangent.sensitivity(lacking_XC).mT @ piece.tangent.entering_XD
            torch.testing.assert_close((back_RD * change_RD).sum(), (lacking_XC * along_XC).sum(), rtol=1e-8, atol=1e-8)


def disturbed_(model: nn.Module, by: float) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name in ("blocks.0.up.weight", "blocks.1.up.weight"):
            weight = model.get_parameter(name)
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(by * noise * weight.norm() / math.sqrt(weight.numel()))


@cache
def planted(*, in_place: bool = False) -> tuple[nn.Module, nn.Module, InputSet]:
    """Return a model with half of its hidden channels unused, a disturbed one without those, and images."""
    torch.manual_seed(0)
    dense = net(Mlp(in_place=in_place), Mlp(in_place=in_place))
    with torch.no_grad():
        for index in range(2):
            dense.get_parameter(f"blocks.{index}.down.weight")[:, ::2] = 0.0
    images = shown(dense, 64)
    model = halved(dense, images, "best")
    disturbed_(model, 0.1)
    return dense, model, images


def test_planted_layers_are_recovered() -> None:
    dense, disturbed, _ = planted()
    model = replace_submodules(disturbed, {})
    with torch.no_grad():
        pairs = stream_pairs(dense, shown(dense, 48, 3), shown(dense, 8, 4))
    fits = fit_layers_(dense, model, pairs, Newton(ridge_rel=1e-5, looks=(8, 20)), sweeps=5)
    assert [fit.part for fit in fits] == ["blocks.0", "blocks.1"]
    assert all(fit.error < 0.05 * fit.error_before for fit in fits), fits


def own_polished(*, in_place: bool = False, **how: Any) -> Polished:
    dense, model, images = planted(in_place=in_place)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = polished(dense, model, images, PolishOptions(steps=2), **how)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    return made


class Stopped(Exception):
    """An interruption of polish."""


def test_resumed_polish_gives_equal_bytes(tmp_path: Path) -> None:
    whole, heard, state = own_polished(), list[PolishProgress](), tmp_path / "state.safetensors"
    assert whole.report.error < 0.7 * whole.report.error_before

    def interrupt(progress: PolishProgress) -> None:
        heard.append(progress)
        if len(heard) == 3:
            raise Stopped

    with pytest.raises(Stopped):
        own_polished(state=state, on_progress=interrupt)
    again = own_polished(state=state, on_progress=heard.append)
    assert [each.part for each in heard] == ["blocks.0", "blocks.0", "blocks.1", "blocks.1", "blocks.1"]
    assert [each.share for each in heard] == [0.25, 0.5, 0.75, 0.75, 1.0]
    assert [part.error for part in again.report.parts] == [part.error for part in whole.report.parts]
    for own, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=0.0, atol=0.0)
    assert f"in 2 layers by least squares, without labels: {whole.report.steps} sweeps" in whole.report.line


def test_in_place_updates_are_polished_alike() -> None:
    """Polish runs segments repeatedly, so that in-place updates must not accumulate."""
    plain, in_place = own_polished(), own_polished(in_place=True)
    assert in_place.report.error == plain.report.error < plain.report.error_before


@torch.no_grad()
def test_merged_segment_linearisation_equals_finite_differences() -> None:
    """A merged token counts as many times as the tokens that it stands for."""
    dense = tiny.checkpoint(init_values=0.3).model
    model = traced_model.with_merging(halved(dense, shown(dense, 24)), Merging(schedule=(3, 2)))
    heaviest = list[float]()
    passages = {step.name: step for step in traced_model.steps(model) if isinstance(step, SegmentStep) and step.sites}
    sublayers, looked_at = {name: segment_sublayer(model, each) for name, each in passages.items()}, []

    def compare(block: BlockSteps, pairs: Sequence[StreamPair]) -> None:
        if (name := block.name) not in fitted_steps(dense, model):
            return
        (pair,), read, passage = pairs, sublayers[name].read, passages[name]
        x_BNC, sizes_BN, _ = pair.reduced.tokens
        tokens = slice(None) if read is None else read
        for step in sublayers[name].groups:
            (piece,), start_RD = step.linearised(pairs), step.rows_RD
            change_RD = torch.randn(start_RD.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            ahead, now, behind = (
                moved(step, share * change_RD, passage, x_BNC, sizes_BN) for share in (1e-5, 0.0, -1e-5)
            )
            expected, lacking = ((ahead - behind) / 2e-5)[:, tokens], (pair.target - now)[:, tokens]
            torch.testing.assert_close(piece.tangent.along(change_RD), expected.flatten(0, 1), rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(piece.residual_XO, lacking.flatten(0, 1), rtol=1e-9, atol=1e-9)
            assert (piece.weight_X is None) == (sizes_BN is None)
            heaviest.append(0.0 if piece.weight_X is None else float(piece.weight_X.max()))
        looked_at.append(name)

    (pair, *_) = stream_pairs(dense, shown(dense, 6), shown(dense, 6, 1))
    pairs = [StreamPair(pair.dense.double(), None, StreamState.of(pair.reduced.tokens.x.double(), None))]
    list(traced_model.steps(dense))
    for each in (dense, model):
        tracing(each).running.graph.double()
    walk(dense, model, pairs, compare)
    assert looked_at == [f"blocks.{index}.{part}" for index in (0, 1) for part in ("attn", "mlp")]
    assert max(heaviest) > 1.0


def test_polish_stops_when_the_time_is_over() -> None:
    assert SweepBudget(sweeps=None, seconds=0.0).spent(0, 0.0) == 1.0
