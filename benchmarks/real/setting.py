"""What the rows of a record have in common."""

from typing import Any

from benchmarks.real.subject import Calibration, Subject
from corp_deploy.machine import versions
from perf.timing.watch import cpu_name


def setting(subject: Subject, calibration: Calibration) -> dict[str, Any]:
    """What all rows share; rows of another setting never stand in the same record."""
    return {
        "model": "DINOv2 ViT-S/14, 224 pixels",
        "cpu": cpu_name(),
        "threads": subject.threads,
        "versions": versions(),
        "calibration": calibration.as_json(),
        "held_out": {"crops": len(subject.held_out), "photographs": subject.photographs},
        "dense_macs": subject.macs,
    }
