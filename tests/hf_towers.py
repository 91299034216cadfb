"""Tiny vision models of transformers with random weights, for the tests."""

from pathlib import Path
from typing import Any

import torch

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
_MLP = {"intermediate_size": 80}
_RATIO = {"mlp_ratio": 2}
# By class: its configuration's class, what it has beside SMALL, and which output ours is.
TOWERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "ViTModel": ("ViTConfig", _MLP, "class token"),
    "ViTForImageClassification": ("ViTConfig", _MLP | {"num_labels": 5, "qkv_bias": False}, "logits"),
    "DeiTModel": ("DeiTConfig", _MLP | {"num_channels": 4}, "class token"),
    "DeiTForImageClassification": ("DeiTConfig", _MLP, "logits"),
    "DeiTForImageClassificationWithTeacher": ("DeiTConfig", _MLP | {"num_labels": 3}, "logits"),
    "Dinov2Model": ("Dinov2Config", _RATIO, "pooler_output"),
    "Dinov2ForImageClassification": ("Dinov2Config", _RATIO | {"num_labels": 7}, "logits"),
    "Dinov2WithRegistersModel": ("Dinov2WithRegistersConfig", _RATIO, "pooler_output"),
    "Dinov2WithRegistersForImageClassification": ("Dinov2WithRegistersConfig", _RATIO, "logits"),
    "DINOv3ViTModel": ("DINOv3ViTConfig", _MLP | {"num_register_tokens": 2}, "pooler_output"),
    "CLIPVisionModel": ("CLIPVisionConfig", _MLP | {"hidden_act": "gelu"}, "pooler_output"),
    "CLIPVisionModelWithProjection": ("CLIPVisionConfig", _MLP | {"projection_dim": 16}, "image_embeds"),
    "SiglipVisionModel": ("SiglipVisionConfig", _MLP, "pooler_output"),
}


def randomised(model: Any) -> Any:
    """The model for evaluation with every parameter moved away from where it begins."""
    model = model.eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def tower(name: str, **changes: Any) -> Any:
    """A model of this class."""
    import transformers

    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config, own, _ = TOWERS[name]
    return randomised(getattr(transformers, name)(getattr(transformers, config)(**{**SMALL, **own, **changes})))


def sites_in(name: str) -> int:
    """Queries with keys, values and an MLP of two blocks, and of SigLIP's pooling head."""
    return 9 if name.startswith("Siglip") else 6


def write_tower(directory: Path, name: str, **changes: Any) -> Any:
    """A model of this class, saved there."""
    model = tower(name, **changes)
    model.save_pretrained(directory)
    return model


def load_by_transformers(directory: Path, name: str) -> Any:
    """Load a directory by a class of transformers, and assert that no weight is missing or unexpected."""
    import transformers

    model, loading = getattr(transformers, name).from_pretrained(directory, output_loading_info=True)
    assert not any(loading.values()), loading
    return model.eval()


def output_of(name: str, model: Any, images: torch.Tensor, **more: Any) -> torch.Tensor:
    """The output of theirs that ours is."""
    outputs = model(images, **more)
    which = TOWERS[name][2]
    chosen: torch.Tensor = outputs.last_hidden_state[:, 0] if which == "class token" else getattr(outputs, which)
    return chosen
