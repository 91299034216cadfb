"""ONNX graphs of decoders with a key/value cache, by the model builder of onnxruntime-genai, and their reference.

The reference is the model that transformers runs in float32. The builder is foreign code that runs in this process: it
gets local files alone, and what it changes of the process (sys.path, standard streams, root logger) is restored.

Shapes: B sequences, T tokens of each, V words.
"""

import io
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ground.errors import BadInput, Missing, is_out_of_memory, os_error_from

from .hf_classes import library

GRAPH, WEIGHTS, SETTINGS = "model.onnx", "model.onnx.data", "genai_config.json"
PACKAGE = "onnxruntime-genai"
PROVIDERS: Mapping[str, str] = {"fp32": "cpu", "int8": "cpu", "int4": "cpu", "fp16": "cuda"}
"""The execution provider that a graph of each precision is built for."""
CLASSES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_WINDOW = "local_window_size"
_INSTEAD = "export --model hf:DIR writes its graph without a cache, for prefill"


def refuse_unbuilt(config: Mapping[str, Any], *, where: str) -> None:
    """Raise BadInput for a config.json of a type or class not in CLASSES, or with sliding windows in some layers."""
    kind = str(config.get("model_type"))
    if "family" in config and "model_type" not in config:
        raise BadInput(f"{where}: is in corp-deploy's own format; give the folder hf that reduce --save-as hf writes")
    if kind not in CLASSES:
        raise BadInput(
            f"{where}: model_type is {kind!r:.60}, expected one with graphs by {PACKAGE}: {', '.join(CLASSES)}; "
            f"{_INSTEAD}"
        )
    named = config.get("architectures")
    if named not in (None, [CLASSES[kind]]):
        raise BadInput(f"{where}: architectures is {named!r:.100}, expected [{CLASSES[kind]!r}]")
    if config.get("use_sliding_window"):
        raise BadInput(
            f"{where}: some of its layers use a sliding window (use_sliding_window), whose caches are not "
            f"supported; {_INSTEAD}"
        )


def require_builder() -> None:
    """Raise Missing where onnxruntime-genai or transformers is not installed."""
    try:
        import onnxruntime_genai  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise Missing(
            f"{error.name}, which builds graphs of decoders, is not installed; install the extra `genai`"
        ) from error


@contextmanager
def restored_process() -> Iterator[None]:
    """Silence the body's standard streams, and restore the module search path and the root logger after it."""
    root, path = logging.getLogger(), list(sys.path)
    handlers, level = list(root.handlers), root.level
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            yield
        finally:
            sys.path[:], root.handlers[:] = path, handlers
            root.setLevel(level)


def build_graph(directory: Path, output: Path, *, precision: str, window: int | None, scratch: Path) -> None:
    """Write GRAPH, WEIGHTS, SETTINGS and the tokenizer's files into `output`.

    Precisions fp32, int8 and int4 (of weights, the cache stays FP32) are for CPUs, fp16 is for GPUs. `window` is the
    number of tokens that each token sees, itself included; None for all. The builder's temporary files go to `scratch`.
    Raises BadInput where the builder, which `require_builder` has found, can't build a graph of this model.
    """
    with restored_process():
        try:
            _run_builder(directory, output, precision, scratch)
        except Exception as error:
            if is_out_of_memory(error) or os_error_from(error) is not None:
                raise
            raise BadInput(
                f"{directory}: {PACKAGE} {version(PACKAGE)} can't build a graph of it ({type(error).__name__}: "
                f"{error!s:.300}); {_INSTEAD}"
            ) from error
    _set_producer_and_window(output / GRAPH, window)


def _run_builder(directory: Path, output: Path, precision: str, scratch: Path) -> None:
    from onnxruntime_genai.models import builder
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    config.architectures = [CLASSES[config.model_type]]
    details = {"extra_kwargs": {"local_files_only": True}, "hf_name": str(directory), "hf_config": config}
    places = (str(directory), str(output), precision, PROVIDERS[precision], str(scratch))
    builder.create_model("", *places, hf_details=details, hf_token=False, hf_remote=False)


def _set_producer_and_window(graph: Path, window: int | None) -> None:
    """Write the builder's release as the graph's producer, and the window of attention into the graph.

    The builder itself writes the commit of the repository that it is installed in, so that equal models would be
    different files on two machines. It writes the window into its runtime's settings alone, so that the graph by itself
    would be a different model beyond the window.
    """
    from onnx.helper import make_attribute

    from ground.onnx_file import read_onnx

    proto = read_onnx(graph, weights=False)
    proto.producer_name, proto.producer_version = PACKAGE, version(PACKAGE)
    for node in proto.graph.node if window else ():
        if node.op_type == "GroupQueryAttention":
            others = [attribute for attribute in node.attribute if attribute.name != _WINDOW]
            del node.attribute[:]
            node.attribute.extend([*others, make_attribute(_WINDOW, window)])
    graph.write_bytes(proto.SerializeToString(deterministic=True))


Ids = NDArray[np.int64]
Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Reference:
    """A causal model of transformers on the CPU."""

    model: Any

    def prefill(self, ids_BT: Ids) -> Logits:
        """Return the logits [B,T,V] of all tokens, computed at once without a cache."""
        with torch.inference_mode():
            answer = self.model(torch.from_numpy(ids_BT), use_cache=False)
        return np.asarray(answer.logits, dtype=np.float32)

    @torch.inference_mode()
    def steps(self, ids_BT: Ids) -> Logits:
        """Return the logits [B,T,V] of all tokens, computed one token after the other with the cache."""
        past, logits = None, []
        for ids_B1 in torch.from_numpy(ids_BT).split(1, dim=1):
            answer = self.model(ids_B1, past_key_values=past, use_cache=True)
            past = answer.past_key_values
            logits.append(np.asarray(answer.logits, dtype=np.float32))
        return np.concatenate(logits, axis=1)


def open_reference(directory: Path) -> Reference:
    """Return transformers' float32 model of a directory. Raises BadInput where tensors are missing or left over."""
    with restored_process():
        model, loading = library().AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    if wrong := next((f"{kind}: {sorted(names)[:3]}" for kind, names in loading.items() if names), ""):
        raise BadInput(f"{directory}: transformers loads it with {wrong}; save the model again")
    return Reference(model=model.eval())
