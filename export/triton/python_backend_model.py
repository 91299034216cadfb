"""Runs model.onnx on the CPU by ONNX Runtime, inside Triton's Python backend.

It is packaged as `<model>/<version>/model.py` and needs numpy and onnxruntime in the server's Python. All requests that
the dynamic batcher hands over at once go through the model in one call.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # exists inside the server only

# Tensors of numpy 2 go in and out by DLPack: a backend built before it misreads its strides and sizes in as_numpy() and
# Tensor(name, array), and answers wrongly without a word. Those of numpy 1 don't: the backend gives their capsules a
# name that numpy 1 doesn't know, and the server crashes.
BY_DLPACK = int(np.__version__.split(".")[0]) >= 2


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        try:
            import onnxruntime as ort
        except ImportError as error:
            message = f"the server's Python lacks ONNX Runtime ({error}); install it there: pip install onnxruntime"
            raise pb_utils.TritonModelException(message) from error
        config = json.loads(args["model_config"])
        self.batched = config["max_batch_size"] > 0
        self.inputs = [entry["name"] for entry in config["input"]]
        self.outputs = [entry["name"] for entry in config["output"]]
        options = ort.SessionOptions()
        threads = config.get("parameters", {}).get("intra_op_threads")
        if threads is not None:
            options.intra_op_num_threads = int(threads["string_value"])
        graph = Path(args["model_repository"]) / args["model_version"] / "model.onnx"
        self.session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        feeds = [
            {name: _array(pb_utils.get_input_tensor_by_name(request, name)) for name in self.inputs}
            for request in requests
        ]
        answers = self._run_together(feeds) if self.batched else [self._run(feed) for feed in feeds]
        return [pb_utils.InferenceResponse(output_tensors=self._tensors(answer)) for answer in answers]

    def finalize(self) -> None:
        del self.session

    def _run_together(self, feeds: list[dict[str, Any]]) -> list[list[Any]]:
        """Run the requests as one batch and return the outputs of each request."""
        ends = np.cumsum([len(feed[self.inputs[0]]) for feed in feeds])[:-1]
        outputs = self._run({name: np.concatenate([feed[name] for feed in feeds]) for name in self.inputs})
        return [list(answer) for answer in zip(*(np.split(output, ends) for output in outputs), strict=True)]

    def _run(self, feed: dict[str, Any]) -> list[Any]:
        outputs: list[Any] = self.session.run(self.outputs, feed)
        return outputs

    def _tensors(self, answer: list[Any]) -> list[Any]:
        named = zip(self.outputs, answer, strict=True)
        return [_tensor(name, np.ascontiguousarray(output)) for name, output in named]


def _array(tensor: Any) -> Any:
    return np.from_dlpack(tensor) if BY_DLPACK else tensor.as_numpy()


def _tensor(name: str, values: Any) -> Any:
    return pb_utils.Tensor.from_dlpack(name, values) if BY_DLPACK else pb_utils.Tensor(name, values)
