"""Ways to merge tokens that were tried on the real encoder, each merging as many in the same places.

    make real
    python -m benchmarks.real.tried_merging --output benchmarks/results/tried.json --threads 1

Tokens are alike by what merging adds to the squares of the stream (as built), of the stream as the outputs' metric has
it, or by the first with the mean of how much both tokens count: by the class token's attention, or by a ridge
regression of the logarithm of their gradients' energy on the normed stream. The third is built as --merge-metric
attended. Values given back to patches are those of
the tokens they are in (as built), or these with what each patch was apart from its token when it was merged.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.real.bench import Bench, with_bench
from benchmarks.real.measures import BATCH
from benchmarks.real.tried import KIND
from corp_deploy.spec.merging import grown
from corp_deploy.traced.models.token_merging import Tokens, key_bias, matched, merged, sources_of, unmerged, ward

EVERY = 12
PROTECTED, RIDGE, LEAST = 1, 1e-2, 1e-4
SCHEDULES = {
    0.78: grown(27, 12),
    0.7: (0, 7, 11, 13, 14, 17, 18, 20, 20, 23, 23, 24),
    0.6: (12, 14, 14, 16, 16, 18, 19, 20, 21, 23, 23, 24),
}
Alike = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""How alike even and odd tokens are [B,A,D], by block, what entered its attention, the stream behind and its sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Of one block's stream behind its attention: the root of the outputs' metric [C,C], and what tells a token's
    energy from its normed stream [C+1].
    """

    root: Tensor
    energy: Tensor


