"""Triton releases with their TensorRT, ONNX Runtime and Python, and the script that builds a plan in a release.

The table is server_releases.json. The script builds with the TensorRT of the server that will load the plan.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment

from export.engine.options import BatchProfile
from export.graph.ports import GraphPort
from ground.errors import BadInput
from ground.records import record_from_file
from ground.templates import template_environment
from ground.text import comment_line
from ground.vulnerabilities import SERVER, describe_vulnerabilities, find_vulnerabilities, version_numbers

TABLE_PATH = Path(__file__).with_name("server_releases.json")
IMAGE = "tritonserver"
REGISTRY = "nvcr.io/nvidia"  # where NVIDIA publishes it


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRelease:
    """A container image; `tensorrt` is None if unpublished, `opset` and `ir` are the newest of its ONNX Runtime."""

    tag: str
    server: str
    python: str
    onnxruntime: str
    tensorrt: str | None
    opset: int
    ir: int

    @property
    def month(self) -> tuple[int, int]:
        """The year and the month of the release."""
        year, month = self.tag.partition("-")[0].split(".")
        return int(year), int(month)

    @property
    def image(self) -> str:
        return f"{IMAGE}:{self.tag}"


class _Table(msgspec.Struct, frozen=True):
    onnxruntime: dict[str, dict[str, Any]]
    releases: dict[str, dict[str, Any]]


def server_release(tag: str) -> ServerRelease:
    """Look up '26.07', '26.07-py3' or '26.07-trtllm-python-py3'. Raises BadInput for an unknown release."""
    table = _table()
    month, _, flavour = tag.partition("-")
    flavour = flavour or "py3"
    row = table.releases.get(month)
    if row is None or flavour not in row["tensorrt"]:
        flavours = ", ".join(next(iter(table.releases.values()))["tensorrt"])
        raise BadInput(
            f"server release {tag!r} is not in the table; known are {', '.join(table.releases)}, "
            f"each as {flavours}; name one of them or add a row to {TABLE_PATH.name}"
        )
    reads = table.onnxruntime[".".join(row["onnxruntime"].split(".")[:2])]
    return ServerRelease(tag=f"{month}-{flavour}", **reads, **row | {"tensorrt": row["tensorrt"][flavour]})


def server_tags() -> tuple[str, ...]:
    """Return the releases in the table, such as 26.07, newest first."""
    return tuple(_table().releases)


def plan_warnings(release: ServerRelease, library_version: str, *, version_compatible: bool = False) -> list[str]:
    """Return warnings about a plan that may not load; empty for the same TensorRT."""
    built, remedy = f"the plan was built with TensorRT {library_version}", "rebuild it with build_plan.sh"
    if release.tensorrt is None:
        return [f"{built}; the table does not know the TensorRT of {release.image}: if it differs, {remedy}"]
    served, built_with = version_numbers(release.tensorrt), version_numbers(library_version)
    if served[:3] == built_with[:3]:
        return []
    has = f"{release.image} has {release.tensorrt}"
    if version_compatible and served[:1] == built_with[:1]:
        return [
            f"{built}, version compatible, and {has}; start it with --backend-config=tensorrt,version-compatible=true"
        ]
    return [f"{built} and {has}: it will not load; {remedy}"]


def vulnerability_warnings(release: ServerRelease) -> list[str]:
    holes = find_vulnerabilities(IMAGE, release.tag.partition("-")[0], SERVER)
    return (
        [f"{release.image} has published holes, closed in {holes[-1].fixed_in}: {describe_vulnerabilities(holes)}"]
        if holes
        else []
    )


def onnx_warnings(release: ServerRelease, *, opset: int, ir: int) -> list[str]:
    runs = f"{release.image} has ONNX Runtime {release.onnxruntime}, which reads"
    warnings = []
    if opset > release.opset:
        warnings.append(f"the graph uses opset {opset} and {runs} up to {release.opset}; export with --opset 20")
    if ir > release.ir:
        warnings.append(f"the graph has IR version {ir} and {runs} up to {release.ir}; export it with an older onnx")
    return warnings


def _table() -> _Table:
    return record_from_file(TABLE_PATH, _Table, kind="server-releases", remedy="install the tool again")


SCRIPT_NAME = "build_plan.sh"
PENDING_NAME = "plan.config.pbtxt"


def build_script(
    *,
    name: str,
    version: int,
    inputs: Sequence[GraphPort],
    profiles: Sequence[BatchProfile],
    onnx_sha256: str,
    cc_filenames: Mapping[str, str],
    image_tag: str,
    pending: bool,
) -> str:
    template = _environment().get_template("build_plan.sh.jinja")
    return template.render(
        name=name,
        version=version,
        folder=f"{name}_onnx/{version}",
        script=SCRIPT_NAME,
        image=f"{REGISTRY}/{IMAGE}:{image_tag}",
        onnx_sha256=onnx_sha256,
        cc_filenames=cc_filenames,
        profiles=[list(_shapes(inputs, profile)) for profile in profiles],
        pending=PENDING_NAME if pending else None,
    )


def _environment() -> Environment:
    environment = template_environment("export.triton")
    environment.filters |= {"sh": shlex.quote, "comment": comment_line}
    return environment


def _shapes(inputs: Sequence[GraphPort], profile: BatchProfile) -> Iterator[str]:
    """Yield trtexec's options for one profile, such as --minShapes=images:1x3x32x32."""
    for kind, size in (("min", profile.smallest), ("opt", profile.tuned), ("max", profile.largest)):
        shapes = (f"{tensor.name}:{'x'.join(map(str, (size, *tensor.dims(batched=True))))}" for tensor in inputs)
        yield f"--{kind}Shapes={','.join(shapes)}"
