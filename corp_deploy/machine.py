"""What this machine has, and which commands each lack disables."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import __version__

PACKAGES = (
    "torch",
    "timm",
    "numpy",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "tensorrt-rtx",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked for: what was found (empty when absent), what its lack disables, and what to do about it."""

    what: str
    found: str
    disables: str = ""
    remedy: str = ""


def versions() -> dict[str, str]:
    """Versions of this tool, Python and the packages a result depends on; absent packages are left out."""
    found = {"corp-deploy": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _package(found: dict[str, str], name: str, *, disables: str, extra: str) -> Finding:
    remedy = "" if name in found else f"pip install 'corp-deploy[{extra}]'"
    return Finding(what=name, found=found.get(name, ""), disables="" if name in found else disables, remedy=remedy)


def _providers() -> Finding:
    try:
        import onnxruntime
    except ImportError:
        return Finding(
            what="ONNX Runtime providers",
            found="",
            disables="verify and bench of ONNX files",
            remedy="pip install 'corp-deploy[cpu]'",
        )
    return Finding(what="ONNX Runtime providers", found=", ".join(onnxruntime.get_available_providers()))


def _gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return Finding(
            what="GPU", found=f"{torch.cuda.get_device_name()}, SM {major}{minor}, CUDA {torch.version.cuda}"
        )
    return Finding(
        what="GPU",
        found="",
        disables="measuring on a GPU; building a full TensorRT engine",
        remedy="run those steps on a machine with one",
    )


def _driver() -> Finding:
    command = shutil.which("nvidia-smi")
    if command is None:
        return Finding(
            what="NVIDIA driver", found="", disables="whatever needs a GPU", remedy="install the driver of the GPU"
        )
    query = [command, "--query-gpu=driver_version,clocks.sm,clocks.max.sm,power.limit", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        return Finding(
            what="NVIDIA driver",
            found="",
            disables="whatever needs a GPU",
            remedy=done.stdout.strip() or done.stderr.strip(),
        )
    return Finding(what="NVIDIA driver", found=f"{done.stdout.strip()} (driver, SM clock, highest, power limit)")


def _memory() -> Finding:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Finding(what="memory", found=f"{pages * size / 2**30:.1f} GiB, {os.cpu_count()} CPUs, {platform.machine()}")


def _disk(where: Path) -> Finding:
    return Finding(what="free disk", found=f"{shutil.disk_usage(where).free / 2**30:.1f} GiB")


def findings() -> list[Finding]:
    """Everything the commands may need, found or not."""
    found = versions()
    return [
        Finding(what="corp-deploy", found=__version__),
        Finding(what="python", found=found["python"]),
        *(Finding(what=name, found=found[name]) for name in ("torch", "timm", "numpy", "onnx", "onnxscript")),
        _providers(),
        _package(found, "tensorrt", disables="engines for data-centre GPUs", extra="gpu"),
        _package(
            found, "tensorrt-rtx", disables="engines for RTX GPUs, and the fusion audit without a GPU", extra="rtx"
        ),
        _gpu(),
        _driver(),
        _memory(),
        _disk(Path.cwd()),
    ]


def record() -> dict[str, Any]:
    """The findings as JSON values."""
    return {"kind": "corp-deploy/doctor", "version": 1, "findings": [asdict(finding) for finding in findings()]}
