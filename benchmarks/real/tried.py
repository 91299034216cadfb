"""Ways to lose less that were tried on the real encoder: what each would bring, before anything is built for it.

    make real
    python -m benchmarks.real.tried --output benchmarks/results/tried.json

MLPs cut to half, all else dense, chosen and repaired here in float64 from sums over calibration crops: with other
weights of tokens, by a metric of the outputs, by other ridges. A linear map beside the channels that stay: the same
cost in channels less. A narrower residual stream: all that is written to it projected to its first principal
directions. Errors are of the class token and of patch tokens, on crops of the fit and on held-out ones.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import click
import torch
from torch import Tensor, nn

from benchmarks.real.bench import Bench, with_bench
from benchmarks.real.measures import BATCH, relative_error
from corp_deploy.algebra.obs import obs
from corp_deploy.algebra.quadratic import variance

KIND = "benchmarks/tried"
EVERY, OF_HELD_OUT = 6, 4
WIDTH, WIDTHS, RANKS = 768, (768, 384), (0, 32, 64, 128)
STREAMS = (346, 300)
RIDGES = (1e-4, 1e-2)
BLOCKS_SHOWN = (2, 6, 10)


@dataclass
class Sums:
    """Of one block: of an MLP's hidden channels, its inputs and one [K,K], by how tokens count; of the gradients of
    class and patch tokens by what the MLP adds [O,O]; of the normed streams in front of both branches [O,O].
    """

    moments: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    streams: dict[str, Tensor] = field(default_factory=dict)


def _add(into: dict[str, Tensor], name: str, rows_XK: Tensor, weights_X: Tensor | None = None) -> None:
    weighed = rows_XK if weights_X is None else rows_XK * weights_X[:, None]
    into[name] = into.get(name, torch.zeros(())) + (weighed.T @ rows_XK).double()


def _normed(x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:], eps=1e-6)


@contextmanager
def _hooked(hooks: Iterable[Any]) -> Iterator[None]:
    every = list(hooks)
    try:
        yield
    finally:
        for hook in every:
            hook.remove()


def sums_of(model: Any, images: Tensor, *, with_gradients: bool = True) -> list[Sums]:
    """Of every block, in one forward pass and two backwards."""
    blocks, seen = list(model.blocks), dict[tuple[int, str], Tensor]()
    sums = [Sums() for _ in blocks]
    torch.manual_seed(0)

    def keep(block: int, name: str) -> Any:
        return lambda _, args, *out: seen.__setitem__((block, name), out[0] if out else args[0])

    hooks = [
        hook
        for number, block in enumerate(blocks)
        for hook in (
            block.norm1.register_forward_pre_hook(keep(number, "first")),
            block.norm2.register_forward_pre_hook(keep(number, "second")),
            block.mlp.fc1.register_forward_pre_hook(keep(number, "x")),
            block.mlp.fc2.register_forward_pre_hook(keep(number, "h")),
            block.ls2.register_forward_hook(keep(number, "y")),
        )
    ]
    with _hooked(hooks):
        for batch in images.split(BATCH):
            tokens = model.forward_features(batch.clone().requires_grad_(with_gradients))
            gradients = {}
            for name, of in (("class", tokens[:, :1]), ("patches", tokens[:, 1:])) if with_gradients else ():
                drawn = (of * torch.randn_like(of)).sum() / of.detach().norm()
                every = torch.autograd.grad(drawn, [seen[n, "y"] for n in range(len(blocks))], retain_graph=True)
                gradients[name] = [each.flatten(0, 1) for each in every]
            with torch.no_grad():
                for number, own in enumerate(sums):
                    _take(own, {name: seen[number, name].detach() for name in ("first", "second", "x", "h")})
                    for name, of_blocks in gradients.items():
                        rows, square = of_blocks[number], of_blocks[number].square().sum(1)
                        _add(own.gradients, name, rows)
                        _add(own.moments, name, _rows(seen[number, "h"], seen[number, "x"]).detach(), square)
    return sums


def _rows(h_BNF: Tensor, x_BNC: Tensor) -> Tensor:
    rows = torch.cat([h_BNF, x_BNC, torch.ones_like(x_BNC[..., :1])], dim=-1)
    return rows.flatten(0, 1)


def _take(own: Sums, seen: Mapping[str, Tensor]) -> None:
    rows, tokens = _rows(seen["h"], seen["x"]), seen["h"].shape[1]
    is_class = (torch.arange(len(rows)) % tokens == 0).float()
    _add(own.moments, "even", rows)
    _add(own.moments, "class token", rows, is_class)
    for name in ("first", "second"):
        _add(own.streams, "both", _normed(seen[name]).flatten(0, 1))


def _one(sum_KK: Tensor) -> Tensor:
    """Divided by what the rows weigh."""
    return sum_KK / sum_KK[-1, -1]


def _covariance(sum_KK: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of the first columns, with their means."""
    mean = sum_KK[-1, :count]
    return sum_KK[:count, :count] - torch.outer(mean, mean), mean


