"""Commands whose files fail, that get signals or run out of memory: the old or the new is there whole, and a second run
gives the same bytes.
"""

import ctypes
import errno
import importlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import Result

from calib.collect import Collector
from calib.inputs import Inputs, input_count
from corp_deploy.store.checkpoint import load_checkpoint, save
from export.triton import repository
from export.triton.config import read_expected
from export.triton.variants import Package
from ground.errors import is_out_of_memory, os_error_from
from ground.signals import Terminated, describe_interruption, raising_on_signals
from ground.transaction import FORMER, install_files, replacing_files, roll_back_interrupted
from perf.record.runs import save_bench
from tests import tiny
from tests.command import run as run_command
from tests.export_served import write_onnx
from tests.histories import bench_of_release
from tests.recipes import recipe
from tests.refusals import rejects

ROOT = Path(__file__).parents[1]
IMAGES = {"images": "images.npy"}
RECIPE = recipe({"calibration": IMAGES, "held_out": IMAGES, "reduce": {"mlp": 0.5}})


# Files that go together


def names(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def pair(folder: Path, text: str) -> None:
    with replacing_files(folder, ("a.txt", "sub/b.txt"), removed=["c.txt"]) as (a, b):
        a.write_text(text)
        b.write_text(text)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    (tmp_path / "d" / "sub").mkdir(parents=True)
    for name in ("a.txt", "sub/b.txt", "c.txt", "other.txt"):
        (tmp_path / "d" / name).write_text("old")
    return tmp_path / "d"


def fail_at(monkeypatch: pytest.MonkeyPatch, point: int, *, ever: bool, kind: type[BaseException] = OSError) -> None:
    """The `point`th rename fails."""
    count, replace = 0, Path.replace

    def failing(path: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count == point or (ever and count > point):
            raise kind(errno.EIO, "the disk")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", failing)
    monkeypatch.setattr(Path, "rename", failing)


@pytest.mark.parametrize("point", range(1, 5))
@pytest.mark.parametrize("ever", [False, True])
def test_transaction_changes_all_files_or_none(
    old: Path, monkeypatch: pytest.MonkeyPatch, point: int, ever: bool
) -> None:
    before = names(old)
    with monkeypatch.context() as disturbed:
        fail_at(disturbed, point, ever=ever)
        with pytest.raises(OSError, match="the disk"):
            pair(old, "new")
    roll_back_interrupted(old)
    assert names(old) == before
    assert sorted(path.name for path in old.iterdir()) == ["a.txt", "c.txt", "other.txt", "sub"]
    pair(old, "new")
    assert names(old) == {"a.txt": "new", "sub/b.txt": "new", "other.txt": "old"}


class Killed(BaseException):
    """Nothing is done after it."""


@pytest.mark.parametrize(("point", "where"), [(2, "nothing moved"), (3, "one moved"), (4, "all moved")])
def test_leftovers_of_a_killed_process_are_rolled_back(
    old: Path, monkeypatch: pytest.MonkeyPatch, point: int, where: str
) -> None:
    before = names(old)
    with monkeypatch.context() as disturbed:
        fail_at(disturbed, point, ever=True, kind=Killed)
        with pytest.raises(Killed):
            pair(old, "new")
    assert (old / FORMER).is_dir(), where
    if point == 3:
        assert names(old) | before != before, where
        pair(old, "newer")
        assert names(old) == {"a.txt": "newer", "sub/b.txt": "newer", "other.txt": "old"}
    else:
        roll_back_interrupted(old)
        assert names(old) == before


def test_empty_transaction_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, 3, ever=False)
    with pytest.raises(OSError, match="the disk"):
        pair(tmp_path / "new" / "deeper", "new")
    assert list(tmp_path.iterdir()) == []


def test_folders_move_only_to_free_places(tmp_path: Path) -> None:
    (tmp_path / "made" / "1").mkdir(parents=True)
    (tmp_path / "made" / "1" / "x").write_text("new")
    (tmp_path / "there" / "m" / "1").mkdir(parents=True)
    rejects("in the way", install_files, tmp_path / "there", {"m/1": tmp_path / "made" / "1"})
    install_files(tmp_path / "there", {"n/1": tmp_path / "made" / "1"})
    assert names(tmp_path / "there") == {"n/1/x": "new"}


def test_concurrent_packages_keep_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, read, both = write_onnx(tmp_path / "model.onnx"), read_expected, threading.Barrier(2)

    def slow(path: Path) -> Any:
        expected = read(path)
        with suppress(threading.BrokenBarrierError):  # where both are here at once, each lacks the other's
            both.wait(timeout=0.2)
        return expected

    monkeypatch.setattr(repository, "read_expected", slow)
    packages = [Package(name="vit", version=version, onnx=graph) for version in (1, 2)]
    threads = [threading.Thread(target=repository.write_repository, args=(each, tmp_path / "r")) for each in packages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {version for each in read(tmp_path / "r" / "expected.json").values() for version in each} == {"1", "2"}


def test_model_is_read_as_before_a_killed_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tiny.checkpoint(), tmp_path / "m")
    before = (tmp_path / "m" / "model.safetensors").read_bytes()
    with monkeypatch.context() as disturbed:
        fail_at(disturbed, 4, ever=True, kind=Killed)
        with pytest.raises(Killed):
            save(tiny.checkpoint(seed=1), tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").read_bytes() != before
    load_checkpoint(tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == before


# A process that is killed at its Nth rename, or whose files may not grow beyond a size, as on a full disk.
DISTURBED = """
import os, resource, signal, sys
from corp_deploy.cli import main
kind, number, renames = sys.argv.pop(1), int(sys.argv.pop(1)), 0
def hook(event, words):
    global renames
    if event != "os.rename":
        return
    renames += 1
    if renames == number:
        os.kill(os.getpid(), signal.SIGKILL)
if kind == "killed":
    sys.addaudithook(hook)
else:
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))
main()
"""


@pytest.mark.slow("process")
@pytest.mark.parametrize(
    ("kind", "number", "code"), [*(("killed", number, -9) for number in (1, 2, 3, 4)), ("full", 2000, 4)]
)
def test_killed_or_full_disk_process_leaves_the_old_or_the_new_file(
    home: Path, tmp_path: Path, kind: str, number: int, code: int
) -> None:
    calibrate(home, tmp_path / "m.safetensors")
    words = ["reduce", "--model", home / "dense", "--moments", tmp_path / "m.safetensors", "--quiet"]
    whole = {}
    for share in (0.3, 0.6):
        run_command(*words, "--mlp", share, "-o", tmp_path / str(share))
        whole[share] = (tmp_path / str(share) / "model.safetensors").read_bytes()
    shutil.copytree(tmp_path / "0.3", tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-c", DISTURBED, kind, str(number), *map(str, words), "--mlp", "0.6", "-o", tmp_path / "out"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == code, done
    load_checkpoint(tmp_path / "out")  # its weights have the digest of its config.json
    assert (tmp_path / "out" / "model.safetensors").read_bytes() in whole.values()
    assert run_command(*words, "--mlp", 0.6, "-o", tmp_path / "out").exit_code == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == whole[0.6]


# Signals, memory, the system's errors


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.written(tmp_path_factory.mktemp("faults"), 5)


def calibrate(home: Path, output: Path, *words: object) -> Result:
    return run_command("calibrate", "--model", home / "dense", "--images", home / "images.npy", "-o", output, *words)


@pytest.fixture(autouse=True)
def _default_handlers() -> Iterator[None]:
    before = {each: signal.signal(each, signal.SIG_DFL) for each in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_terminated_command_cleans_up(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: os.kill(os.getpid(), number))
    done = calibrate(home, tmp_path / "m.safetensors")
    assert done.exit_code == 128 + number
    assert f"ended by {number.name}; finished files are whole" in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) is signal.SIG_DFL


def test_foreign_signal_handlers_are_kept() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with raising_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
    assert heard == [signal.SIGTERM]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pytest.raises(Terminated) as ended, raising_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert describe_interruption(ended.value)[1] == 143


def test_signal_after_the_end_is_handled() -> None:
    def stopping() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None

    with pytest.raises(Terminated) as ended, raising_on_signals():
        stopping()
    assert describe_interruption(ended.value)[1] == 143
    with pytest.raises(KeyboardInterrupt) as interrupted, raising_on_signals():
        raise KeyboardInterrupt
    assert not isinstance(interrupted.value, Terminated)


ENDED = pytest.mark.parametrize(("number", "kind"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])


@ENDED
def test_signal_lost_in_native_code_is_reported(number: signal.Signals, kind: type[BaseException]) -> None:
    def losing(error: Exception) -> None:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        raise error

    with pytest.raises(kind), raising_on_signals():
        losing(ValueError("could not determine the shape of object type 'torch.storage.UntypedStorage'"))
    with pytest.raises(LookupError), raising_on_signals(LookupError):
        losing(LookupError("the work is done and says how"))
    with pytest.raises(ValueError, match="its own"), raising_on_signals():
        raise ValueError("its own")


class Finalised:
    """Sends a signal as it goes."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)


def in_a_finaliser(number: int) -> None:
    goes = Finalised(number)
    del goes


def in_a_callback_of_a_weak_reference(number: int) -> None:
    watched = {number}
    watching = weakref.ref(watched, lambda _: os.kill(os.getpid(), number))
    del watched
    assert watching() is None


@ENDED
@pytest.mark.parametrize(
    "losing",
    [
        in_a_finaliser,
        in_a_callback_of_a_weak_reference,
        lambda number: ctypes.pythonapi.PyRun_SimpleString(f"import os; os.kill(os.getpid(), {number:d})".encode()),
    ],
)
def test_signal_swallowed_by_a_finaliser_is_raised_again(
    capfd: pytest.CaptureFixture[str],
    losing: Callable[[int], object],
    number: signal.Signals,
    kind: type[KeyboardInterrupt],
) -> None:
    hooks = sys.unraisablehook, sys.excepthook

    def working_on() -> None:
        losing(number)
        time.sleep(20)

    with pytest.raises(kind), raising_on_signals():
        working_on()
    assert capfd.readouterr() == ("", "")
    assert (sys.unraisablehook, sys.excepthook) == hooks


def test_signal_does_not_interrupt_a_native_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native modules run Python as they begin, and what that raises ends the process."""
    monkeypatch.syspath_prepend(tmp_path)
    module = "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(0.2)\nwhole = True\n"
    (tmp_path / "imported_meanwhile.py").write_text(module)
    imported: list[ModuleType] = []

    def working_on(rest_s: float) -> None:
        sys.modules.pop("imported_meanwhile", None)
        imported.append(importlib.import_module("imported_meanwhile"))
        time.sleep(rest_s)

    for rest_s in (20, 0):
        with pytest.raises(Terminated), raising_on_signals():
            working_on(rest_s)
    assert [each.whole for each in imported] == [True, True]


def test_second_signal_does_not_interrupt_the_cleanup() -> None:
    """Service managers send SIGHUP behind SIGTERM."""
    cleaned = []

    def ended_by_two() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)
            cleaned.append("whole")

    with pytest.raises(Terminated, match="15"), raising_on_signals():
        ended_by_two()
    assert cleaned == ["whole"]


# What an import is, and when a process with nothing imported yet is sent SIGTERM.
AT_AN_IMPORT = """
import os, signal, sys
from corp_deploy.cli import main
place = sys.argv.pop(1)
def hook(event, words):
    if event == "import" and words[0] == place:
        os.kill(os.getpid(), signal.SIGTERM)
sys.addaudithook(hook)
main()
"""


@pytest.mark.slow("process")
@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("calibrate --model dense --images images.npy -o m.safetensors --quiet", "torch.nn.modules.linear"),
        ("verify dense dense --images images.npy -o parity.json --quiet", "torch._C"),
        ("bench dense dense -o bench.json --quiet", "torch.autograd"),
        ("release recipe.toml -o out --quiet", "torch.utils.weak"),
    ],
)
def test_command_terminated_during_imports_prints_one_line(home: Path, tmp_path: Path, words: str, place: str) -> None:
    shutil.copytree(home, tmp_path / "here")
    (tmp_path / "here" / "recipe.toml").write_text(RECIPE)
    done = subprocess.run(
        [sys.executable, "-c", AT_AN_IMPORT, place, *words.split()], cwd=tmp_path / "here",
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 143, done
    assert done.stderr.strip() == "Error: ended by SIGTERM; finished files are whole, nothing half-written is left"
    assert {path.name for path in (tmp_path / "here").iterdir()} <= {"dense", "images.npy", "recipe.toml", "out"}


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_signal_during_import_of_the_command_prints_one_line(number: str, code: int) -> None:
    interrupted = AT_AN_IMPORT.replace("corp_deploy.cli", "corp_deploy.__main__").replace("SIGTERM", number)
    heard = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    done = subprocess.run(
        [sys.executable, "-c", heard + interrupted, "corp_deploy.commands.calibrate", "--version"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done
    how = "interrupted" if code == 130 else "ended by SIGTERM"
    assert done.stderr == f"Error: {how}; finished files are whole, nothing half-written is left\n"


def test_out_of_memory_retries_with_a_smaller_batch(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert calibrate(home, tmp_path / "one.safetensors", "--batch-size", 1).exit_code == 0
    add, sizes = Collector.add, []

    def small(self: Collector, inputs: Inputs) -> None:
        sizes.append(input_count(inputs))
        if input_count(inputs) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        add(self, inputs)

    monkeypatch.setattr(Collector, "add", small)
    done = calibrate(home, tmp_path / "m.safetensors", "--batch-size", 4)
    assert done.exit_code == 0, done.output
    assert sizes == [4, 2, 1, 1, 1, 1, 1]
    for size in (2, 1):
        assert f"memory ran out in a batch: begun anew with --batch-size {size}" in " ".join(done.stderr.split())
    assert (tmp_path / "m.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()

    done = calibrate(home, tmp_path / "s.safetensors", "--batch-size", 4, "--checkpoint-every", 1)
    assert done.exit_code == 0, done.output
    assert "no states are saved unless that size is given" in " ".join(done.stderr.split())
    assert (tmp_path / "s.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()


WORDED = [
    (OSError(errno.EIO, "I/O error"), errno.EIO),
    (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), errno.ENOSPC),
    (RuntimeError("open file failed, errno 24"), errno.EMFILE),
    (OSError("4096 requested and 1024 written"), errno.ENOSPC),
    (RuntimeError("os error 999999"), None),
    (RuntimeError("no such thing"), None),
    (OSError("4096 requested and 1024 read"), None),
]


@pytest.mark.parametrize(("error", "number"), WORDED, ids=str)
def test_system_errors_worded_by_libraries_are_recognised(error: Exception, number: int | None) -> None:
    said = os_error_from(error)
    assert (None if said is None else said.errno) == number


CODES = {
    errno.ENOSPC: (4, "the disk is full"), errno.EDQUOT: (4, "your share of the disk"), errno.EFBIG: (4, "ulimit -f"),
    errno.EIO: (4, "the disk failed"), errno.EMFILE: (4, "ulimit -n"), errno.ENFILE: (4, "too many files are open"),
    errno.ENOMEM: (4, "too little memory"), errno.EROFS: (2, "Read-only file system"),
    errno.EACCES: (2, "Permission denied"),
}  # fmt: skip


@pytest.mark.parametrize("number", CODES, ids=errno.errorcode.__getitem__)
def test_machine_errors_are_separated_from_wrong_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save_bench(bench_of_release(0, 2.5), tmp_path / "bench.json")

    def refused(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", refused)
    code, words = CODES[number]
    done = run_command("gate", tmp_path / "bench.json", "--fail-if", "p50@b1 > 9", "-o", tmp_path / "gate.json")
    assert (done.exit_code, words in done.stderr) == (code, True), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
    assert is_out_of_memory(OSError(number, "")) == (number == errno.ENOMEM)


LACKING = {
    "too little memory": MemoryError("Unable to allocate 38.6 GiB"),
    "a process that decodes images died": RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "),
}


@pytest.mark.parametrize("said", LACKING)
def test_machine_errors_are_not_bugs(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    def failing(self: Collector, inputs: Inputs) -> None:
        raise LACKING[said]

    monkeypatch.setattr(Collector, "add", failing)
    done = calibrate(home, tmp_path / "m.safetensors", "--batch-size", 4)
    assert (done.exit_code, said in " ".join(done.stderr.split())) == (4, True), done.stderr
    assert not (tmp_path / "m.safetensors").exists()
