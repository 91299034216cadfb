"""Whole files as bytes, smaller than any that is used, and their digests made right again."""

import io
import json
import tarfile
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import onnx
import tomli_w
import torch
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from PIL import Image
from safetensors.torch import load as tensors_of
from safetensors.torch import save as safetensors_from

from calib import store

Values = tuple[Callable[[bytes], Any], Callable[[Any], bytes]]
JSON: Values = (json.loads, lambda value: json.dumps(value).encode())
TOML: Values = (lambda content: tomllib.loads(content.decode()), lambda value: tomli_w.dumps(value).encode())


def _graph_from(content: bytes) -> Any:
    return MessageToDict(onnx.load_model_from_string(content), preserving_proto_field_name=True)


def _content_of_graph(value: Any) -> bytes:
    """Raises ValueError for what no graph can hold."""
    try:
        content: bytes = ParseDict(value, onnx.ModelProto()).SerializeToString()
    except ParseError as error:
        raise ValueError(str(error)) from error
    return content


GRAPH: Values = (_graph_from, _content_of_graph)


def pictures() -> dict[str, bytes]:
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 255, (20, 24, 3), dtype=np.uint8))
    return {f"a.{name}": _saved(picture, name) for name in ("png", "jpeg", "webp", "bmp")}


def _saved(picture: Image.Image, name: str) -> bytes:
    file = io.BytesIO()
    picture.save(file, name)
    return file.getvalue()


def npy_bytes(values: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def npz_bytes(**values: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **values)
    return file.getvalue()


def torch_bytes(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def tar_bytes(members: Mapping[str, bytes], form: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


def sealed_moments(content: bytes) -> bytes:
    """With the digests of the tensors and of the header that stand in it."""
    with suppress(Exception):
        length = int.from_bytes(content[:8], "little")
        header = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][store.HEADER])
        tensors = tensors_of(content)
        header.pop("header_sha256", None)
        header["sha256"] = {name: store._sha256(tensor) for name, tensor in tensors.items()}
        return safetensors_from(tensors, {store.HEADER: store._signed(header)})
    return content


def moments_values(content: bytes) -> Values:
    tensors = tensors_of(content)

    def read(moments: bytes) -> Any:
        length = int.from_bytes(moments[:8], "little")
        return json.loads(json.loads(moments[8 : 8 + length])["__metadata__"][store.HEADER])

    return read, lambda value: safetensors_from(tensors, {store.HEADER: json.dumps(value)})
