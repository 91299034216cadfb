"""The shell script that builds a plan with the TensorRT of the server that will load it."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from jinja2 import Environment

from export.engine.options import BatchProfile
from ground.templates import templates_of
from ground.text import one_line

from .server_releases import IMAGE
from .signature import Tensor

SCRIPT_NAME = "build_plan.sh"
PENDING_NAME = "plan.config.pbtxt"


def build_script(
    *,
    name: str,
    version: int,
    inputs: Sequence[Tensor],
    profiles: Sequence[BatchProfile],
    onnx_sha256: str,
    cc_filenames: Mapping[str, str],
    image_tag: str,
    pending: bool,
) -> str:
    """POSIX shell; `pending` installs the plan's config, which waits beside the script while there is no plan.

    Every word reaches the shell quoted where it has to be.
    """
    return (
        _environment()
        .get_template("build_plan.sh.jinja")
        .render(
            name=name,
            version=version,
            folder=f"{name}_onnx/{version}",
            script=SCRIPT_NAME,
            image=f"{IMAGE}:{image_tag}",
            onnx_sha256=onnx_sha256,
            cc_filenames=cc_filenames,
            profiles=[list(_shapes(inputs, profile)) for profile in profiles],
            pending=PENDING_NAME if pending else None,
        )
    )


@cache
def _environment() -> Environment:
    """Templates of texts that are no HTML: each word goes through `sh`, or through `comment`."""
    environment = templates_of("export.triton")
    environment.filters |= {"sh": shlex.quote, "comment": one_line}
    return environment


def _shapes(inputs: Sequence[Tensor], profile: BatchProfile) -> Iterator[str]:
    """trtexec's options for one profile, such as --minShapes=images:1x3x32x32."""
    for kind, size in (("min", profile.smallest), ("opt", profile.tuned), ("max", profile.largest)):
        shapes = (f"{tensor.name}:{'x'.join(map(str, (size, *tensor.dims(batched=True))))}" for tensor in inputs)
        yield f"--{kind}Shapes={','.join(shapes)}"
