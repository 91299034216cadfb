"""No way out of this machine: whoever looks up a name or opens a connection in a test is told so at once."""

import socket
from typing import Any, NoReturn

import pytest

OWN = ("127.", "::1", "localhost", "0.0.0.0")
CALLS = ("connect", "connect_ex", "sendto", "sendmsg")
LOOKUPS = ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "create_connection")


class WentOut(BaseException):
    """No Exception: nothing that goes on without a network may go on past it."""


def _is_own(address: Any) -> bool:
    host = address[0] if isinstance(address, tuple) and address else address
    return isinstance(host, str) and host.startswith(OWN)


def stay_here(patch: pytest.MonkeyPatch, *, loopback: bool) -> None:
    """Until the patch is undone; `loopback`: servers of a test on this machine may be asked, else nothing is."""
    for owner, names in ((socket.socket, CALLS), (socket, LOOKUPS)):
        for name in names:
            patch.setattr(owner, name, _guarded(getattr(owner, name), owner is socket.socket, loopback))


def _guarded(call: Any, is_method: bool, loopback: bool) -> Any:
    def guarded(*words: Any, **named: Any) -> Any:
        if is_method and words[0].family == socket.AF_UNIX:
            return call(*words, **named)
        address = words[-1 if is_method else 0] if words else named.get("host")
        if not (loopback and _is_own(address)):
            refuse(address)
        return call(*words, **named)

    return guarded


def refuse(address: Any) -> NoReturn:
    raise WentOut(f"the network was asked for {str(address)[:100]}")
