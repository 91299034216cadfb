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


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        try:
            import onnxruntime as ort
        except ImportError as error:
            told = f"the server's Python lacks ONNX Runtime ({error}); install it there: pip install onnxruntime"
            raise pb_utils.TritonModelException(told) from error
        config = json.loads(args["model_config"])
        self.batched = config["max_batch_size"] > 0
        self.input_name, self.output_name = config["input"][0]["name"], config["output"][0]["name"]
        options = ort.SessionOptions()
        threads = config.get("parameters", {}).get("intra_op_threads")
        if threads is not None:
            options.intra_op_num_threads = int(threads["string_value"])
        graph = Path(args["model_repository"]) / args["model_version"] / "model.onnx"
        self.session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        # Tensors go in and out by DLPack: a backend built before numpy 2 misreads the strides and sizes of numpy 2 in
        # as_numpy() and Tensor(name, array), and answers wrongly without a word.
        given = [pb_utils.get_input_tensor_by_name(request, self.input_name) for request in requests]
        images = [np.from_dlpack(tensor) for tensor in given]
        if self.batched:
            ends = np.cumsum([len(part) for part in images])
            outputs = np.split(self._run(np.concatenate(images)), ends[:-1])
        else:
            outputs = [self._run(part) for part in images]
        return [pb_utils.InferenceResponse(output_tensors=[self._tensor(part)]) for part in outputs]

    def finalize(self) -> None:
        del self.session

    def _tensor(self, output: Any) -> Any:
        return pb_utils.Tensor.from_dlpack(self.output_name, np.ascontiguousarray(output))

    def _run(self, images: Any) -> Any:
        return self.session.run([self.output_name], {self.input_name: images})[0]
