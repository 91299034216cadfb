"""Errors of a reduced encoder: of the tokens after the last norm, and of an unchanged head's outputs.

B images, N patches, C channels, S pixels a side.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.real.head import SaliencyHead
from corp_deploy.families import traced_model
from corp_deploy.traced.models.module import device_of
from perf.parity.measures import measure_outputs

BATCH = 16
THRESHOLD = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Class tokens [B,C], patch tokens [B,N,C] and saliency [B,S,S]; the last two are None if tokens were dropped."""

    class_BC: Tensor
    patches_BNC: Tensor | None
    saliency_BSS: Tensor | None


def _with_every_token(model: nn.Module) -> tuple[nn.Module, bool]:
    """Return the model with a token for every patch, and whether every patch has one."""
    merging = traced_model.merging_of(model)
    if merging is None or merging.unmerged:
        return model, True
    if merging.how == "drop":
        return model, False
    return traced_model.with_merging(model, replace(merging, unmerged=True)), True


def at_cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()


def normed(model: nn.Module, batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield all tokens after the last norm of a ViT of timm, dense or reduced, batch by batch."""
    running, seen, where = traced_model.exportable(model), list[Tensor](), device_of(model)
    running.get_submodule("norm").register_forward_hook(lambda _, __, tokens: seen.append(tokens))
    for batch in batches:
        running(batch.to(where))
        yield seen.pop()


def outputs(model: nn.Module, images: Tensor, head: SaliencyHead) -> Outputs:
    """Return the outputs for images [B,3,S,S], computed on the model's device; merged patches share a token."""
    whole, every = _with_every_token(model)
    with torch.inference_mode():
        tokens = torch.cat(list(normed(whole, images.split(BATCH))))
        patches = tokens[:, 1:] if every else None
        saliency = None if patches is None else torch.cat([head(part) for part in patches.split(BATCH)])
    return Outputs(class_BC=tokens[:, 0].cpu(), patches_BNC=at_cpu(patches), saliency_BSS=at_cpu(saliency))


def relative_error(reduced: Tensor, dense: Tensor) -> float:
    """Return ||reduced - dense|| / ||dense|| over all images together."""
    return float((reduced.double() - dense.double()).norm() / dense.double().norm())


def overlap(reduced_BSS: Tensor, dense_BSS: Tensor) -> float:
    """Return the intersection over union of the salient pixels of all images, 1 if there are none."""
    one, other = reduced_BSS > THRESHOLD, dense_BSS > THRESHOLD
    union = int((one | other).sum())
    return int((one & other).sum()) / union if union else 1.0


def figures(reduced: Outputs, dense: Outputs) -> Mapping[str, Any]:
    """Return all measures of a row, None for those of dropped patches."""
    neighbours = measure_outputs(dense.class_BC.numpy(), reduced.class_BC.numpy(), role="embedding").agreement
    row: dict[str, Any] = {
        "class_error": relative_error(reduced.class_BC, dense.class_BC),
        "neighbour_agreement": neighbours,
    }
    if reduced.patches_BNC is None or reduced.saliency_BSS is None:
        names = "patch_error", "cosine_mean", "cosine_low", "saliency_error", "saliency_iou"
        return row | dict.fromkeys(names)
    assert dense.patches_BNC is not None, "the dense model has every patch"
    assert dense.saliency_BSS is not None, "the dense model has every patch"
    cosines = torch.cosine_similarity(reduced.patches_BNC.double(), dense.patches_BNC.double(), dim=-1).flatten()
    return row | {
        "patch_error": relative_error(reduced.patches_BNC, dense.patches_BNC),
        "cosine_mean": float(cosines.mean()),
        "cosine_low": float(cosines.quantile(0.01)),
        "saliency_error": relative_error(reduced.saliency_BSS, dense.saliency_BSS),
        "saliency_iou": overlap(reduced.saliency_BSS, dense.saliency_BSS),
    }
