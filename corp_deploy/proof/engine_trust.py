"""Trust in engines and packages: they can hold native code, which loading them runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from corp_deploy.spec.trusted_code import is_code_trusted
from export.engine.record import EngineRecord, record_of_plan
from ground.built_engines import engine_list_path, is_built_here
from ground.errors import BadInput
from ground.files import sha256_of_file

_TRUSTED: ContextVar[bool] = ContextVar("trusted engines", default=False)


@contextmanager
def trusting_engines(trust: bool) -> Iterator[None]:
    """Allow engines that were not built here to be loaded within the block, and refuse them if `trust` is False."""
    token = _TRUSTED.set(trust)
    try:
        yield
    finally:
        _TRUSTED.reset(token)


def are_engines_trusted() -> bool:
    return _TRUSTED.get()


def record_of_trusted_plan(path: Path) -> EngineRecord:
    """Read the record of a plan that may be loaded.

    The libraries of engines are not asked: none of them notices that a plan was tampered with. Raises BadInput if the
    plan's bytes differ from the record's digest, or it was built elsewhere and isn't trusted.
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


def require_trusted_package(path: Path) -> None:
    """Raise BadInput for a package of AOTInductor that was compiled elsewhere, unless engines or code are trusted."""
    digest = sha256_of_file(path)
    if not (_TRUSTED.get() or is_code_trusted() or is_built_here(digest)):
        raise BadInput(
            f"{path}: a package of AOTInductor is code, and this one was not compiled here ({engine_list_path()} "
            f"doesn't list sha256 {digest[:16]}...): (a) compile it here, by export --format aoti, or (b) give "
            "--trust-engine (or --trust-code) if you trust whoever compiled it and how it came here"
        )
