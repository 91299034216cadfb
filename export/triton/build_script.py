"""The shell script that builds a plan with the TensorRT of the server that will load it."""

from collections.abc import Mapping

from export.engine.options import BatchProfile

from .server_releases import IMAGE
from .signature import Tensor

SCRIPT_NAME = "build_plan.sh"
PENDING_NAME = "plan.config.pbtxt"
_TEXT = """\
#!/bin/sh
# Builds the plan of {name}, version {version}, from the ONNX beside this script.
# On the machine with the GPU:  IMAGE=REGISTRY/{image} sh {folder}/{script}   (starts the server image by docker)
# Inside such a container:      sh {folder}/{script} inside
set -eu
image=${{IMAGE:-{image}}}
here=$(cd "$(dirname "$0")" && pwd)
models=$(cd "$here/../.." && pwd)
if [ "${{1:-}}" != inside ]; then
    exec docker run --rm --gpus all --volume "$models:/models" "$image" sh /models/{folder}/{script} inside
fi
echo "{onnx_sha256}  $here/model.onnx" | sha256sum --check --quiet - >&2
trtexec=$(command -v trtexec || echo /usr/src/tensorrt/bin/trtexec)
if [ ! -x "$trtexec" ]; then
    echo "this container has no trtexec; run the script in the TensorRT image of the server's month" >&2
    exit 4
fi
{choose_plan}
target="$models/{name}/{version}"
mkdir -p "$target"
"$trtexec" --onnx="$here/model.onnx" --saveEngine="$target/$plan.part" --stronglyTyped --skipInference{shapes}
mv "$target/$plan.part" "$target/$plan"
rm -f "$target/$plan.json"  # it described the plan that was there before
[ ! -e "$here/labels.txt" ] || cp "$here/labels.txt" "$target/labels.txt"
{configure}"""
_CHOOSE = """\
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1)
case "$capability" in
{cases}
    *) echo "no plan of this model is for compute capability $capability; package one for it first" >&2; exit 4 ;;
esac"""
_CONFIGURE = """\
mkdir -p "$models/{name}/configs"
cp "$here/{pending}" "$models/{name}/configs/{version}.pbtxt"
cp "$here/{pending}" "$models/{name}/config.pbtxt"
"""


def build_script(
    *,
    name: str,
    version: int,
    tensor: Tensor,
    profiles: tuple[BatchProfile, ...],
    onnx_sha256: str,
    cc_filenames: Mapping[str, str],
    image_tag: str,
    pending: bool,
) -> str:
    """POSIX shell; `pending` installs the plan's config, which waits beside the script while there is no plan."""
    cases = "\n".join(f"    {key}) plan={file} ;;" for key, file in cc_filenames.items())
    return _TEXT.format(
        name=name,
        version=version,
        folder=f"{name}_onnx/{version}",
        script=SCRIPT_NAME,
        image=f"{IMAGE}:{image_tag}",
        onnx_sha256=onnx_sha256,
        choose_plan=_CHOOSE.format(cases=cases) if cases else "plan=model.plan",
        shapes="".join(_shapes(tensor, profile, index) for index, profile in enumerate(profiles)),
        configure=_CONFIGURE.format(name=name, version=version, pending=PENDING_NAME) if pending else "",
    )


def _shapes(tensor: Tensor, profile: BatchProfile, index: int) -> str:
    inner = "x".join(map(str, tensor.dims(batched=True)))
    sizes = (("min", profile.smallest), ("opt", profile.tuned), ("max", profile.largest))
    shapes = " ".join(f"--{kind}Shapes={tensor.name}:{size}x{inner}" for kind, size in sizes)
    return f" \\\n    --profile={index} {shapes}"
