"""A release as small as `check` takes it: one graph, its answers to samples, the manifest and the digests of all."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from ground.files import sha256_of_file


def release_of(graph: Path, images: NDArray[Any], folder: Path, name: str = "model.onnx") -> Path:
    """Write one of a graph with one input, under this name; returns the folder."""
    (folder / "samples").mkdir(parents=True)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(graph.read_bytes())
    session = ort.InferenceSession(graph, providers=["CPUExecutionProvider"])
    np.save(folder / "samples" / "images.npy", images)
    np.save(folder / "samples" / "answers.npy", session.run(None, {session.get_inputs()[0].name: images})[0])
    graphs = {name: {"expected": "samples/answers.npy", "max_relative_error": 1e-4}}
    samples = {"kind": "corp-deploy/samples", "version": 1, "images": "samples/images.npy", "count": len(images)}
    (folder / "samples" / "samples.json").write_text(json.dumps(samples | {"graphs": graphs}))
    names = (name, "samples/answers.npy", "samples/images.npy", "samples/samples.json")
    files = {name: sha256_of_file(folder / name) for name in names}
    entries = {name: {"sha256": digest, "made_by": ""} for name, digest in files.items()}
    manifest = {"kind": "corp-deploy/manifest", "version": 1, "versions": {}, "files": entries}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    files["manifest.json"] = sha256_of_file(folder / "manifest.json")
    (folder / "SHA256SUMS").write_text("".join(f"{files[name]}  {name}\n" for name in sorted(files)))
    return folder
