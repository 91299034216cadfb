"""Presets that are another one with options that they imply, which options of the same names override. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from corp_deploy.reduction.method import PRESETS

Effort = Literal["quick", "standard", "thorough"]
"""What is tried beside one pass over the moments: nothing; the closed loop; also widths in it, and a polish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """The preset of the method, and options of `reduce` by name."""

    method: str
    implied: Mapping[str, Any]

    @property
    def describe(self) -> str:
        """As they would be typed."""
        options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.implied.items())
        return f"--preset {self.method} {options}"


COMPOSITIONS: Mapping[str, Composition] = MappingProxyType(
    {"thorough": Composition(method="best", implied={"closed_loop": "asymmetric", "polish": "model"})}
)
NAMES = (*PRESETS, *COMPOSITIONS)


def method_of(preset: str) -> str:
    """The preset of the method that a name stands for."""
    return COMPOSITIONS[preset].method if preset in COMPOSITIONS else preset


def with_implied(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `reduce` with what their preset implies where they say nothing (None) themselves."""
    preset = options.get("preset")
    implied = COMPOSITIONS[str(preset)].implied if preset in COMPOSITIONS else {}
    return {**options, **{name: value for name, value in implied.items() if options.get(name) is None}}
