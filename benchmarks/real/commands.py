"""The tool's own commands, each in a process of its own that is timed in CPU seconds."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import click


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one command took: CPU and wall seconds, and the most memory it held, in MB."""

    cpu_s: float
    wall_s: float
    peak_mb: float


def run(words: Sequence[str], threads: int) -> Cost:
    """Raises ClickException with what the command said where it failed."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "corp_deploy", *words, "--quiet"]
    started = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    with process.stdout as pipe:
        said = pipe.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise click.ClickException(f"corp-deploy {' '.join(words)} ended with {process.returncode}: {said.strip()}")
    wall_s = time.perf_counter() - started
    return Cost(cpu_s=usage.ru_utime + usage.ru_stime, wall_s=wall_s, peak_mb=usage.ru_maxrss / 1e3)
