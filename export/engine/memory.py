"""What an engine needs of a GPU's memory: its weights, and the most that activations take at once, profile by profile.

The builder says both while it works, on a machine without a GPU too (TensorRT-RTX 1.7); a loaded engine is asked
itself. Buffers of inputs and outputs are the caller's and are not counted.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ground.records import Natural

from .options import BatchProfile

_WEIGHTS = re.compile(r"Total Weights Memory: (\d+) bytes")
_ACTIVATIONS = re.compile(r"Total Activation Memory: (\d+) bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes. `activations` stand in the order of the engine's profiles, one of a fixed batch; each holds for the
    profile's largest batch, as a context of it is given that much at any. None is what nobody tells, `reason` why.
    """

    weights_bytes: Natural | None = None
    activations_bytes: tuple[Natural, ...] | None = None
    reason: str | None = None

    def by_profile(self, profiles: Sequence[BatchProfile]) -> dict[str, int]:
        """Weights and activations together, by profile; empty where one of both is unknown."""
        if self.weights_bytes is None or self.activations_bytes is None:
            return {}
        pairs = zip(profiles, self.activations_bytes, strict=True)
        return {str(profile): self.weights_bytes + size for profile, size in pairs}


def memory_from_log(text: str, profiles: int) -> EngineMemory:
    """From what a builder logged for `profiles` profiles (1 of a fixed batch)."""
    weights, activations = _WEIGHTS.findall(text), tuple(map(int, _ACTIVATIONS.findall(text)))
    unknown = [] if weights else ["the builder doesn't tell the weights' memory"]
    if len(activations) != profiles:
        unknown.append(f"the builder tells the activations' memory of {len(activations)} profiles, not of {profiles}")
    return EngineMemory(
        weights_bytes=int(weights[-1]) if weights else None,
        activations_bytes=activations if len(activations) == profiles else None,
        reason="; ".join(unknown) or None,
    )


def memory_of_engine(engine: Any, logged: EngineMemory, profiles: int) -> EngineMemory:
    """As a loaded engine tells its activations; its weights as the builder `logged`."""
    sizes = tuple(int(engine.get_device_memory_size_for_profile_v2(index)) for index in range(profiles))
    unknown = None if logged.weights_bytes is not None else "the builder doesn't tell the weights' memory"
    return EngineMemory(weights_bytes=logged.weights_bytes, activations_bytes=sizes, reason=unknown)
