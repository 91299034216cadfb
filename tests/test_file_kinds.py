"""Files that are not what their names say: the content is recognised, named, and read where it can be."""

import gzip
import io
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from safetensors.torch import save_file
from torch import nn

from calib.images import Images, open_images
from calib.store import load_moments
from corp_deploy.families.tokenizer import content_of_tokenizer
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.hub_snapshot import config_of_directory, config_of_transformers, weights_of_transformers
from corp_deploy.store.weights import read_weights
from ground.arrays import array_from_file
from ground.onnx_file import read_onnx
from tests.refusals import rejects

STATE = {"a.weight": torch.arange(4.0)}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0d71\nsize 19332096\n"
PAGE = b"\n<!DOCTYPE html><html><head><title>Sign in</title></head></html>"
ANSWER = b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code></Error>'
POINTED, PAGED = "a Git LFS pointer.*git lfs pull", r"a web page \(HTML\).*download it again"
SUFFIXES = ("w.safetensors", "w.pth", "w.pt", "w.bin", "w.ckpt", "w.pth.tar")


def tar() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("weights.pth"))
    return content.getvalue()


def zipped(*names: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    return content.getvalue()


def graph() -> bytes:
    made = helper.make_graph([], "g", [], [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])])
    return bytes(helper.make_model(made).SerializeToString())


def array() -> bytes:
    content = io.BytesIO()
    np.save(content, np.ones(3))
    return content.getvalue()


OTHERS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a pointer": (lambda: POINTER, POINTED),
    "a page": (lambda: PAGE, PAGED),
    "a server's answer": (lambda: ANSWER, r"a server's answer \(XML\)"),
    "nothing": (lambda: b"", "an empty file.*get it again"),
    "an answer in words": (lambda: b"Entry not found\n", "a text, 'Entry not found'.*download it again"),
    "JSON": (lambda: b'{"error": "denied"}', "a text, .*download it again"),
    "gzip": (lambda: gzip.compress(b"x"), "packed by gzip.*unpack it first"),
    "a tar archive": (tar, "a tar archive.*unpack it first"),
    "a zip archive": (lambda: zipped("weights.bin"), "a zip archive.*unpack it first"),
    "half a zip archive": (lambda: zipped("weights.bin")[:20], "cut short.*get it again"),
    "Keras": (lambda: zipped("config.json", "model.weights.h5"), "a model of Keras"),
    "HDF5": (lambda: b"\x89HDF\r\n\x1a\n" + bytes(90), "HDF5, as Keras and TensorFlow"),
    "an array": (array, r"an array of numpy \(\.npy\)"),
    "arrays": (lambda: zipped("a.npy"), r"arrays of numpy \(\.npz\)"),
    "a graph": (graph, "an ONNX graph.*weights that it was exported of"),
    "GGUF": (lambda: b"GGUF" + bytes(90), "GGUF"),
    "TorchScript": (lambda: zipped("m/data.pkl", "m/constants.pkl", "m/code/m.py"), r"TorchScript.*torch\.jit\.load"),
    "an exported program": (lambda: zipped("m/archive_format", "m/models/model.json"), r"torch\.export\.load"),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", OTHERS)
def test_foreign_weight_formats_are_named_with_a_remedy(tmp_path: Path, kind: str, suffix: str) -> None:
    content, said = OTHERS[kind]
    (tmp_path / suffix).write_bytes(content())
    rejects(said, read_weights, tmp_path / suffix)


def test_torch_exports_are_recognised(tmp_path: Path) -> None:
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    torch.export.save(program, tmp_path / "w.pt2")
    rejects(r"torch\.export\.load", read_weights, tmp_path / "w.pt2")


@pytest.mark.parametrize("suffix", [*SUFFIXES, "w.weights", "w"])
def test_misnamed_file_is_read_by_its_content(tmp_path: Path, suffix: str) -> None:
    save_file(STATE, tmp_path / "a")
    torch.save(STATE, tmp_path / "b")
    torch.save(STATE, tmp_path / "c", _use_new_zipfile_serialization=False)
    for name in ("a", "b", "c"):
        shutil.copy(tmp_path / name, tmp_path / suffix)
        assert torch.equal(read_weights(tmp_path / suffix, STATE).state["a.weight"], STATE["a.weight"])