def cut(
    block: Any, sum_KK: Tensor, metric_OO: Tensor | None = None, *, ridge: float = 1e-4, by_channel: bool = False
) -> None:
    """Half of the MLP's channels by elimination, the others' weights repaired; the rest become zero."""
    fc2 = block.mlp.fc2
    weight, scale = fc2.weight.double(), block.ls2.gamma.double()
    covariance, mean = _covariance(_one(sum_KK), weight.shape[1])
    diagonal = covariance.diagonal()
    unit = (diagonal if by_channel else diagonal.mean().expand_as(diagonal)).clamp_min(1e-12 * diagonal.mean()).sqrt()
    matrix = covariance / torch.outer(unit, unit)
    seen = weight * scale[:, None] * unit
    kept = obs(matrix, seen if metric_OO is None else metric_OO @ seen, ridge_rel=ridge).kept(WIDTH)
    matrix.diagonal().add_(ridge * matrix.diagonal().mean())
    new = torch.linalg.solve(matrix[kept][:, kept], ((weight * unit) @ matrix)[:, kept].T).T / unit[kept]
    fc2.bias.data += (weight @ mean - new @ mean[kept]).float()
    fc2.weight.data = torch.zeros_like(fc2.weight).index_copy_(1, kept, new.float())


def _root(own: Sums, alike: float) -> Tensor:
    """Of the metric of what the MLP adds, for class and patch tokens alike, with so much of its mean diagonal."""
    metric = torch.stack([each / each.diagonal().sum() for each in own.gradients.values()]).sum(0)
    values, vectors = torch.linalg.eigh(metric)
    root: Tensor = (vectors * (values.clamp_min(0.0) + alike * values.mean()).sqrt()) @ vectors.T
    return root


class Judge:
    """The dense model's tokens of both sets of crops."""

    def __init__(self, model: Any, fitted: Tensor, held_out: Tensor) -> None:
        self.sets = {"fitted": fitted, "held_out": held_out}
        self.dense = {name: self._tokens(model, images) for name, images in self.sets.items()}

    def _tokens(self, model: Any, images: Tensor) -> Tensor:
        with torch.inference_mode():
            return torch.cat([model.forward_features(batch) for batch in images.split(BATCH)])

    def of(self, model: Any) -> dict[str, float]:
        row = dict[str, float]()
        for name, images in self.sets.items():
            tokens, dense = self._tokens(model, images), self.dense[name]
            row |= {f"{name}_class_error": relative_error(tokens[:, 0], dense[:, 0])}
            row |= {f"{name}_patch_error": relative_error(tokens[:, 1:], dense[:, 1:])}
        return row


def half_of_mlps(model: Any, sums: list[Sums], judge: Judge) -> Iterator[dict[str, Any]]:
    """Each way with its errors."""

    def tried(name: str, weights: Mapping[str, float], *, alike: float | None = None, **ridge: Any) -> dict[str, Any]:
        copy = deepcopy(model)
        for block, own in zip(copy.blocks, sums, strict=True):
            present = {each: share for each, share in weights.items() if float(own.moments[each][-1, -1]) > 0.0}
            mixed = torch.stack([share * _one(own.moments[each]) for each, share in present.items()]).sum(0)
            cut(block, mixed, None if alike is None else _root(own, alike), **ridge)
        return {"way": name, **judge.of(copy)}

    yield tried("as it is: all tokens alike, a ridge of 1e-4 of the mean variance", {"even": 1.0})
    yield tried("the class token counts 0.23 of all", {"even": 1.0, "class token": 0.3})
    yield tried("tokens by their gradients", {"class": 1.0, "patches": 1.0})
    yield tried("half alike, half by the class token's gradients", {"even": 1.0, "class": 1.0})
    yield tried("chosen by the outputs' metric", {"even": 1.0}, alike=1e-3)
    yield tried("by the metric with its mean diagonal added", {"even": 1.0}, alike=1.0)
    for by_channel in (False, True):
        for ridge in RIDGES:
            of = "each channel's own" if by_channel else "the mean"
            yield tried(
                f"by that metric, a ridge of {ridge:g} of {of} variance",
                {"even": 1.0},
                alike=1.0,
                ridge=ridge,
                by_channel=by_channel,
            )
    yield tried("by that metric, half by the class token's gradients", {"even": 1.0, "class": 1.0}, alike=1.0)


