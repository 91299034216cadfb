"""The record that lies beside every engine: what it was made from, by what, and what it holds."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from export.graph.ports import GraphPort
from ground.errors import BadInput
from ground.files import object_from_text
from ground.ports import Role

from .options import BatchProfile

VERSION = 1
KIND = "engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """Sizes in bytes, time in seconds, shares in [0, 1]; None where the backend does not say.

    `roles` holds what outputs are for that are not logits, by their names.
    `precision` is what the weights are (fp32, fp16, mixed), not what somebody calls them. `kernels` and `kernel_kinds`
    count over all profiles; with several TensorRT-RTX targets in one plan the builder lists one of them.
    """

    backend: str
    library_version: str
    command: str
    onnx_sha256: str
    onnx_bytes: int
    plan_sha256: str
    plan_bytes: int
    precision: str
    half_weight_share: float
    half_kernel_share: float | None
    targets: tuple[str, ...]
    gpu: str | None
    profiles: tuple[str, ...]
    inputs: tuple[GraphPort, ...]
    outputs: tuple[GraphPort, ...]
    kernels: int | None
    kernel_kinds: Mapping[str, int]
    attention_sites: tuple[str, ...]
    fused_attention_sites: tuple[str, ...] | None
    build_seconds: float
    options: Mapping[str, str | int | float | bool]
    roles: Mapping[str, Role] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("onnx_sha256", "plan_sha256"):
            if len(getattr(self, name)) != 64:
                raise BadInput(f"engine record: {name} must have 64 hex digits, got {getattr(self, name)!r}")
        if not 0.0 <= self.half_weight_share <= 1.0 or self.plan_bytes < 1 or self.build_seconds < 0.0:
            raise BadInput(f"engine record: impossible share, size or time in {self}")

    @property
    def fused_attention(self) -> int | None:
        """How many attention sites run as one fused kernel."""
        return None if self.fused_attention_sites is None else len(self.fused_attention_sites)

    def to_json(self) -> str:
        """The record as it is written beside the plan."""
        content = {"version": VERSION, "kind": KIND, **asdict(self), "fused_attention": self.fused_attention}
        return json.dumps(content, indent=2, sort_keys=False) + "\n"


def record_path(plan_path: Path) -> Path:
    """`model.plan` -> `model.plan.json`."""
    return plan_path.with_name(plan_path.name + ".json")


def _text(value: object) -> bool:
    return isinstance(value, str)


def _digest(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _whole(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value < 1 << 63


def _share(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1  # type: ignore[operator]


def _seconds(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _profiles(value: object) -> bool:
    try:
        return isinstance(value, list) and all(_text(each) and BatchProfile.from_text(each) for each in value)
    except BadInput:
        return False


def _ports(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_port, value))


def _is_port(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"name", "dtype", "shape"}
        and _text(value["name"])
        and _text(value["dtype"])
        and isinstance(value["shape"], list)
        and bool(value["shape"])
        and all(_text(size) or _whole(size, 1) for size in value["shape"])
    )


def _or_none(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or check(value)


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("backend", "library_version", "command", "precision"), _text),
    **dict.fromkeys(("onnx_sha256", "plan_sha256"), _digest),
    **dict.fromkeys(("onnx_bytes", "plan_bytes"), lambda value: _whole(value, 1)),
    **dict.fromkeys(("inputs", "outputs"), _ports),
    **dict.fromkeys(("targets", "attention_sites"), _texts),
    "profiles": _profiles,
    "half_weight_share": _share,
    "half_kernel_share": _or_none(_share),
    "build_seconds": _seconds,
    "kernel_kinds": lambda value: isinstance(value, dict) and all(map(_whole, value.values())),
    "options": lambda value: (
        isinstance(value, dict) and all(isinstance(each, str | int | float) for each in value.values())
    ),
    "roles": lambda value: isinstance(value, dict) and all(each in get_args(Role) for each in value.values()),
    "fused_attention_sites": _or_none(_texts),
    "gpu": _or_none(_text),
    "kernels": _or_none(_whole),
}


def record_from_json(text: str, where: str = "engine record") -> EngineRecord:
    """Reads `EngineRecord.to_json`; BadInput for anything else."""
    content = {"roles": {}, **object_from_text(text, where=where)}  # records of classifiers need not name any
    if content.get("kind") != KIND or content.get("version") != VERSION:
        raise BadInput(f"{where}: expected an object of kind {KIND!r} and version {VERSION}")
    names = {entry.name for entry in fields(EngineRecord)}
    absent = sorted(names - content.keys())
    if absent:
        raise BadInput(f"{where}: {', '.join(absent)} is missing")
    bad = sorted(name for name, check in _CHECKS.items() if not check(content[name]))
    if bad:
        raise BadInput(f"{where}: {', '.join(bad)} can't be that of an engine; build it again")
    values: dict[str, Any] = {name: content[name] for name in names}
    for name in ("inputs", "outputs"):
        values[name] = tuple(GraphPort(**{**port, "shape": tuple(port["shape"])}) for port in values[name])
    for name in ("targets", "profiles", "attention_sites", "fused_attention_sites"):
        values[name] = None if values[name] is None else tuple(values[name])
    return EngineRecord(**values)


def precision_of(half_weight_share: float) -> str:
    """What a graph is by its weights."""
    return {0.0: "fp32", 1.0: "fp16"}.get(half_weight_share, "mixed")


def sha256_of(content: bytes) -> str:
    """64 hex digits."""
    return hashlib.sha256(content).hexdigest()
