"""A sweep by several processes of this machine: torchrun's, a trial at a time each, started again where one dies."""

import os
import subprocess
import sys
from collections.abc import Sequence

from ground.errors import Missing

RESTARTS = 3
LONGEST_END_S = 40.0
ALONE = ("jobs", "bench", "precision", "threads", "device", "time_limit", "half_width", "min_agreement")
"""Options of the process that starts the others, and of timing, which it does itself when they are done."""


def _end(started: "subprocess.Popen[bytes]") -> None:
    """Torchrun ends its processes where it is asked to, not where it is killed."""
    if started.poll() is None:
        started.terminate()
        try:
            started.wait(LONGEST_END_S)
        except subprocess.TimeoutExpired:
            started.kill()


def run_jobs(words: Sequence[str], jobs: int) -> None:
    """Runs the command by so many processes. Raises Missing when they did not come to an end."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(jobs))
    threads = str(max((os.cpu_count() or jobs) // jobs, 1))
    started = subprocess.Popen(
        [sys.executable, *torchrun, "--max-restarts", str(RESTARTS), "-m", "corp_deploy", *words, "--quiet"],
        env={"OMP_NUM_THREADS": threads, **os.environ},
        stdout=subprocess.DEVNULL,
    )
    try:
        code = started.wait()
    finally:  # they end with this process, where it is asked to
        _end(started)
    if code:
        raise Missing(
            f"the {jobs} processes of this sweep ended early ({code}), each after {RESTARTS} restarts; finished "
            "trials are kept: look at the messages, then run the same command again"
        )