def test_directories_and_texts_are_refused_as_weights(tmp_path: Path) -> None:
    rejects("a directory, expected a file of weights.*or give --model", read_weights, tmp_path)
    (tmp_path / "w.txt").write_text("weights")
    rejects("a text, 'weights', expected weights", read_weights, tmp_path / "w.txt")
    (tmp_path / "w.dat").write_bytes(bytes(20))
    rejects("no known format of weights", read_weights, tmp_path / "w.dat")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_truncated_safetensors_are_reported(tmp_path: Path, suffix: str) -> None:
    save_file({f"a.{number}": torch.ones(9) for number in range(99)}, tmp_path / "whole")
    (tmp_path / suffix).write_bytes((tmp_path / "whole").read_bytes()[:900])
    rejects("can't be read as safetensors.*the file is truncated", read_weights, tmp_path / suffix)


def opened(path: Path) -> Images:
    return open_images(path, image_shape=(3, 4, 4), transform=lambda _: torch.ones(3, 4, 4))


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a configuration": ("config.json", lambda path: config_of_directory(path.parent)),
    "weights of transformers": ("model.safetensors", lambda path: weights_of_transformers(path.parent)),
    "a shard of transformers": ("model-00001-of-00002.safetensors", lambda path: weights_of_transformers(path.parent)),
    "an array": ("images.npy", lambda path: array_from_file(path, "images")),
    "images in an archive": ("images.npz", opened),
    "images as tensors": (
        "images.safetensors",
        opened,
    ),
    "a picture": ("a.png", lambda path: next(opened(path.parent).batches(1))),
    "shards of pictures": ("a.tar", opened),
    "moments": ("m.safetensors", load_moments),
    "a tokenizer": ("tokenizer.json", lambda path: content_of_tokenizer(path.parent)),
    "a graph": ("g.onnx", read_onnx),
}


@pytest.mark.parametrize("reader", READERS)
def test_lfs_pointers_and_html_pages_are_named(tmp_path: Path, reader: str) -> None:
    name, read = READERS[reader]
    if "shard" in reader:
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    for content, said in ((POINTER, POINTED), (PAGE, PAGED)):
        (tmp_path / name).write_bytes(content)
        rejects(said, read, tmp_path / name)


def test_checkpoint_given_as_a_graph_is_named(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "g.onnx")
    rejects("a checkpoint of torch.save, expected an ONNX graph; export the model", read_onnx, tmp_path / "g.onnx")
    assert onnx.IR_VERSION  # a graph's first bytes are its version


def test_peft_adapter_is_refused_as_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for read in (config_of_directory, config_of_transformers):
        rejects(r"an adapter of PEFT.*merge_and_unload\(\)", read, tmp_path)


GET = "nothing is ever downloaded; where there is a network: hf download"
VIT, TIMMS = "vit-base-patch16-224", "vit_tiny_patch16_224.augreg_in21k"
HUB = {
    f"google/{VIT}": f"google/{VIT} --local-dir {VIT}; then give --model hf:{VIT}, or --model {VIT} if its",
    f"hf:google/{VIT}": f"google/{VIT} --local-dir {VIT}; then give --model hf:{VIT}$",
    "hf:bert-base-uncased": "bert-base-uncased --local-dir bert-base-uncased; then give --model hf:bert-base-uncased",
    "hf-hub:MahmoodLab/UNI": "MahmoodLab/UNI --local-dir UNI; then give --model UNI, or give",
    f"https://huggingface.co/google/{VIT}/tree/main": f"google/{VIT} --local-dir {VIT}; then give --model hf:{VIT}, or",
    "hf-hub:timm/resnet18@v1": "timm/resnet18 --revision v1 --local-dir resnet18; then give --model resnet18, or",
    f"timm/{TIMMS}": f"timm/{TIMMS} --local-dir {TIMMS}; then give --model {TIMMS}, or give",
}


@pytest.mark.parametrize("name", HUB)
def test_hub_name_is_refused_with_a_download_command(name: str) -> None:
    rejects(f"{GET} {HUB[name]}", load_dense, name, weights=None, kwargs={})