def normed(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


def _root(moments: list[Tensor]) -> Tensor:
    """Of class and patch tokens alike, with the mean of its diagonal added."""
    metric = torch.stack([each / each.diagonal().sum() for each in moments if each.any()]).sum(0)
    values, vectors = torch.linalg.eigh(metric)
    root: Tensor = (vectors * (values.clamp_min(0.0) + values.mean()).sqrt()) @ vectors.T
    return root.float()


def energy_weights(stream_XC: Tensor, energies_X: Tensor) -> Tensor:
    """The ridge regression of the logarithm, [C+1]."""
    rows = torch.cat([normed(stream_XC), torch.ones(len(stream_XC), 1)], dim=1).double()
    gram = rows.T @ rows
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    logarithm = (energies_X / energies_X.mean()).clamp_min(LEAST).log().double()
    weights: Tensor = torch.linalg.solve(gram, rows.T @ logarithm)
    return weights.float()


def learned(model: Any, images: Tensor) -> list[Learned]:
    """Of every block, by two backward passes."""
    torch.manual_seed(0)
    moments = [[torch.zeros(()), torch.zeros(())] for _ in model.blocks]
    streams: list[list[Tensor]] = [[] for _ in model.blocks]
    energies: list[list[Tensor]] = [[] for _ in model.blocks]
    for batch in images.split(BATCH // 2):
        x, behind = embedded(model, batch).requires_grad_(), list[Tensor]()
        for block in model.blocks:
            x = attended(block, x, None)
            behind.append(x)
            x = x + block.ls2(block.mlp(block.norm2(x)))
        out = model.norm(x)
        for part, of in enumerate((out[:, :1], out[:, 1:])):
            signs = torch.randint(0, 2, of.shape) * 2.0 - 1.0
            gradients = torch.autograd.grad((of * signs).sum() / of.detach().norm(), behind, retain_graph=True)
            for number, gradient in enumerate(gradients):
                rows = gradient[:, PROTECTED:].flatten(0, 1)
                moments[number][part] = moments[number][part] + (rows.T @ rows).double()
                energies[number].append(rows.square().sum(-1))
        for number, each in enumerate(behind):
            streams[number].append(each.detach()[:, PROTECTED:].flatten(0, 1))
    found = []
    for of_block, stream, energy in zip(moments, streams, energies, strict=True):
        by_part = [torch.cat(energy[part::2]) for part in range(2)]
        both = torch.stack([each / each.mean() for each in by_part if each.any()]).mean(0)
        found.append(Learned(root=_root(of_block), energy=energy_weights(torch.cat(stream), both)))
    return found


def embedded(model: Any, images: Tensor) -> Tensor:
    tokens: Tensor = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    return tokens


def attended(block: Any, x: Tensor, sizes: Tensor | None) -> Tensor:
    """The stream behind the attention, keys counted by their sizes."""
    mask = None if sizes is None else key_bias(sizes, x.dtype)
    behind: Tensor = x + block.ls1(block.attn(block.norm1(x), attn_mask=mask))
    return behind


def run(model: Any, images: Tensor, schedule: tuple[int, ...], alike: Alike, *, apart: bool = False) -> Tensor:
    """All tokens behind the last norm; `apart`: each patch with what it was apart from its token."""
    found = []
    for batch in images.split(BATCH):
        x = embedded(model, batch)
        sizes, sources, deviation = torch.ones(x.shape[:2]), sources_of(x), torch.zeros_like(x)
        for number, (block, count) in enumerate(zip(model.blocks, schedule, strict=True)):
            entered, x = x, attended(block, x, sizes)
            if count:
                behind = unmerged(x, sources)
                match = matched(alike(number, entered, x, sizes), count)
                x, now, then = merged(Tokens(x, sizes, sources), match, PROTECTED)
                assert now is not None, match
                assert then is not None, match
                sizes, sources = now, then
                deviation = deviation + behind - unmerged(x, sources)
            x = x + block.ls2(block.mlp(block.norm2(x)))
        last = unmerged(x, sources)
        found.append(model.norm(last + deviation if apart else last))
    return torch.cat(found)


def weighed(alike_BAD: Tensor, counts_BN: Tensor) -> Tensor:
    """By the mean of what both tokens count, among the unprotected of their input."""
    counts_BN = counts_BN / counts_BN[:, PROTECTED:].mean(dim=1, keepdim=True)
    even, odd = counts_BN[:, PROTECTED::2].unsqueeze(2), counts_BN[:, PROTECTED + 1 :: 2].unsqueeze(1)
    return alike_BAD * 0.5 * (even + odd)


def as_built(_: int, __: Tensor, x: Tensor, sizes: Tensor) -> Tensor:
    return ward(x, sizes, PROTECTED)


def by_metric(every: list[Learned], number: int, _: Tensor, x: Tensor, sizes: Tensor) -> Tensor:
    return ward(x @ every[number].root, sizes, PROTECTED)


def by_energy(every: list[Learned], power: float, number: int, _: Tensor, x: Tensor, sizes: Tensor) -> Tensor:
    weights = every[number].energy
    return weighed(ward(x, sizes, PROTECTED), (power * (normed(x) @ weights[:-1] + weights[-1])).exp())


def by_attention(model: Any, power: float, number: int, entered: Tensor, x: Tensor, sizes: Tensor) -> Tensor:
    block = model.blocks[number]
    heads, scale = block.attn.num_heads, block.attn.scale
    projected = block.attn.qkv(block.norm1(entered))
    queries, keys, _ = projected.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    scores_BHN = (queries[:, :, :1] @ keys.transpose(-2, -1)).squeeze(2) * scale
    return weighed(ward(x, sizes, PROTECTED), scores_BHN.softmax(-1).mean(1).pow(power))


def ways(model: Any, every: list[Learned]) -> Iterator[tuple[str, Alike, bool]]:
    yield "as built", as_built, False
    yield "as built, patches given back apart", as_built, True
    yield "by the outputs' metric", partial(by_metric, every), False
    for power in (0.25, 0.5):
        yield f"by the energy of gradients to the power of {power}", partial(by_energy, every, power), False
    yield "by the root of the class token's attention", partial(by_attention, model, 0.5), False


def _errors(found: Tensor, dense: Tensor) -> Tensor:
    """Of each image, relative."""
    errors: Tensor = (found - dense).flatten(1).norm(dim=1) / dense.flatten(1).norm(dim=1)
    return errors


def figures(found: Tensor, dense: Tensor) -> dict[str, float]:
    """Of class and patch tokens: the root of the mean square over images, and the median image."""
    parts = {"class": slice(0, 1), "patch": slice(1, None)}
    errors = {name: _errors(found[:, part], dense[:, part]) for name, part in parts.items()}
    return {f"{name}_error": float(each.square().mean().sqrt()) for name, each in errors.items()} | {
        f"{name}_median": float(each.median()) for name, each in errors.items()
    }


@click.command(help=__doc__)
@with_bench
def main(bench: Bench) -> None:
    record = bench.record(KIND)
    model: Any = bench.subject.model.eval().requires_grad_(False)
    every, images = learned(model, bench.calibration.images[::EVERY]), bench.subject.held_out
    with torch.inference_mode():
        dense = torch.cat([model.forward_features(batch) for batch in images.split(BATCH)])
        for share, schedule in SCHEDULES.items():
            for name, alike, apart in ways(model, every):
                row = {"share": share, "schedule": list(schedule), "way": name}
                row |= figures(run(model, images, schedule, alike, apart=apart), dense)
                record.put("merging", row, ("share", "way"))
                click.echo(f"{share}, {name}: class {row['class_error']:.4f}, patches {row['patch_error']:.4f}")


if __name__ == "__main__":
    main()
