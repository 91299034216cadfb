"""Random changes of valid files, which the reader of each format has to accept or refuse.

    python -m benchmarks.trust.fuzz --inputs 4000

Valid files are those of tests/golden, and small pictures, arrays, archives, labels and rules. Hypothesis changes bytes,
and single values of JSON and TOML documents. Digests within moments and models are corrected afterwards, as an attacker
would do. A finding is an exception other than BadInput, or more than 5 CPU seconds for one file.
`tests/test_fuzz.py` runs a few examples of each format.
"""

import io
import json
import shutil
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import click
import numpy as np
import tomli_w
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as bytes_from_tensors

from calib import store
from calib.groups import group_ids
from calib.texts import open_texts
from corp_deploy.families.family import input_ports
from corp_deploy.proof.report_input import read_reduction
from corp_deploy.release.digests import Stamp
from corp_deploy.release.recipe_file import load_recipe
from corp_deploy.store.checkpoint import load_checkpoint, save
from corp_deploy.store.graph_facts import facts_of_onnx
from corp_deploy.store.hub_snapshot import config_of_directory, model_of_snapshot
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.store.labels import labels_for
from corp_deploy.store.manifest import load_effort, load_manifest
from corp_deploy.store.model_config import load_model_config
from corp_deploy.store.weights import read_weights
from export.engine.record import record_of_plan
from export.graph.check import check_onnx
from export.graph.ports import ports_of_graph
from export.triton.config import read_expected
from export.triton.lint import lint_repository
from ground.errors import BadInput
from ground.onnx_file import read_onnx
from ground.records import record_from_file
from perf.bench.latency_table import load_table
from perf.gate.evidence import Evidence
from perf.gate.gate import judge
from perf.gate.history import load_trend
from perf.gate.rule import rule_from_text
from perf.gate.verdicts import load_gate
from perf.parity.parity import load_parity
from perf.parity.rounding import round_file
from perf.record.decoders import load_decoder_bench
from perf.record.runs import load_bench
from perf.runners.onnx_session import read_onnx_ports
from tests import tiny

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden" / "files"
SLOW_S = 5.0
WORDS = (b"\0", b"\xff\xff\xff\xff", b"\xff" * 8, b"\x7f\xff\xff\xff", b"-1", b"1e999", b"nan", b"../", b"/etc/passwd",
         b"{", b"[" * 50, b'"', b"\n", b"\x1b[2J", "\u202e".encode(), b"=", b"%s")  # fmt: skip
"""Pieces that often break parsers."""
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.sampled_from([-1, 0, 10**19, 10**400])
    | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
SNAPSHOT = {
    "architecture": "vit_tiny_patch16_224",
    "num_classes": 7,
    "model_args": {"img_size": 32},
    "pretrained_cfg": {"input_size": [3, 32, 32], "mean": [0.5], "std": [0.5], "crop_pct": 1, "crop_mode": "center"},
}
RULES = (b"p50@b1 > baseline * 1.03", b"reduced.speedup@b1 < 1.2", b"top1_agreement < 0.99", b"size_bytes > 3.5 MB")
Read = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Format:
    """A file format: a file name, valid contents, the reader, and a function that corrects digests."""

    name: str
    valid: Sequence[bytes]
    read: Read
    seal: Callable[[bytes], bytes] = bytes

    @property
    def document(self) -> Any:
        """Return the first valid content as a JSON or TOML document, None for other formats."""
        if self.name.endswith(".toml"):
            return tomllib.loads(self.valid[0].decode())
        return json.loads(self.valid[0]) if self.name.endswith(".json") else None

    def accepts(self, content: bytes, folder: Path) -> bool:
        """Return whether the reader accepts the content; exceptions other than BadInput are raised."""
        path = folder / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.seal(content))
        try:
            self.read(path)
        except BadInput:
            return False
        return True

    def changed(self) -> st.SearchStrategy[bytes]:
        """Return contents with changed bytes or, for documents, with one changed value."""
        if self.document is None:
            return spliced(self.valid)
        paths = st.sampled_from(list(paths_of(self.document)))
        documents = st.builds(replaced, st.just(self.document), paths, VALUES)
        return spliced(self.valid) | documents.map(self._written)

    def _written(self, value: Any) -> bytes:
        try:
            return (tomli_w.dumps(value) if self.name.endswith(".toml") else json.dumps(value)).encode()
        except (TypeError, ValueError, AttributeError):  # no text of that form has it
            return repr(value).encode("utf-8", "replace")


