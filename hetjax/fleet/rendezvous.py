"""The coordinator address where processes meet: parse it, check that it is free, wait until it is reachable."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import time

from hetjax.environment import BIND

log = logging.getLogger("hetjax")


def split_address(address: str) -> tuple[str, int]:
    """Parse HOST:PORT or [HOST]:PORT."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"The address {address!r} is not HOST:PORT with a port from 1 to 65535, such as node0:29500.")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url(host: str, port: int | None) -> str:
    """The address for ZeroMQ; IPv6 addresses are put in brackets. Without a port, for a random one."""
    return f"tcp://{join_address(host, port)}" if port is not None else f"tcp://{join_address(host, 0)[:-2]}"


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def own_address_towards(address: str) -> str:
    """The local address used to reach `address`; loopback for loopback. Sends nothing."""
    host, port = split_address(address)
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((_resolved(host), port))
        return str(probe.getsockname()[0])


def address_to_bind(coordinator: str) -> str:
    """The address that process 0 listens on: the coordinator's, and no other one of this machine.

    Many machines resolve their own name to loopback only. Other hosts cannot reach that, so process 0 then listens on
    all addresses, with a warning.

    Args:
        coordinator: HOST:PORT as given to all processes.

    Returns:
        HOST:PORT with a free address of this machine.

    Raises:
        OSError: The address cannot be listened on.
    """
    host, port = split_address(coordinator)
    names = [host] if is_loopback(host) else [name for name in _addresses(host) if not is_loopback(name)]
    found = [join_address(name, port) for name in names]
    if not found:
        found = [f"0.0.0.0:{port}"]
        log.warning(
            "%s is a loopback address on this machine, so process 0 listens on all addresses. Give the address by "
            "which other hosts reach it in numeric form, or set %s.", host, BIND,
        )  # fmt: skip
    refusal = None
    for address in found:
        try:
            check_free(address)
        except OSError as error:
            refusal = error
        else:
            return address
    raise OSError(
        f"{refusal} If connections are forwarded to this machine, set {BIND}=HOST:PORT to the address to listen on."
    ) from refusal


def free_port(host: str) -> int:
    """A free port on an address of this machine."""
    with _server(host, 0) as server:
        return int(server.getsockname()[1])


def check_free(address: str) -> None:
    """Raise OSError if the address cannot be listened on: its port is in use, or it belongs to another machine."""
    _server(*split_address(address)).close()


def _server(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((_resolved(host), port), family=_family(host))
    except PermissionError as error:
        raise OSError(f"Port {port} needs privileges: use 1024 or above.") from error
    except OSError as error:
        raise OSError(
            f"Process 0 cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}. The port may be in use, "
            "for example by an earlier run, or the address may belong to another machine. Use another one."
        ) from error


def wait_until_reachable(address: str, limit: float) -> None:
    """Wait until the address accepts connections; TimeoutError after `limit` s, ValueError for unknown names."""
    host, port = split_address(address)
    _resolved(host)
    deadline, reason = time.monotonic() + limit, "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(5.0, left))).close()
        except OSError as error:
            reason = error.strerror or str(error) or "no answer"
            time.sleep(min(0.1, max(0.0, left)))
        else:
            return
    raise TimeoutError(
        f"The coordinator {address} cannot be reached: {reason}, for {limit:.0f} s. Check that process 0 is running, "
        "and the address, port and firewall."
    )


def _resolved(host: str) -> str:
    return _addresses(host)[0]


def _addresses(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))
    except socket.gaierror as error:
        raise ValueError(f"The host {host!r} is not known on this machine ({error.strerror}).") from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in _resolved(host) else socket.AF_INET
