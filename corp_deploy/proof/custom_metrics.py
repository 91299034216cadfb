"""Custom metrics of outputs in a proof, by a user's command or Python function. Imports no torch.

Commands come from a command line or a recipe alone: no model, graph or record can name one.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from corp_deploy.spec.trusted_code import Code, file_and_function, is_code, refuse_untrusted
from ground.errors import BadInput
from ground.feeds import Outputs
from ground.files import sha256_of_file, text_from_file
from ground.quantity import quoted
from perf.parity.labels import OwnMetric

if TYPE_CHECKING:
    from .outcome import Proof
    from .proof_inputs import ProofInputs

OUTPUTS = "{outputs}"
TIME_LIMIT_S = 600.0
_NAMED = re.compile(r"(?P<name>[^\s=/]*)=(?P<command>.+)", re.DOTALL)
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRequest:
    """A named metric: a command with `{outputs}` among its words, or `module:PATH.py:FUNCTION`."""

    name: str
    command: str

    @property
    def is_code(self) -> bool:
        return is_code(self.command)

    @property
    def argv(self) -> list[str]:
        return shlex.split(self.command)

    def code(self, below: Path) -> Code:
        """Return the function's name and source, from a path within `below`; raise BadInput if it can't be read."""
        path, function = file_and_function(self.command)
        try:
            source = text_from_file(below / path)
        except OSError as error:
            raise BadInput(f"metric {self.name}: {path} can't be read ({error})") from None
        return Code(file=str(path), function=function, source=source)


def metric_from_text(text: str) -> MetricRequest:
    """Parse `NAME=COMMAND`, or a command, which is named `own`."""
    match = _NAMED.fullmatch(text.strip())
    if match is not None and not _NAME.fullmatch(match["name"]):
        raise BadInput(
            f"metric {quoted(text)}: {match['name'][:100]!r} is not a name; use lower-case letters, digits and "
            "_, with a letter first"
        )
    request = MetricRequest(name="own" if match is None else match["name"], command=match["command"] if match else text)
    if request.is_code:
        path, function = file_and_function(request.command)
        if path.suffix != ".py" or not function:
            raise BadInput(f"metric {quoted(request.command)}: expected module:PATH.py:FUNCTION")
        return request
    try:
        words = request.argv
    except ValueError as error:
        raise BadInput(f"metric {quoted(request.command)}: can't be split into words ({error})") from None
    if not any(OUTPUTS in word for word in words):
        raise BadInput(
            f"metric {quoted(request.command)}: {OUTPUTS} is missing, which the file of outputs replaces, as in "
            f"'python score.py {OUTPUTS}'"
        )
    if OUTPUTS in words[0]:
        raise BadInput(f"metric {quoted(request.command)}: {OUTPUTS} is data, but the first word is the program to run")
    return request


def metrics_from_texts(texts: Sequence[str]) -> tuple[MetricRequest, ...]:
    """Parse metrics; raise BadInput for two with one name."""
    requests = tuple(metric_from_text(text) for text in texts)
    names = [request.name for request in requests]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadInput(f"two metrics are called {twice!r}; give each a name of its own: --metric NAME='COMMAND'")
    return requests


def require_runnable(requests: Sequence[MetricRequest], *, below: Path = Path()) -> None:
    """Raise BadInput for missing programs and files, and for functions unless code is trusted."""
    for request in requests:
        if request.is_code:
            refuse_untrusted(file_and_function(request.command)[0].name, to="measure outputs")
            request.code(below)
            continue
        program = request.argv[0]  # on PATH, or below the directory where it is run
        found = os.path.normpath((below / program).absolute()) if "/" in program else program
        if shutil.which(found) is None:
            raise BadInput(f"metric {request.name}: {quoted(program)} can't be run: there is no such program")


NAMES, LABELS = "names", "labels"
_EXPECTED = "one number, or one for each input"
_LAST_WORDS = 300


class Meter:
    """The custom metrics of a proof, measured on each model's outputs at once, so that a failing metric ends it early.

    A command runs in `below`, without a shell, on an .npz with the outputs by name, the `names` of the inputs and their
    `labels`, if known. Its last printed line is the number, or a JSON list of one number for each input, whose mean is
    the figure. A function takes the same arrays by name and returns either. With a number for each input, the figure
    has an interval, and its change from the first measured model has a paired interval. Raises BadInput if a metric
    can't be run, fails, takes longer than the limit, or gives no finite number.
    """

    def __init__(
        self,
        requests: Sequence[MetricRequest],
        inputs: "ProofInputs",
        *,
        below: Path = Path(),
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        require_runnable(requests, below=below)
        self._requests, self._inputs, self._below, self._time_limit_s = requests, inputs, below, time_limit_s
        self._digests = [_digest(request, inputs, below) for request in requests]
        self._rows: list[list[OwnMetric]] = [[] for _ in requests]
        self._of_reference: list[NDArray[np.float64]] = []

    def measure(self, label: str, outputs: Outputs) -> None:
        for place, (request, digest) in enumerate(zip(self._requests, self._digests, strict=True)):
            values = self._values(request, _arrays(outputs, self._inputs), f"metric {request.name} of {label}")
            if len(self._of_reference) == place:
                self._of_reference.append(values)
            row = OwnMetric(
                name=request.name,
                model=label,
                value=float(values.mean()),
                command=request.command,
                sha256=digest,
                **_errors(values, self._of_reference[place]),
            )
            self._rows[place].append(row)

    def _values(self, request: MetricRequest, arrays: dict[str, NDArray[Any]], where: str) -> NDArray[np.float64]:
        """Return a request's metric of one model's outputs: a single number [1], or one for each input [N]."""
        answer: Any
        if request.is_code:
            code = request.code(self._below)
            answer, where = code.called({"outputs": arrays}), f"{where}: {code.function}()"
        else:
            with tempfile.TemporaryDirectory() as private:  # of this user alone
                path = Path(private) / "outputs.npz"
                np.savez(path, **arrays)  # type: ignore[arg-type]
                words = [word.replace(OUTPUTS, str(path)) for word in request.argv]
                answer = _answer(self._printed(words, where, f"the file holds {', '.join(arrays)}"), where)
        inputs = self._inputs.count
        try:
            values = np.asarray(answer, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            raise BadInput(f"{where}: gives {quoted(str(answer))}, expected {_EXPECTED}") from None
        if values.shape not in ((), (inputs,)):
            raise BadInput(
                f"{where}: gives numbers of shape {list(values.shape)} for {inputs} inputs, expected {_EXPECTED}"
            )
        if not np.isfinite(values).all():
            raise BadInput(f"{where}: gives {quoted(str(answer))}, expected finite numbers")
        return np.atleast_1d(values)

    def _printed(self, words: Sequence[str], where: str, source: str) -> str:
        """Run the command and return its stdout; kill everything that it started."""
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=self._below,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise BadInput(f"{where}: {quoted(words[0])} can't be run ({error.strerror})") from None
        try:
            out, err = process.communicate(timeout=self._time_limit_s)
        except subprocess.TimeoutExpired:
            raise BadInput(
                f"{where}: took longer than {self._time_limit_s:g} s and was stopped; make it faster, or give "
                "--metric-time-limit"
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        if process.returncode:
            stderr = err.decode(errors="replace").strip()[-_LAST_WORDS:] or "it said nothing"
            raise BadInput(f"{where}: exit code {process.returncode}, expected 0 ({source}): {stderr}")
        return out.decode(errors="replace")

    @property
    def metrics(self) -> tuple[OwnMetric, ...]:
        """All measurements: for each request in order, those of every model."""
        return tuple(row for rows in self._rows for row in rows)

    def beside(self, proof: "Proof") -> "Proof":
        """Return the proof with the measurements in its parity record."""
        return replace(proof, parity=replace(proof.parity, metrics=self.metrics)) if self._requests else proof


def _arrays(outputs: Outputs, inputs: "ProofInputs") -> dict[str, NDArray[Any]]:
    reserved = [name for name in outputs if name in (NAMES, LABELS)]
    if reserved:
        raise BadInput(
            f"metric: an output is called {reserved[0]!r}, which is the name of an array beside it; rename the output"
        )
    arrays: dict[str, NDArray[Any]] = {name: np.asarray(array) for name, array in outputs.items()}
    if inputs.names:
        arrays[NAMES] = np.array(inputs.names)
    if inputs.labels is not None:
        arrays[LABELS] = inputs.labels
    return arrays


def _digest(request: MetricRequest, inputs: "ProofInputs", below: Path) -> str:
    """Return the digest of the labels and the command's words, in which a file counts by its content, not its path."""
    digest = hashlib.sha256()
    path, function = file_and_function(request.command)
    words = [str(path), function] if request.is_code else request.argv
    for place, word in enumerate(words):
        is_named = place == 0 if request.is_code else OUTPUTS not in word and (below / word).is_file()
        part = sha256_of_file(below / word) if is_named else word
        digest.update(hashlib.sha256(part.encode()).digest())
    if inputs.labels is not None:
        digest.update(np.ascontiguousarray(inputs.labels, dtype="<i8").tobytes())
    return digest.hexdigest()


def _errors(values_N: NDArray[np.float64], of_reference_N: NDArray[np.float64]) -> dict[str, Any]:
    """Return the standard errors of the mean and of its change, as fields of OwnMetric; none for a single number."""
    count = len(values_N)
    if count < 2 or count != len(of_reference_N):
        return {}
    own, change = ((side_N.std(ddof=1) / math.sqrt(count)).item() for side_N in (values_N, values_N - of_reference_N))
    return {"images": count, "error": own, "change_error": change}


def _answer(printed: str, where: str) -> Any:
    """Parse the number, or the JSON list, on the last line that a command printed."""
    lines = printed.strip().splitlines()
    if not lines:
        raise BadInput(f"{where}: printed nothing, expected {_EXPECTED} on the last line")
    with contextlib.suppress(ValueError):
        answer = json.loads(lines[-1])
        if isinstance(answer, list):
            return answer
    try:
        return float(lines[-1].replace("_", "none"))  # Python allows underscores in numbers
    except ValueError:
        raise BadInput(
            f"{where}: the last line is {quoted(lines[-1])}, expected a number and nothing else, or a JSON list of one "
            "number for each input"
        ) from None