def paths_of(value: Any, above: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path to every value in a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*above, key)
        yield from paths_of(inner, (*above, key))


def replaced(record: Any, path: tuple[str | int, ...], value: object) -> Any:
    """Return a document with another value at the path."""
    if not path:
        return value
    changed: Any = record.copy()
    changed[path[0]] = replaced(record[path[0]], path[1:], value)
    return changed


@st.composite
def spliced(draw: st.DrawFn, valid: Sequence[bytes]) -> bytes:
    """Draw one of the contents with bytes removed, overwritten or inserted."""
    content = draw(st.sampled_from(list(valid)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        taken = draw(st.sampled_from([0, 1, 4, 64, len(content)]))
        put = draw(st.sampled_from(WORDS) | st.binary(max_size=16))
        content = content[:start] + put + content[start + taken :]
    return content


def saved(save: Callable[..., object], *values: Any, **named: Any) -> bytes:
    """Return the bytes that a function writes to a file."""
    file = io.BytesIO()
    save(file, *values, **named)
    return file.getvalue()


def save_torch(file: io.BytesIO, value: object) -> None:
    torch.save(value, file)


def save_tar(file: io.BytesIO, members: dict[str, bytes]) -> None:
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def sealed_moments(content: bytes) -> bytes:
    """Return moments with correct digests of their tensors and header, if they can be parsed."""
    with suppress(Exception):
        length = int.from_bytes(content[:8], "little")
        header = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][store.HEADER])
        tensors = tensors_from_bytes(content)
        header.pop("header_sha256", None)
        header["sha256"] = {name: store._sha256(tensor) for name, tensor in tensors.items()}
        return bytes_from_tensors(tensors, {store.HEADER: store._signed(header)})
    return content


def _read_moments(path: Path) -> object:
    moments = store.load_moments(path)
    return [moments.sites[name] for name in moments.sites]


def _read_model(path: Path) -> object:
    """Read a model directory with a changed config.json, or with changed weights and their digest."""
    content = path.read_bytes()
    save(tiny.checkpoint(), path.parent)
    path.write_bytes(content)
    if path.name == "model.safetensors":
        config = json.loads(path.with_name("config.json").read_text())
        config["weights_sha256"] = sha256(path.read_bytes()).hexdigest()
        path.with_name("config.json").write_text(json.dumps(config))
    return load_checkpoint(path.parent)


def _read_graph(path: Path) -> object:
    proto = read_onnx(path)
    return check_onnx(proto), ports_of_graph(proto), facts_of_onnx(path), read_onnx_ports(path)


def _round_graph(path: Path) -> object:
    round_file(path, path.with_suffix(".rounded"))
    return path


def _read_snapshot(path: Path) -> object:
    return model_of_snapshot(path.parent, config_of_directory(path.parent))


def _read_rule(path: Path) -> object:
    records = GOLDEN / "records"
    now = Evidence(bench=load_bench(records / "bench.json"), parity=load_parity(records / "parity.json"))
    return judge([rule_from_text(path.read_bytes().decode("utf-8", "surrogateescape"))], now, now)


def _read_served(path: Path) -> object:
    served = GOLDEN / "release" / "repository" / "golden_cpu"
    if not (path.parent / "1").exists():
        shutil.copytree(served, path.parent, dirs_exist_ok=True, ignore=lambda *_: ["config.pbtxt"])
    return lint_repository(path.parent.parent)


def _read_texts(path: Path) -> object:
    texts = open_texts(path, encode=lambda lines: {"ids": torch.tensor([[len(line)] for line in lines])})
    return [texts.name(position) for position in range(texts.count)]


def _config(path: Path) -> object:
    return read_reduction(load_model_config(path.parent), path.parent)


RECORDS: dict[str, Read] = {
    "records/bench.json": load_bench,
    "records/parity.json": load_parity,
    "records/gate.json": load_gate,
    "records/history.json": load_trend,
    "records/block.latency-table.json": load_table,
    "records/decoder-bench.json": load_decoder_bench,
    "records/model.plan.json": lambda path: record_of_plan(path.with_suffix("")),
    "records/effort.json": load_effort,
    "records/manifest.json": load_manifest,
    "release/repository/expected.json": read_expected,
    "states/stamp.json": lambda path: record_from_file(path, Stamp),
}
"""Golden documents, each with its reader."""


