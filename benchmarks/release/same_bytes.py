"""Compare the digests of the reduced model, graphs and plan that two checkouts make of the digits example.

    python benchmarks/release/same_bytes.py BEFORE AFTER

Both run in this environment, one after the other, on the model of BEFORE and the images of AFTER. The exit code is 1 if
a digest differs.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from importlib import metadata
from pathlib import Path

IMAGES = (
    "import numpy, sys; from examples.digits.images import load_part; "
    "numpy.savez_compressed(sys.argv[1], images=load_part('train').images)"
)
FILES = ("reduced/model.safetensors", "reduced/model.onnx", "reduced/model.fp16.onnx", "reduced/model.plan")
COMMANDS = (
    "calibrate --model {example} --images {images} --seed 0 --hold-out 200 -o moments.safetensors",
    "reduce --model {example} --moments moments.safetensors --mlp 0.5 --attn 0.5 -o reduced",
    "export --model reduced --precision fp32,fp16 -o reduced/model.onnx",
    "build reduced/model.fp16.onnx --backend tensorrt-rtx --batch 1:8:64 -o reduced/model.plan",
)
PACKAGES = ("torch", "timm", "numpy", "onnx", "onnxscript", "tensorrt-rtx")


def run(checkout: Path, words: list[str], directory: Path) -> None:
    """Run Python with the checkout's code in a directory."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *words], cwd=directory, env=environment, check=True, stdout=subprocess.DEVNULL)


def digests(checkout: Path, example: Path, images: Path) -> dict[str, str]:
    """Return the SHA-256 of every file that the checkout makes."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for command in COMMANDS:
            run(checkout, ["-m", "corp_deploy", *command.format(example=example, images=images).split()], directory)
        return {file: hashlib.sha256((directory / file).read_bytes()).hexdigest() for file in FILES}


def commit(checkout: Path) -> str:
    """Return the checkout's commit, with a + if files differ from it."""
    words = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=12", "--dirty=+"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    before, after = asked.before.resolve(), asked.after.resolve()
    example = before / "examples" / "digits" / "model"
    with tempfile.TemporaryDirectory() as directory:
        run(after, ["-c", IMAGES, "images.npz"], Path(directory))
        first, second = (digests(each, example, Path(directory, "images.npz")) for each in (before, after))
    record = {
        "kind": "corp-deploy-same-bytes",
        "version": 1,
        "machine": platform.machine(),
        "versions": {package: metadata.version(package) for package in PACKAGES},
        "before": {"commit": commit(before), "sha256": first},
        "after": {"commit": commit(after), "sha256": second},
        "same": first == second,
    }
    text = json.dumps(record, indent=2) + "\n"
    if asked.output:
        asked.output.write_text(text, encoding="utf-8")
    print(text, end="")
    sys.exit(0 if first == second else 1)


if __name__ == "__main__":
    main()
