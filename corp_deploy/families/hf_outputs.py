"""The answers of transformers' classes: one of their outputs, or one embedding pooled from a text's tokens.

Legend: B inputs, N tokens, C channels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ground.errors import BadInput

Pooling = Literal["mean", "first"]
CALLED = "called_by_corp_deploy"
CLASS_TOKEN = "last_hidden_state[:, 0]"
OUTPUTS: Mapping[str, str] = {
    "ViTModel": CLASS_TOKEN,
    "DeiTModel": CLASS_TOKEN,
    "Dinov2Model": "pooler_output",
    "Dinov2WithRegistersModel": "pooler_output",
    "DINOv3ViTModel": "pooler_output",
    "CLIPVisionModel": "pooler_output",
    "CLIPVisionModelWithProjection": "image_embeds",
    "SiglipVisionModel": "pooler_output",
    "DeiTForImageClassificationWithTeacher": "logits",
}
"""The main output of each class; models of other classes give all of their outputs."""
Answer = Callable[[Any, Mapping[str, Tensor]], Mapping[str, Tensor]]
"""A function of a class's outputs and of its inputs, which returns tensors by name."""


def pick_output(output: str) -> Answer:
    """Return the answer that consists of one of a class's outputs, named logits or embedding."""

    def answer(outputs: Any, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        field = output.removesuffix("[:, 0]")
        tensor = getattr(outputs, field, None)
        if tensor is None:
            raise BadInput(f"it gives no {field}, expected a class with pooled output")
        return {"logits" if output == "logits" else "embedding": tensor[:, 0] if output == CLASS_TOKEN else tensor}

    return answer


def pool_tokens(pooling: Pooling, normalize: bool) -> Answer:
    """Return the answer that is one embedding a text: its first token, or the mean of its tokens without padding."""

    def answer(outputs: Any, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        x_BNC = outputs.last_hidden_state
        if pooling == "first":
            out_BC = x_BNC[:, 0]
        else:
            # The tokens are weighted in float32 before the sum, since a sum of hundreds of tokens may overflow float16.
            weights_BN = inputs["attention_mask"].to(torch.float32)
            weights_BN = weights_BN / weights_BN.sum(dim=1, keepdim=True).clamp(min=1.0)
            out_BC = (x_BNC.to(torch.float32) * weights_BN.unsqueeze(-1)).sum(dim=1)
        if normalize:
            out_BC = F.normalize(out_BC.to(torch.float32), dim=-1)
        return {"embedding": out_BC.to(x_BNC.dtype)}

    return answer


@dataclass(frozen=True, slots=True)
class CalledClass:
    """A class of transformers, the extra arguments `more` of its forward, and the answer taken from its outputs."""

    kind: Any
    answer: Answer | None
    more: Mapping[str, Any]

    def raw_outputs(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
        """Return the outputs of the class's own forward."""
        return self.kind.forward(model, **inputs, **self.more)

    def forward(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
        outputs = self.raw_outputs(model, inputs)
        return outputs if self.answer is None else self.answer(outputs, inputs)


def answering_class(called: CalledClass) -> Any:
    """Return a subclass whose forward returns the answer; the class itself where that changes nothing."""
    kind = called.kind
    if called.answer is None and not called.more:
        return kind
    members = {"forward": lambda self, **inputs: called.forward(self, inputs), CALLED: called}
    return type(kind.__name__, (kind,), {**members, "__module__": kind.__module__})


def called_of(plain: type[nn.Module]) -> CalledClass:
    """Return the called class that `answering_class` made a class of, or the class itself without an answer."""
    return vars(plain).get(CALLED) or CalledClass(plain, None, {})
