"""What choosing ridges by groups of images gains on a real encoder: DINOv2 ViT-S/14 on crops of photographs.

    python -m benchmarks.quality.ridges --photographs DIR --output benchmarks/results/ridges.json

DIR holds `dinov2_s.safetensors`, `calib.npy` and `held.npy` (preprocessed crops, photographs apart) and
`calib_groups.json` (the photograph of each crop). The same moments are reduced twice: by the fixed ridge, and by ridges
that the other half of the photographs chooses. Errors are of held-out photographs.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.real.measures import normed
from calib.groups import group_ids
from calib.images import Images
from calib.moments import Moments
from calib.store import load, save
from corp_deploy.machine import versions
from corp_deploy.planning.curves import eliminations
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.overfitting import overfitting
from corp_deploy.reduction.snapshots import in_splits
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.inputs import images_for_model
from ground.files import write_json

ARCHITECTURE = "vit_small_patch14_dinov2"
BATCH = 16


def few(images: Images, groups: Tensor, photographs: int, seed: int) -> tuple[Images, Tensor]:
    """The crops of so many photographs, drawn by the seed."""
    drawn = np.random.default_rng(seed).permutation(groups.unique().numpy())[:photographs]
    positions = torch.isin(groups, torch.from_numpy(drawn)).nonzero().squeeze(1)
    return images.subset(positions.tolist()), groups[positions]


def moments_of(dense: Checkpoint, images: Images, groups: Tensor, cache: Path | None) -> Moments:
    """In halves, kept in a file where there is one."""
    if cache is not None and cache.is_file():
        return load(cache)
    moments = in_splits(images, groups, lambda half, _: calibrate(dense, half, batch_size=BATCH), seed=0)
    if cache is not None:
        save(moments, cache)
    return moments


@torch.inference_mode()
def errors(dense: nn.Module, reduced: nn.Module, images: Images) -> dict[str, float]:
    """Root of the mean squared error over that of the dense tokens: the class token, the patch tokens."""
    sums = torch.zeros(2, 2, dtype=torch.float64)
    for both in zip(*(normed(model, images.batches(BATCH)) for model in (dense, reduced)), strict=True):
        own, other = (tokens.double() for tokens in both)
        for row, part in enumerate((slice(0, 1), slice(1, None))):
            sums[row, 0] += (own[:, part] - other[:, part]).square().sum()
            sums[row, 1] += own[:, part].square().sum()
    class_token, patches = (sums[:, 0] / sums[:, 1]).sqrt().tolist()
    return {"class_token": class_token, "patch_tokens": patches}


def compared(dense: Checkpoint, moments: Moments, method: Method, held: Images) -> dict[str, Any]:
    """Fixed ridge and chosen ones, on one elimination."""
    orders = eliminations(dense.model, moments, method)
    row: dict[str, Any] = {}
    for name, given in (("fixed", replace(moments, half=None)), ("chosen", moments)):
        reduction = reduce(dense.model, given, method, eliminations=orders)
        row[name] = errors(dense.model, reduction.model, held)
        click.echo(f"{name}: {row[name]}", err=True)
    row["strengths"] = {
        f"{site.site}.{site.part}": site.ridge_fit.strength_whole for site in reduction.sites if site.ridge_fit
    }
    return row


@click.command()
@click.option("--photographs", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.option("--numbers", default="5,10,20,37", help="How many photographs to calibrate on.")
@click.option("--share", type=float, default=0.5, help="Of every site, to remove.")
@click.option("--held-out", type=int, default=128, help="Crops to judge by.")
@click.option("--cache", type=click.Path(path_type=Path), default=None, help="Folder for moments by their number.")
def main(photographs: Path, output: Path, numbers: str, share: float, held_out: int, cache: Path | None) -> None:
    """Calibrate on some of the photographs, reduce with the fixed and with chosen ridges, and judge on others."""
    kwargs = {"img_size": 224, "num_classes": 0}
    dense = load_dense(ARCHITECTURE, weights=photographs / "dinov2_s.safetensors", kwargs=kwargs)
    every, held = (images_for_model(dense.model, photographs / f"{name}.npy") for name in ("calib", "held"))
    groups = group_ids(every, str(photographs / "calib_groups.json"))
    held = held.subset(range(min(held_out, held.count)))
    method = method_from_preset("best", mlp_sparsity=share, attention_sparsity=share)
    record: dict[str, Any] = {"kind": "corp-deploy/ridges", "version": 1, "versions": versions(), "share": share}
    record |= {"held_out_crops": held.count, "rows": []}
    for number in map(int, numbers.split(",")):
        images, own = few(every, groups, number, seed=0)
        moments = moments_of(dense, images, own, None if cache is None else cache / f"{number}.safetensors")
        gap = overfitting(dense.model, moments)
        row = {"photographs": number, "crops": images.count, "overfitting": None if gap is None else gap.as_json()}
        record["rows"].append(row | compared(dense, moments, method, held))
        write_json(output, record)
    click.echo(json.dumps(record["rows"], indent=1))


if __name__ == "__main__":
    main()
