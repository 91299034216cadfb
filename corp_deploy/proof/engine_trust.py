"""Whether an engine may be loaded: a plan is native code in all but name, and whoever loads one runs it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from export.engine.record import EngineRecord, record_of_plan
from ground.built_engines import engine_list_path, is_built_here
from ground.errors import BadInput
from ground.files import sha256_of_file

_TRUSTED: ContextVar[bool] = ContextVar("trusted engines", default=False)


@contextmanager
def trusting_engines(trust: bool) -> Iterator[None]:
    """Allow engines that were not built here to be loaded within the block."""
    token = _TRUSTED.set(trust)
    try:
        yield
    finally:
        _TRUSTED.reset(token)


def record_of_trusted_plan(path: Path) -> EngineRecord:
    """The record of a plan that may be loaded.

    Raises BadInput for one whose bytes are not those that its record describes, and for one that was built elsewhere
    where those aren't trusted. No library of engines is asked: none of them finds out that a plan was tampered with.
    """
    record = record_of_plan(path)
    digest = sha256_of_file(path)
    if digest != record.plan_sha256:
        raise BadInput(
            f"{path}: its bytes are not those that {path.name}.json describes (sha256 {digest[:16]}..., expected "
            f"{record.plan_sha256[:16]}...); it was changed or cut off after it was built: build it again"
        )
    if not _TRUSTED.get() and not is_built_here(digest):
        raise BadInput(
            f"{path}: it was not built here ({engine_list_path()} doesn't list sha256 {digest[:16]}...), and loading "
            "an engine runs code that it may hold: (a) build it here from its graph, or (b) give --trust-engine if you "
            "trust whoever built it and how it came here"
        )
    return record
