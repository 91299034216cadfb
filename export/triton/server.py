"""A client of a running inference server by the KServe HTTP protocol: list, load and unload models, infer.

Requests go to the server's address only, without proxies and redirects, and have a time limit.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.text import printable

MOST_BYTES = 2**28
DATA_TYPES = {
    "float32": "FP32", "float64": "FP64", "float16": "FP16", "int64": "INT64", "int32": "INT32", "uint8": "UINT8",
    "bool": "BOOL",
}  # fmt: skip


class ServerError(Exception):
    """A request that the server refused or didn't answer in time."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any) -> None:
        """Refuse a redirect, which makes it an error of the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonServer:
    """The server at `address`, such as http://127.0.0.1:8000; a request takes at most `timeout_s`."""

    address: str
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.address)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
            raise BadInput(f"server {self.address[:200]!r}: expected an address such as http://127.0.0.1:8000")

    def require_live(self) -> None:
        try:
            self._ask("health/live")
        except ServerError as error:
            raise BadInput(f"server {self.address}: {error}; is it running?") from None

    def ready_versions(self, model: str) -> tuple[int, ...]:
        index = self._ask("repository/index", {"ready": True})
        entries = [each for each in index if isinstance(each, dict)] if isinstance(index, list) else []
        own = [each for each in entries if (each.get("name"), each.get("state")) == (model, "READY")]
        return tuple(sorted(int(each["version"]) for each in own if str(each.get("version", "")).isdigit()))

    def is_ready(self, model: str, version: int) -> bool:
        try:
            self._ask(f"models/{quote(model)}/versions/{version}/ready")
        except ServerError:
            return False
        return True

    def load(self, model: str) -> None:
        self._ask(f"repository/models/{quote(model)}/load", {})

    def unload(self, model: str) -> None:
        self._ask(f"repository/models/{quote(model)}/unload", {})

    def infer(self, model: str, version: int, feed: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float64]]:
        inputs = []
        for name, array in feed.items():
            kind, shape, data = DATA_TYPES[array.dtype.name], list(array.shape), array.ravel().tolist()
            inputs.append({"name": name, "datatype": kind, "shape": shape, "data": data})
        answer = self._ask(f"models/{quote(model)}/versions/{version}/infer", {"inputs": inputs})
        try:
            return {each["name"]: np.asarray(each["data"], float).reshape(each["shape"]) for each in answer["outputs"]}
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(f"its answer is no inference response ({error!s:.200})") from None

    def input_names(self, model: str, version: int) -> tuple[str, ...]:
        answer = self._ask(f"models/{quote(model)}/versions/{version}")
        try:
            return tuple(str(each["name"]) for each in answer["inputs"])
        except (KeyError, TypeError) as error:
            raise ServerError(f"its answer names no inputs ({error!s:.200})") from None

    def _ask(self, path: str, content: object = None) -> Any:
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"{self.address.rstrip('/')}/v2/{path}", data=body)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
        try:
            with opener.open(request, timeout=self.timeout_s) as response:
                text = response.read(MOST_BYTES)
        except urllib.error.HTTPError as error:
            said = error.read(10_000).decode("utf-8", "replace")
            with suppress(ValueError, KeyError, TypeError):
                said = str(json.loads(said)["error"])
            raise ServerError(printable(f"{error.code} {error.reason}: {said[:500]}")) from None
        except (OSError, ValueError) as error:
            raise ServerError(f"no answer within {self.timeout_s:g} s or no connection ({error})") from None
        try:
            return json.loads(text) if text else None
        except ValueError:
            raise ServerError("its answer is no JSON") from None
