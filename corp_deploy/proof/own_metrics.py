"""Measures of a user's own, by a command or a Python function, of what each artefact of a proof answers.

What is run comes from a command line or a recipe alone: no model, graph or record can name a command.
"""

import contextlib
import hashlib
import math
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corp_deploy.families.trusted_code import Code, file_and_function, refuse_untrusted
from ground.errors import BadInput
from ground.feeds import Outputs
from ground.files import regular
from ground.quantity import shown
from perf.parity.own_metric import OwnMetric

from .chain import Proof
from .inputs import ProofInputs
from .metric_request import OUTPUTS, TIME_LIMIT_S, MetricRequest

NAMES, LABELS = "names", "labels"
_LAST_WORDS = 300


def require_trusted(requests: Sequence[MetricRequest]) -> None:
    """Raise BadInput for functions where code isn't trusted; a command is trusted by being typed."""
    for request in requests:
        if request.is_code:
            refuse_untrusted(file_and_function(request.command)[0].name, to="measure outputs")


def own_metrics(
    requests: Sequence[MetricRequest],
    answers: Mapping[str, Outputs],
    inputs: ProofInputs,
    *,
    below: Path = Path(),
    time_limit_s: float = TIME_LIMIT_S,
) -> tuple[OwnMetric, ...]:
    """Every measure of every artefact's outputs, once each; `answers` by the artefact's label.

    A command is run in `below`, without a shell, on an .npz with the outputs by name, `names` of the inputs and, where
    given, `labels`; the last line that it prints is the number. A function is given the same arrays by name. Raises
    BadInput for what fails, takes longer than the limit or gives no finite number.
    """
    require_trusted(requests)
    rows = []
    for request in requests:
        digest = _digest(request, below)
        for label, outputs in answers.items():
            where = f"metric {request.name} of {label}"
            value = _value(request, _arrays(outputs, inputs), where, below, time_limit_s)
            rows.append(OwnMetric(name=request.name, model=label, value=value, command=request.command, sha256=digest))
    return tuple(rows)


def with_metrics(
    proof: Proof,
    requests: Sequence[MetricRequest],
    inputs: ProofInputs,
    *,
    below: Path = Path(),
    time_limit_s: float = TIME_LIMIT_S,
) -> Proof:
    """The proof with these measures of the dense model and of every candidate, as it is without any."""
    if not requests:
        return proof
    measured = own_metrics(requests, proof.answers, inputs, below=below, time_limit_s=time_limit_s)
    return replace(proof, parity=replace(proof.parity, metrics=measured))


def _arrays(outputs: Outputs, inputs: ProofInputs) -> dict[str, NDArray[Any]]:
    taken = [name for name in outputs if name in (NAMES, LABELS)]
    if taken:
        raise BadInput(f"metric: an output is called {taken[0]!r}, as what goes beside it is; name outputs otherwise")
    arrays: dict[str, NDArray[Any]] = {name: np.asarray(array) for name, array in outputs.items()}
    if inputs.names:
        arrays[NAMES] = np.array(inputs.names)
    if inputs.labels is not None:
        arrays[LABELS] = inputs.labels
    return arrays


def files_named(request: MetricRequest, below: Path) -> list[Path]:
    """The files among its words, in their order."""
    if request.is_code:
        return [below / file_and_function(request.command)[0]]
    return [below / word for word in request.words if OUTPUTS not in word and (below / word).is_file()]


def _digest(request: MetricRequest, below: Path) -> str:
    digest = hashlib.sha256(request.command.encode())
    for path in files_named(request, below):
        digest.update(hashlib.sha256(regular(path).read_bytes()).digest())
    return digest.hexdigest()


def _value(
    request: MetricRequest, arrays: dict[str, NDArray[Any]], where: str, below: Path, time_limit_s: float
) -> float:
    if request.is_code:
        return _called(request, arrays, where)
    with tempfile.TemporaryDirectory() as private:  # of this user alone
        path = Path(private) / "outputs.npz"
        np.savez(path, **arrays)  # type: ignore[arg-type]
        words = [word.replace(OUTPUTS, str(path)) for word in request.words]
        return _finite(_number(_printed(words, where, below, time_limit_s), where), where)


def _called(request: MetricRequest, arrays: dict[str, NDArray[Any]], where: str) -> float:
    path, function = file_and_function(request.command)
    try:
        source = regular(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{where}: {path} can't be read ({error})") from None
    answer = Code(file=str(path), function=function, source=source).called({"outputs": arrays})
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise BadInput(f"{where}: {function}() gives {shown(str(answer))}, expected one number") from None
    return _finite(value, where)


def _printed(words: Sequence[str], where: str, below: Path, time_limit_s: float) -> str:
    """What the command prints. All that it started ends with it."""
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=below,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise BadInput(f"{where}: {shown(words[0])} can't be run ({error.strerror})") from None
    try:
        out, err = process.communicate(timeout=time_limit_s)
    except subprocess.TimeoutExpired:
        raise BadInput(
            f"{where}: took longer than {time_limit_s:g} s and was stopped; make it faster, or give --metric-time-limit"
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    if process.returncode:
        said = err.decode(errors="replace").strip()[-_LAST_WORDS:] or "it said nothing"
        raise BadInput(f"{where}: exit code {process.returncode}, expected 0: {said}")
    return out.decode(errors="replace")


def _number(printed: str, where: str) -> float:
    lines = printed.strip().splitlines()
    if not lines:
        raise BadInput(f"{where}: printed nothing, expected a number on the last line")
    try:
        return float(lines[-1])
    except ValueError:
        raise BadInput(f"{where}: the last line is {shown(lines[-1])}, expected a number and nothing else") from None


def _finite(value: float, where: str) -> float:
    if not math.isfinite(value):
        raise BadInput(f"{where}: is {value}, expected a finite number")
    return value
