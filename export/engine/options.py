"""The options of a build, and those that a backend refuses, with reasons."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from ground.errors import BadInput

LARGEST_BATCH = 65_536
_PROFILE = re.compile(r"[0-9]{1,9}(?::[0-9]{1,9}:[0-9]{1,9})?")
RTX_TARGETS = ("75", "80", "86", "89", "120", "121", "portable")
BACKENDS = ("tensorrt", "tensorrt-rtx")
# Levels of compatibility with other hardware than the one that a plan is built for, by backend.
COMPATIBILITIES = {"tensorrt": ("ampere-plus", "same-compute-capability"), "tensorrt-rtx": ("portable", "targets")}
# Targets on which a portable plan of TensorRT-RTX runs, each of which could have its own plan.
PORTABLE_TARGETS = ("80", "86", "89", "120")
# Options that a backend can't honour, with its reason.
REFUSALS = {
    "tensorrt": {"sms": "TensorRT builds for the GPU it runs on"},
    "tensorrt-rtx": {
        "timing_cache": "TensorRT-RTX picks kernels on the target machine and has no timing cache",
        "optimization_level": "TensorRT-RTX builds the same plan at every level",
        "version_compatible": "TensorRT-RTX plans run only with the version that built them; rebuild for each version",
        "sparse": "TensorRT-RTX builds the same plan with and without it, byte for byte",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProfile:
    smallest: int
    tuned: int
    largest: int

    def __post_init__(self) -> None:
        if not 1 <= self.smallest <= self.tuned <= self.largest <= LARGEST_BATCH:
            raise BadInput(f"a batch profile needs 1 <= min <= opt <= max <= {LARGEST_BATCH}, got {self}")

    def __str__(self) -> str:
        return f"{self.smallest}:{self.tuned}:{self.largest}"

    @staticmethod
    def from_text(text: str) -> "BatchProfile":
        """Parse '1:8:64', or '8' for one fixed size."""
        if not _PROFILE.fullmatch(text):
            raise BadInput(f"batch {text[:100]!r} is not MIN:OPT:MAX, such as 1:8:64, nor one number")
        parts = text.split(":")
        sizes = [int(part) for part in parts] * (3 // len(parts))
        return BatchProfile(smallest=sizes[0], tuned=sizes[1], largest=sizes[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """The options that, together with the graph, determine a plan.

    `precision` is the precision that the graph should have (None: the one in its notes). `sms` names TensorRT-RTX
    targets; none means portable, which runs on Ampere and newer. `compatibility` is one of COMPATIBILITIES, or None for
    this machine's hardware or that of `sms`. `optimization_level` is 0 to 5. `command` is stored in the record and
    shown when this machine can't build.
    """

    backend: str
    precision: str | None = None
    profiles: tuple[BatchProfile, ...] = ()
    sms: tuple[str, ...] = ()
    timing_cache: Path | None = None
    optimization_level: int | None = None
    workspace_bytes: int | None = None
    version_compatible: bool = False
    sparse: bool = False
    compatibility: str | None = None
    command: str = ""

    def __post_init__(self) -> None:
        assert self.backend in BACKENDS, self.backend
        for name, reason in REFUSALS[self.backend].items():
            if getattr(self, name) not in (None, False, ()):
                other = BACKENDS[1 - BACKENDS.index(self.backend)]
                raise BadInput(f"{name.replace('_', ' ')}: {reason}; leave it out or use the backend {other}")
        unknown = [sm for sm in self.sms if sm not in RTX_TARGETS]
        if unknown:
            raise BadInput(f"--sm {unknown[0]!r} is no target of TensorRT-RTX; choose from {', '.join(RTX_TARGETS)}")
        if len(set(self.sms)) < len(self.sms) or ("portable" in self.sms and len(self.sms) > 1):
            raise BadInput(f"--sm takes each target once, and portable alone, got {' '.join(self.sms)}")
        if self.compatibility == "portable" and self.sms:
            raise BadInput(
                f"compatibility portable runs on every target from SM80 on, and --sm asks for {', '.join(self.sms)}; "
                "leave --sm out, or choose compatibility targets"
            )
        if self.compatibility == "targets" and len(self.sms) < 2:
            raise BadInput("compatibility targets needs two targets or more, such as --sm 86 --sm 89")

    @property
    def exact(self) -> "dict[str, BuildOptions]":
        """Options by target for plans of one GPU each, to compare a compatible plan with; empty for any other plan."""
        alone = replace(self, compatibility=None, version_compatible=False)
        if self.compatibility is None:
            return {}
        if self.backend == "tensorrt":
            return {"exact": alone}
        targets = self.sms if self.compatibility == "targets" else PORTABLE_TARGETS
        return {f"sm{sm}": replace(alone, sms=(sm,)) for sm in targets}
