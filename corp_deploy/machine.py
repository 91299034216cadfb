"""The capabilities of this machine, and the commands that missing ones disable."""

import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ground.threads import affinity_cpus, cpu_quota, wait_policy
from ground.vulnerabilities import describe_vulnerabilities, find_vulnerabilities, version_numbers
from perf.timing.energy import NoSensor, find_rapl, open_nvml_sensor
from perf.timing.gpu import open_gpu
from perf.timing.watch import has_vnni

from . import __version__

# The oldest versions with fixes for their published faults, as in pyproject.toml.
FLOORS: Mapping[str, str] = MappingProxyType({
    "torch": "2.11", "timm": "1.0.31", "numpy": "1.26.4", "onnx": "1.22", "onnxscript": "0.7.2", "pillow": "12.3",
    "safetensors": "0.8", "click": "8.5", "jinja2": "3.1.6", "markupsafe": "2.1.2", "msgspec": "0.21",
    "packaging": "26.3", "tomli-w": "1.2", "rich": "13.7", "onnxruntime": "1.27", "onnxruntime-gpu": "1.27",
    "nvidia-ml-py": "12.535.77", "tokenizers": "0.23.1", "onnxruntime-genai": "0.18", "openvino": "2025.0",
    "cryptography": "45.0.1", "model-signing": "1.1.1", "polygraphy": "0.50.3", "pyopenssl": "25.1",
    "scikit-learn": "1.5", "tensorrt": "11.0.0.114", "tensorrt-rtx": "1.5.0.114", "transformers": "5.19",
    "fsspec": "2024.6", "mlflow-skinny": "3.11.1", "pyarrow": "26", "ray": "2.55",
})  # fmt: skip
_UNNAMED = (
    "click", "cryptography", "fsspec", "jinja2", "markupsafe", "mlflow-skinny", "model-signing", "msgspec",
    "nvidia-ml-py", "onnxruntime-genai", "packaging", "polygraphy", "pyarrow", "pyopenssl", "ray", "rich",
    "scikit-learn", "tokenizers", "tomli-w", "transformers",
)  # fmt: skip
PACKAGES = tuple(name for name in FLOORS if name not in _UNNAMED)
_REQUIRED = (
    "torch", "timm", "numpy", "onnx", "onnxscript", "pillow", "safetensors", "click", "rich", "jinja2", "markupsafe",
    "msgspec", "packaging", "tomli-w",
)  # fmt: skip
# Packages that have a reason to be older than the floor: servers with an older major version.
_BELOW_FLOOR = {"tensorrt": "10.16.1 and newer build engines for servers that have TensorRT 10"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One capability: its name, what was found (empty if missing), what its lack disables, and the remedy."""

    what: str
    found: str
    disables: str = ""
    remedy: str = ""


@functools.cache
def _version(package: str) -> str:
    """Return the installed version or ""; cached, since each reading parses the package's whole metadata."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def versions() -> dict[str, str]:
    """Return the versions of this tool, Python and the installed packages that a result depends on."""
    found = {"corp-deploy": __version__, "python": platform.python_version()}
    return found | {package: version for package in PACKAGES if (version := _version(package))}


def _package(name: str, *, disables: str = "", extra: str = "") -> Capability:
    """Check that a package is installed and not older than its floor."""
    found, floor = _version(name), FLOORS[name]
    if not found:
        words = f"'corp-deploy[{extra}]'" if extra else "corp-deploy"
        return _lacks(name, disables or "everything", f"pip install {words}")
    holes = describe_vulnerabilities(find_vulnerabilities(name, found))
    if version_numbers(found) >= version_numbers(floor):
        return Capability(what=name, found=found, disables=holes)
    note = _BELOW_FLOOR.get(name)
    return Capability(
        what=name,
        found=f"{found}, older than {floor}",
        disables="; ".join(filter(None, (holes or "published fixes are missing", note))),
        remedy=f"pip install --upgrade '{name}>={floor}'",
    )


def _python() -> Capability:
    found = platform.python_version()
    holes = find_vulnerabilities("python", found)
    remedy = f"install Python {holes[-1].fixed_in} or newer" if holes else ""
    return Capability(what="python", found=found, disables=describe_vulnerabilities(holes), remedy=remedy)


def _lacks(what: str, disables: str, remedy: str) -> Capability:
    return Capability(what=what, found="", disables=disables, remedy=remedy)


def _providers() -> Capability:
    what = "ONNX Runtime providers"
    try:
        import onnxruntime
    except ImportError:
        return _lacks(what, "verify and bench of ONNX files", "pip install 'corp-deploy[cpu]'")
    return Capability(what=what, found=", ".join(onnxruntime.get_available_providers()))


def _vnni() -> Iterator[Capability]:
    """Yield whether the CPU has VNNI, or nothing for other architectures, whose kernels need none."""
    found = has_vnni()
    if found:
        yield Capability(what="VNNI", found="sums of INT8 products in 32 bits")
    elif found is False:
        saturated = "INT8 graphs in ONNX Runtime on this CPU, whose sums saturate"
        yield _lacks("VNNI", saturated, "export them with --weight-bits 7")


def _gpu() -> Capability:
    import torch

    if not torch.cuda.is_available():
        disables = "measuring on a GPU; building a full TensorRT engine"
        return _lacks("GPU", disables, "run those steps on a machine with one")
    major, minor = torch.cuda.get_device_capability()
    found = f"{torch.cuda.get_device_name()}, SM {major}{minor}, CUDA {torch.version.cuda}"
    return Capability(what="GPU", found=found)


def _driver() -> Capability:
    what, disables = "NVIDIA driver", "whatever needs a GPU"
    command = shutil.which("nvidia-smi")
    if command is None:
        return _lacks(what, disables, "install the driver of the GPU")
    query = [command, "--query-gpu=driver_version,clocks.sm,clocks.max.sm,power.limit", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    if result.returncode != 0:
        return _lacks(what, disables, result.stdout.strip() or result.stderr.strip())
    return Capability(what=what, found=f"{result.stdout.strip()} (driver, SM clock, highest, power limit)")


def _energy() -> Iterator[Capability]:
    """Yield whether the energy of CPUs, and of the GPU if NVML finds one, can be measured."""
    with open_nvml_sensor() as of_gpu, open_gpu() as gpu:
        for what, sensor in (("energy of CPUs", find_rapl()), ("energy of the GPU", of_gpu))[: 1 if gpu is None else 2]:
            if isinstance(sensor, NoSensor):
                yield _lacks(what, f"joules per image in bench: {sensor.reason}", sensor.remedy)
            else:
                yield Capability(what=what, found=f"{sensor.name}, updated every {1000 * sensor.period_s:g} ms")


def _memory() -> Capability:
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return Capability(what="memory", found=f"{size:.1f} GiB")


def _cpus() -> Capability:
    quota = cpu_quota()
    granted = "" if quota is None else f", {quota:g} by quota"
    waiting = wait_policy(os.environ) or "the runtime's default"
    found = f"{affinity_cpus()} of {os.cpu_count()}{granted}, {platform.machine()}, OpenMP threads wait: {waiting}"
    return Capability(what="CPUs", found=found)


def find_capabilities() -> list[Capability]:
    """List everything that the commands may need, found or not."""
    return [
        Capability(what="corp-deploy", found=__version__),
        _python(),
        *map(_package, _REQUIRED),
        *(_package(name) for name in ("onnxruntime", "onnxruntime-gpu") if _version(name)),
        _providers(),
        *_vnni(),
        _package("openvino", disables="bench, verify and release targets in OpenVINO", extra="openvino"),
        _package("onnxruntime-genai", disables="export-decoder", extra="genai"),
        _package("model-signing", disables="release --sign and check --verify", extra="sign"),
        _package("tensorrt", disables="engines for data-centre GPUs", extra="gpu"),
        _package("tensorrt-rtx", disables="engines for RTX GPUs, and the fusion audit without a GPU", extra="rtx"),
        _gpu(),
        _driver(),
        _memory(),
        _cpus(),
        *_energy(),
        Capability(what="free disk", found=f"{shutil.disk_usage(Path.cwd()).free / 2**30:.1f} GiB"),
    ]


def build_record() -> dict[str, Any]:
    """Return the findings as JSON values."""
    return {
        "kind": "corp-deploy/doctor",
        "version": 1,
        "findings": [asdict(finding) for finding in find_capabilities()],
    }
