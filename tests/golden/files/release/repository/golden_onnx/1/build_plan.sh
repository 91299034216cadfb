#!/bin/sh
# Builds the plan of golden, version 1, from the ONNX beside this script.
# On the machine with the GPU:  sh golden_onnx/1/build_plan.sh
# Inside the server's container: sh golden_onnx/1/build_plan.sh inside
# The first starts nvcr.io/nvidia/tritonserver:26.07-py3 by docker: take the image of the server that
# will load the plan, since another version of TensorRT cannot read it. IMAGE=... in front names another image, such as
# a copy in a registry of your own; `package --server` writes another release here.
set -eu
name=golden
version=1
script=golden_onnx/1/build_plan.sh
onnx_sha256=ef0ba5e61fbb4ad5857f390d7a7c9cf331e056c81bd815149f84c6c5b28a029f
default=nvcr.io/nvidia/tritonserver:26.07-py3
image=${IMAGE:-$default}
here=$(cd "$(dirname "$0")" && pwd)
models=$(cd "$here/../.." && pwd)
if [ "${1:-}" != inside ]; then
    exec docker run --rm --gpus all --volume "$models:/models" "$image" sh "/models/$script" inside
fi
printf '%s  %s\n' "$onnx_sha256" "$here/model.onnx" | sha256sum --check --quiet - >&2
trtexec=$(command -v trtexec || echo /usr/src/tensorrt/bin/trtexec)
if [ ! -x "$trtexec" ]; then
    echo "this container has no trtexec; run the script in the TensorRT image of the server's month" >&2
    exit 4
fi
plan=model.plan
target="$models/$name/$version"
mkdir -p "$target"
"$trtexec" --onnx="$here/model.onnx" --saveEngine="$target/$plan.part" --stronglyTyped --skipInference \
    --profile=0 --minShapes=images:1x3x16x16 --optShapes=images:8x3x16x16 --maxShapes=images:8x3x16x16
mv "$target/$plan.part" "$target/$plan"
rm -f "$target/$plan.json"  # it described the plan that was there before
[ ! -e "$here/labels.txt" ] || cp "$here/labels.txt" "$target/labels.txt"
mkdir -p "$models/$name/configs"
cp "$here/plan.config.pbtxt" "$models/$name/configs/$version.pbtxt"
cp "$here/plan.config.pbtxt" "$models/$name/config.pbtxt"
