"""The older bench.json that rules compare with, and how a record that passes becomes it. Imports no torch."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from ground.errors import BadInput
from ground.files import replacing, sha256_of_file
from perf.record.runs import load_bench


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Where the older record is; `init` lets a record that passes become it where there is none."""

    path: Path | None = None
    init: bool = False

    def __post_init__(self) -> None:
        if self.init and self.path is None:
            raise BadInput("--init-baseline needs --baseline FILE, which is where the baseline goes")

    def require(self) -> None:
        """Raise BadInput when a baseline is named that is no bench record, or is not there and may not be started."""
        if self.path is not None and not self.path.is_file() and not self.init:
            raise BadInput(
                f"{self.path}: no such baseline; give an older bench.json, or --init-baseline to start with this one"
            )
        if self.path is not None and self.path.is_file():
            load_bench(self.path)

    def older(self, own: Path | None) -> Path | None:
        """The record to judge by; None when there is none yet, or when it is `own`, the very record that started it."""
        if self.path is None or not self.path.is_file():
            return None
        same = self.init and own is not None and own.is_file() and sha256_of_file(self.path) == sha256_of_file(own)
        return None if same else self.path

    def start(self, own: Path, *, exit_code: int) -> bool:
        """Make a record that was judged the baseline; whether it is now. Only one that passes, where there is none."""
        if self.path is None or not self.init or self.path.exists() or exit_code != 0:
            return False
        with replacing(self.path) as temporary:
            shutil.copyfile(own, temporary)
        return True
