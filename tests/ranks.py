"""Several ranks as torchrun would start them: one process imports what they need, then forks each; no test forks.

    python -m tests.ranks tests.test_calib_calibrate 2 WORDS...

calls that module's `one_of_several`, given the words, in each of two ranks.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def exits_of(module: str, size: int, *words: object) -> list[tuple[int, str]]:
    """Exit code and output of each rank; the code is negative where a signal ended it."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(size)}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.ranks", module, str(size), *map(str, words)]
    done = subprocess.run(
        command, env=os.environ | common, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return [(code, text) for code, text in json.loads(done.stdout)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _forked(rank: int, work: Callable[..., int], words: tuple[str, ...], output: Path) -> int:
    """The process's number; in it the work is done and nothing after that."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = work(*words)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _program(module: str, size: str, *words: str) -> None:
    torch.set_num_threads(1)
    work = importlib.import_module(module).one_of_several
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(int(size))]
        children = [_forked(rank, work, words, output) for rank, output in enumerate(outputs)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        exits = [(code, output.read_text()) for code, output in zip(codes, outputs, strict=True)]
    sys.stdout.write(json.dumps(exits))


if __name__ == "__main__":
    _program(*sys.argv[1:])
