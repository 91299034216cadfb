"""Advice on a state dict that does not fit: another library's names, adapters, arguments of the model."""

import json
import re

from torch import nn

from corp_deploy.families import timm_library
from corp_deploy.families.timm_vit_arguments import fitting_arguments
from corp_deploy.spec.architecture import Architecture

from .weight_file import State

_MERGE = (
    "merge it into the weights and save those: with PEFT model.merge_and_unload(), with loralib model.eval(); then "
    "torch.save({name: each for name, each in model.state_dict().items() if 'lora_' not in name}, 'weights.pth')"
)
# Patterns of names that no model here has, whose names they are, and what to do.
_FOREIGN = (
    (
        r"(^|\.)parametrizations\.",
        "the names of a layer with a parametrization of torch",
        "make it plain and save the weights then: torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')",
    ),
    (r"(^|\.)lora_[A-Za-z_]+(\.|$)|\.base_layer\.", "the names of a LoRA adapter beside the weights", _MERGE),
    (
        r"\.(ia3_l|hada_w1_a|lokr_w1|vera_lambda_b|lora_magnitude_vector)(\.|$)",
        "the names of an adapter of PEFT",
        "merge it into the weights and save those: model.merge_and_unload()",
    ),
    (
        r"\.(SCB|absmax|qweight|_packed_params.*|quant_state\..*)$",
        "the names of quantised layers",
        "give the weights as they were before quantisation",
    ),
    (
        r"encoder_layer_\d+\.self_attention\.in_proj",
        "the names of torchvision's VisionTransformer",
        "timm has no mapping of its names; give torchvision's name of the model: --model torchvision:vit_b_16",
    ),
    (
        r"^(features\.\d+\.(\d+\.)?(block|conv)|trunk_output)\.",
        "the names of torchvision's convolutional networks",
        "timm has no mapping of its names; give torchvision's name of the model: --model torchvision:efficientnet_b0",
    ),
    (
        r"(attention\.(query|q_proj)|self_attn\.q_proj)\.(weight|bias)$",
        "the names of Hugging Face transformers",
        "timm has no mapping of its names; give the directory that they are in: --model hf:DIR, or take timm's copy of "
        "these weights, which has the model's name under timm/",
    ),
    (
        r"^decoder_blocks\.\d+\.",
        "the names of a masked autoencoder with its decoder",
        "give the encoder's weights, without decoder_* and mask_token",
    ),
)


def advice_on_names(state: State) -> str:
    """Return whose names a state dict has and what to do about them; empty where they are of no known library."""
    for pattern, owner, advice in _FOREIGN:
        if match := next((name for name in state if re.search(pattern, name)), None):
            return f"these are {owner} ({match}): {advice}"
    return ""


def advice_for(model: nn.Module, state: State, architecture: Architecture) -> str:
    """Return a phrase with the --model-kwargs that would fit the weights, as far as these show, or what to check."""
    found = fitting_arguments(model, architecture.name, state, architecture.kwargs)
    if found is not None:
        assumed = f"; assumed: {', '.join(found.assumed)}" if found.assumed else ""
        return f"give --model-kwargs '{json.dumps(found.arguments)}'{assumed}; or check --model"
    changed = {
        key: value
        for key, value in timm_library.arguments_shown(model, state).items()
        if architecture.kwargs.get(key) != value
    }
    if not changed:
        return "check --model and --model-kwargs"
    return f"give --model-kwargs '{json.dumps({**architecture.kwargs, **changed})}', or check --model"
