#!/bin/sh
# Builds the plan of golden, version 1, from the ONNX beside this script.
# On the machine with the GPU:  IMAGE=REGISTRY/tritonserver:26.07-py3 sh golden_onnx/1/build_plan.sh   (starts the server image by docker)
# Inside such a container:      sh golden_onnx/1/build_plan.sh inside
set -eu
name=golden
version=1
script=golden_onnx/1/build_plan.sh
onnx_sha256=9a3ad65ebaf90ccd45a72fa9c2e7b3eeb65ebc2e702fb3a843ae4bfcbc4caa41
default=tritonserver:26.07-py3
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
