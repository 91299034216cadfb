"""Processes killed by SIGKILL at a chosen file operation, one fork each; run as a program, so that no test forks.

A point is the number of a file operation inside one directory: opening, renaming, removing, making a folder, or a
mark that a stage sets in the middle of a file.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from corp_deploy.release.incremental import STATE, Stage, StageDirs, locked_release, run_stages

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.chmod", "mid-file")


def operations(root: Path, reached: Callable[[int], None]) -> None:
    """Have `reached` hear the number of each file operation below `root` in this process, from now on."""
    count, within = 0, str(root)

    def hook(event: str, words: tuple[object, ...]) -> None:
        nonlocal count
        if event in EVENTS and words and str(words[0]).startswith(within):
            count += 1
            reached(count)

    sys.addaudithook(hook)


def killed_at(point: int, root: Path, work: Callable[[], object]) -> bool:
    """Do the work in a forked process that is killed at the point; whether it came that far."""
    child = os.fork()
    if child == 0:
        operations(root, lambda count: os.kill(os.getpid(), signal.SIGKILL) if count == point else None)
        work()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or status == 0, status
    return os.WIFSIGNALED(status)


def tree(root: Path) -> dict[str, bytes]:
    """Every file but the state that is not a stamp."""
    hidden = ("lock", "digests.json")
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name not in hidden
    }


def _writer(name: str, reads: tuple[str, ...], outputs: tuple[str, ...]) -> Callable[[StageDirs], None]:
    def write(place: StageDirs) -> None:
        seen = b"".join((place.root / each).read_bytes() for each in reads)
        for each in outputs:
            path = place.into / each
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.write(f"{name} {each} ".encode())
                file.flush()
                sys.audit("mid-file", str(path))
                file.write(seen[-64:] * 2)

    return write


def fake_stages(outside: Path) -> list[Stage]:
    """Four stages in the shape of a release: a source, two that follow, one that reads them all."""
    shapes: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
        ("one", (), ("one.bin", "folder/one.bin")),
        ("two", ("one.bin",), ("two.bin",)),
        ("three", ("one.bin", "folder/one.bin"), ("folder/three.bin",)),
        ("last", ("two.bin", "folder/three.bin"), ("manifest.txt",)),
    ]
    return [
        Stage(
            name=name, outputs=outputs, run=_writer(name, reads, outputs), reads=reads,
            outside={"source": outside} if name == "one" else {}, settings={"number": index},
        )
        for index, (name, reads, outputs) in enumerate(shapes)
    ]  # fmt: skip


def run_fake(root: Path, outside: Path) -> None:
    with locked_release(root):
        stages = fake_stages(outside)
        run_stages(stages, root, starts=lambda stage, why: None, every=stages)


def kill_everywhere(home: Path) -> Iterator[tuple[int, bool]]:
    """A fresh run killed at its first, second, ... operation, each resumed; ends when a run is no longer reached.

    Yields the point and whether the resumed tree equals the one of an undisturbed run.
    """
    outside = home / "source.txt"
    outside.write_text("source")
    run_fake(home / "whole", outside)
    expected = tree(home / "whole")
    point = 1
    while True:
        root = home / f"killed-{point}"
        root.mkdir()
        if not killed_at(point, root, lambda root=root: run_fake(root, outside)):  # type: ignore[misc]
            return
        run_fake(root, outside)
        yield point, tree(root) == expected
        point += 1


def _release_program(recipe_path: Path, root: Path, points: list[int]) -> None:
    """A real release, killed and resumed once for each point; says how many stages stood after each kill."""
    import torch

    from corp_deploy.release import release_steps, steps
    from corp_deploy.release.baseline import Baseline
    from corp_deploy.release.recipe_file import load_recipe
    from corp_deploy.release.run import Job
    from export.graph.to_onnx import onnx_from_model
    from ground.ports import LOGITS, image_port
    from tests.export_vit import Vit
    from tests.tracing import warm_up_at_first_export

    assert release_steps is not steps
    torch.set_num_threads(1)
    # What tracing imports takes seconds, and every fork that comes as far as a graph would import it anew.
    warm_up_at_first_export()
    onnx_from_model(Vit(depth=1), [image_port((3, 32, 32))], [LOGITS], precision="fp32", metadata={})
    job = Job(recipe=load_recipe(recipe_path), path=recipe_path, root=root, baseline=Baseline())

    def make() -> None:
        with locked_release(root):
            job.release()

    for point in points:
        ended = "killed" if killed_at(point, root, make) else "ended"
        print(ended, len(list((root / STATE).glob("[a-z]*.json"))), flush=True)
    killed_at(0, root, make)


if __name__ == "__main__":
    if sys.argv[1] == "fake":
        for at, same in kill_everywhere(Path(sys.argv[2])):
            print(at, "same" if same else "different")
    else:
        _release_program(Path(sys.argv[2]), Path(sys.argv[3]), [int(word) for word in sys.argv[4:]])
