"""What a model is made of, for people and machines."""

from typing import Any

from torch import nn

from . import vit
from .cost import attention_macs, macs, mlp_macs


def _parameters(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _rows(model: nn.Module, found: vit.Parts, tokens: int) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for mlp in found.mlps:
        count = mlp_macs(tokens=tokens, dim=mlp.fc1.in_features, hidden=mlp.hidden)
        rows[mlp.name] = {
            "width": f"hidden {mlp.hidden}",
            "parameters": _parameters(mlp.fc1, mlp.fc2),
            "macs": count,
            "reason": "",
        }
    for part in found.attentions:
        count = attention_macs(
            tokens=tokens,
            dim=part.qkv.in_features,
            heads=part.heads,
            qk=part.qk,
            v=part.v,
            padded=part.geometry == "padded",
        )
        width = f"{part.heads} heads, qk {part.qk}, v {part.v}, {part.geometry}"
        rows[part.name] = {
            "width": width,
            "parameters": _parameters(part.module),
            "macs": count,
            "reason": part.keeps_qk,
        }
    for refusal in found.refused:
        module = model.get_submodule(refusal.name)
        rows[refusal.name] = {"width": "-", "parameters": _parameters(module), "macs": 0, "reason": refusal.reason}
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    return [{"site": name, **rows[name]} for name in sorted(rows, key=order.__getitem__)]


def inspection_of_model(model: nn.Module) -> dict[str, Any]:
    """Sites with widths, parameters and MACs of one image, totals, and the reason where nothing can be reduced."""
    found = vit.parts(model)
    return {
        "architecture": type(model).__name__,
        "parameters": _parameters(model),
        "macs": None if found.refused else macs(vit.shape(model)),
        "sites": _rows(model, found, vit.tokens(model)),
    }
