"""A sweep by several processes of this machine: torchrun's, a trial at a time each, started again where one dies."""

import os
import subprocess
import sys
from collections.abc import Sequence

from ground.errors import Missing

RESTARTS = 3
ALONE = ("jobs", "bench", "precision", "threads", "device", "time_limit", "half_width", "min_agreement")
"""Options of the process that starts the others, and of timing, which it does itself when they are done."""


def run_jobs(words: Sequence[str], jobs: int) -> None:
    """Runs the command by so many processes. Raises Missing when they did not come to an end."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(jobs))
    threads = str(max((os.cpu_count() or jobs) // jobs, 1))
    done = subprocess.run(
        [sys.executable, *torchrun, "--max-restarts", str(RESTARTS), "-m", "corp_deploy", *words, "--quiet"],
        env={"OMP_NUM_THREADS": threads, **os.environ},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        raise Missing(
            f"the {jobs} processes of this sweep ended early ({done.returncode}), each after {RESTARTS} restarts; what "
            "they finished is kept: look at their messages, then the same command goes on"
        )