def formats(home: Path) -> dict[str, Format]:
    """Return every format by name, and write inputs of the readers of images and labels to `home`."""

    def golden(name: str) -> list[bytes]:
        return [(GOLDEN / name).read_bytes()]

    rng, labels = np.random.default_rng(0), np.array([0, 2, 1])
    save(tiny.checkpoint(), home / "model")
    config, weights = ([(home / "model" / name).read_bytes()] for name in ("config.json", "model.safetensors"))
    model = load_checkpoint(home / "model").model
    pixels = rng.standard_normal((3, *input_ports(model)[0].shape), dtype=np.float32)
    np.save(home / "three.npy", pixels)
    three = images_for_model(model, home / "three.npy")
    picture = Image.fromarray(rng.integers(0, 255, (20, 24, 3), dtype=np.uint8))
    pictures = {f"a.{form}": saved(picture.save, form) for form in ("png", "jpeg", "webp", "bmp")}
    state = tensors_from_bytes(weights[0])

    def images(path: Path) -> object:
        return list(images_for_model(model, path).batches(1))

    def photos(path: Path) -> object:
        try:
            return images(path.parent)
        finally:
            path.unlink()

    def labelled(path: Path) -> object:
        return labels_for(path, three, model)

    def grouped(path: Path) -> object:
        return group_ids(three, str(path))

    every = [
        *(Format(name, golden(name), read) for name, read in RECORDS.items()),
        Format("snapshot/config.json", [json.dumps(SNAPSHOT).encode()], _read_snapshot),
        Format("plain.safetensors", golden("moments/vit.held-out.safetensors"), _read_moments),
        Format("sealed.safetensors", golden("moments/vit.held-out.safetensors"), _read_moments, sealed_moments),
        Format("m/config.json", config, _read_model),
        Format("report/config.json", config, _config),
        Format("w/model.safetensors", weights, _read_model),
        Format("w.safetensors", weights, read_weights),
        Format("w.pth", [saved(save_torch, each) for each in (state, {"state_dict": state})], read_weights),
        Format("recipe.toml", golden("release/recipe.toml"), lambda path: load_recipe(path, trust_paths=True)),
        Format("rule.txt", RULES, _read_rule),
        Format(
            "repository/golden_cpu/config.pbtxt", golden("release/repository/golden_cpu/config.pbtxt"), _read_served
        ),
        Format("g.onnx", golden("release/dense/model.onnx"), _read_graph),
        Format("rounded.onnx", golden("release/dense/model.onnx"), _round_graph),
        *(Format(f"photos/{name}", [content], photos) for name, content in pictures.items()),
        Format("i.npy", [saved(np.save, pixels), saved(np.save, pixels.astype(np.uint8))], images),
        Format("i.npz", [saved(np.savez, images=pixels)], images),
        Format("i.safetensors", [bytes_from_tensors({"images": torch.from_numpy(pixels)})], images),
        Format("i.tar", [saved(save_tar, pictures)], images),
        Format("l.npy", [saved(np.save, labels)], labelled),
        Format("l.npz", [saved(np.savez, labels=labels)], labelled),
        Format("groups.npy", [saved(np.save, np.array(["a", "b", "a"]))], grouped),
        Format("groups.json", [b'["a", "b", 1]'], grouped),
        Format("t.txt", ["one line\n\ntwo Ä\r\nthree".encode()], _read_texts),
    ]
    return {each.name: each for each in every}


def attacked(each: Format, inputs: int, folder: Path) -> int:
    """Return how many changed files are accepted; raise for a finding."""
    accepted = 0

    @seed(0)
    @settings(max_examples=inputs, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(each.changed())
    def run(content: bytes) -> None:
        nonlocal accepted
        begun = time.process_time()
        accepted += each.accepts(content, folder)
        assert time.process_time() - begun < SLOW_S, f"{each.name}: slow to refuse"

    run()
    return accepted


@click.command(help=__doc__)
@click.option("--inputs", type=click.IntRange(1), default=4000, show_default=True, help="Changed files of each format.")
@click.option("--only", default="", help="Formats with this in their names.")
def main(inputs: int, only: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, each in formats(Path(folder)).items():
            if only in name:
                click.echo(f"{name}: {attacked(each, inputs, Path(folder))} of {inputs} accepted")


if __name__ == "__main__":
    main()