def _parts(block: Any, sum_KK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The MLP's weight on its hidden channels h and its input x, their covariance and means, and that covariance with a
    ridge.
    """
    weight = (block.mlp.fc2.weight * block.ls2.gamma[:, None]).detach().double()
    inputs, count = weight.shape
    covariance, mean = _covariance(_one(sum_KK), count + inputs)
    matrix = covariance.clone()
    for part, ridge in ((slice(0, count), 1e-4), (slice(count, None), 1e-3)):
        matrix.diagonal()[part] += ridge * covariance.diagonal()[part].mean()
    return torch.cat([weight, torch.zeros(inputs, inputs).double()], dim=1), covariance, mean, matrix


def orders_of(block: Any, sum_KK: Tensor, width: int) -> list[Tensor]:
    """The channels that stay, chosen by themselves and with all of the input at hand."""
    target, covariance, _, matrix = _parts(block, sum_KK)
    weight = target[:, : block.mlp.fc2.in_features]
    h, x = slice(0, weight.shape[1]), slice(weight.shape[1], None)
    left = matrix[h, h] - matrix[h, x] @ torch.linalg.solve(matrix[x, x], matrix[x, h])
    orders = obs(covariance[h, h], weight, ridge_rel=1e-4), obs((left + left.T) / 2, weight, ridge_rel=1e-6)
    return [order.kept(width) for order in orders]


def beside(block: Any, fitted: Tensor, held_out: Tensor, width: int, rank: int) -> tuple[float, float]:
    """The share of the MLP's output lost on both sets by `width - rank` channels and a linear map of its input of this
    rank, fitted together (reduced-rank regression on what the channels leave), with the better of two choices.
    """
    target, own, own_mean, matrix = _parts(block, fitted)
    _, other, other_mean, _ = _parts(block, held_out)
    outputs, x, wanted, found = len(target), slice(block.mlp.fc2.in_features, None), target @ matrix, []
    for kept in orders_of(block, fitted, width - rank):
        new, of_kept = torch.zeros_like(target), matrix[kept]
        solved = torch.linalg.solve(of_kept[:, kept], torch.cat([wanted[:, kept].T, of_kept[:, x]], dim=1))
        plain, of_x = solved[:, :outputs].T, solved[:, outputs:]
        if rank:
            free = matrix[x, x] - matrix[x][:, kept] @ of_x
            inverse = torch.linalg.inv(torch.linalg.cholesky((free + free.T) / 2))
            missing = (wanted[:, x] - plain @ of_kept[:, x]) @ inverse.T
            u, s, v = torch.linalg.svd(missing, full_matrices=False)
            new[:, x] = (u[:, :rank] * s[:rank]) @ v[:rank] @ inverse
        new[:, kept] = plain - new[:, x] @ of_x.T
        change, shift = target - new, (target - new) @ (other_mean - own_mean)
        lost = variance(change, other) + float(shift.square().sum())
        found.append((variance(change, own) / variance(target, own), lost / variance(target, other)))
    return min(found)


def narrower(model: Any, sums: list[Sums], keep: int, judge: Judge) -> dict[str, float]:
    """All that the stream is given lies in its first `keep` principal directions, of both branches' inputs alike."""
    streams = [own.streams["both"] / own.streams["both"].diagonal().sum() for own in sums]
    basis = torch.linalg.eigh(torch.stack(streams).sum(0)).eigenvectors.flip(1)[:, :keep]
    onto = (basis @ basis.T).float()

    def projected(x: Tensor) -> Tensor:
        centred: Tensor = (x - x.mean(dim=-1, keepdim=True)) @ onto
        return centred

    hooks = [
        hook
        for block in model.blocks
        for hook in (
            block.register_forward_pre_hook(lambda _, args: (projected(args[0]),)),
            block.ls1.register_forward_hook(lambda _, __, out: projected(out)),
            block.ls2.register_forward_hook(lambda _, __, out: projected(out)),
        )
    ]
    with _hooked(hooks):
        return judge.of(model)


@click.command(help=__doc__)
@with_bench
def main(bench: Bench) -> None:
    record = bench.record(KIND)
    model: Any = bench.subject.model.eval().requires_grad_(False)
    fitted, held_out = bench.calibration.images[::EVERY], bench.subject.held_out[::OF_HELD_OUT]
    judge, sums = Judge(model, fitted, held_out), sums_of(model, fitted)
    others = sums_of(model, held_out, with_gradients=False)
    for row in half_of_mlps(model, sums, judge):
        record.put("halves", row, ("way",))
        click.echo(f"{row['way']}: class {row['held_out_class_error']:.3f}, patches {row['held_out_patch_error']:.3f}")
    for number in BLOCKS_SHOWN:
        for width in WIDTHS:
            for rank in RANKS:
                pair = sums[number].moments["even"], others[number].moments["even"]
                lost, elsewhere = beside(model.blocks[number], *pair, width, rank)
                row = {"block": number, "width": width, "rank": rank, "fitted": lost, "held_out": elsewhere}
                record.put("beside", row, ("block", "width", "rank"))
    for keep in STREAMS:
        record.put("streams", {"keep": keep, **narrower(model, sums, keep, judge)}, ("keep",))


if __name__ == "__main__":
    main()
