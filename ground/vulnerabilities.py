"""Published vulnerabilities of the libraries and the server that this tool uses, with the versions that fix them.

Only those that untrusted files can exploit: models, arrays, pictures, archives, engines and repositories.
"""

from collections.abc import Sequence
from dataclasses import dataclass


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (11, 4, 0, 106) for '11.4.0.106'."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


@dataclass(frozen=True, slots=True)
class Vulnerability:
    """A vulnerability of the versions of `package` from `introduced_in` to below `fixed_in`.

    `impact` says what a file or a caller can do; `identifiers` are CVEs or issues.
    """

    package: str
    fixed_in: str
    impact: str
    identifiers: tuple[str, ...]
    introduced_in: str = "0"

    def affects(self, version: str) -> bool:
        return version_numbers(self.introduced_in) <= version_numbers(version) < version_numbers(self.fixed_in)


def _vulnerability(package: str, fixed_in: str, impact: str, *identifiers: str, since: str = "0") -> Vulnerability:
    return Vulnerability(package, fixed_in, impact, identifiers, since)


LIBRARIES = (
    _vulnerability("torch", "2.6", "a .pth read with weights_only runs code", "CVE-2025-32434"),
    _vulnerability("torch", "2.10", "a .pth read with weights_only corrupts memory", "CVE-2026-24747"),
    _vulnerability("numpy", "1.16.3", "arrays of objects are unpickled", "CVE-2019-6446"),
    _vulnerability("onnx", "1.13", "weights outside lie anywhere", "CVE-2022-25882"),
    _vulnerability("onnx", "1.16", "weights outside lie anywhere", "CVE-2024-27318"),
    _vulnerability("onnx", "1.16.2", "an archive of a hub unpacks anywhere", "CVE-2024-5187"),
    _vulnerability("onnx", "1.18", "weights are written anywhere", "CVE-2025-51480"),
    _vulnerability(
        "onnx", "1.21", "weights outside lie behind links, or set attributes",
        "CVE-2026-27489", "CVE-2026-28500", "CVE-2026-34445", "CVE-2026-34446", "CVE-2026-34447", "CVE-2026-49114",
    ),
    _vulnerability("onnx", "1.22", "weights outside are exchanged before they are opened",
                   "onnx/onnx#7790", "onnx/onnx#7949"),
    _vulnerability("onnxruntime", "1.24.1", "weights outside lie anywhere", "microsoft/onnxruntime#26776"),
    _vulnerability("onnxruntime-gpu", "1.24.1", "weights outside lie anywhere", "microsoft/onnxruntime#26776"),
    _vulnerability("pillow", "12.2", "pictures corrupt memory", "CVE-2026-25990", "CVE-2026-40192", "CVE-2026-42311"),
    _vulnerability("tensorrt", "10.16.1", "a plan runs code", "CVE-2026-24188"),
    _vulnerability(
        "tensorrt", "11.0", "a plan runs code",
        "CVE-2026-24227", "CVE-2026-24238", "CVE-2026-24268", "CVE-2026-24272",
    ),
    _vulnerability("python", "3.13.4", "an archive unpacks anywhere", "CVE-2025-4138", "CVE-2025-4330", "CVE-2025-4517",
          since="3.13"),
    _vulnerability("python", "3.13.6", "a tar file is read without end", "CVE-2025-8194", since="3.13"),
    _vulnerability("python", "3.13.16", "an archive unpacks anywhere", "CVE-2026-82049", since="3.13"),
)  # fmt: skip
# Versions are releases of the container, such as 26.07.
SERVER = (
    _vulnerability("tritonserver", "24.04", "its log is written anywhere", "CVE-2024-0087"),
    _vulnerability("tritonserver", "25.07", "the Python backend's memory is read and written", "CVE-2025-23319"),
    _vulnerability("tritonserver", "25.08", "a model's name runs code", "CVE-2025-23316"),
    _vulnerability("tritonserver", "26.02", "a config harms it", "CVE-2026-24147"),
    _vulnerability(
        "tritonserver", "26.03", "it is asked without authentication",
        "CVE-2026-24207", "CVE-2026-24208", "CVE-2026-24209", "CVE-2026-47487",
    ),
    _vulnerability(
        "tritonserver", "26.06", "paths of a repository and of an environment lead anywhere",
        "CVE-2026-47606", "CVE-2026-47627", "CVE-2026-47630",
    ),
    _vulnerability("tritonserver", "26.07", "it lacks the newest published fix", "CVE-2026-16497"),
)  # fmt: skip


def find_vulnerabilities(
    package: str, version: str, vulnerabilities: Sequence[Vulnerability] = LIBRARIES
) -> tuple[Vulnerability, ...]:
    return tuple(each for each in vulnerabilities if each.package == package and each.affects(version))


def describe_vulnerabilities(vulnerabilities: Sequence[Vulnerability]) -> str:
    """Return the impact of each with its identifiers, as one line."""
    return "; ".join(f"{each.impact} ({', '.join(each.identifiers)})" for each in vulnerabilities)
