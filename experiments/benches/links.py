"""Slow network links on one machine: one Linux network namespace per node, a switch between them, limited by tc.

with Links(2) as links:
    links.limit(100)                                # Mbit/s up and down for each node; None: unlimited
    subprocess.Popen([*links.command_prefix(0), "python", ...])
    subprocess.Popen([*links.command_prefix(1), "python", ..., links.address(0)])
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess

_NAMESPACE = re.compile(r"hetjax-(\d+)-(?:switch|node\d+)")


class LinksRefused(OSError):
    """Network namespaces are not available here; the message says why."""


class Links:
    """A star of nodes around a switch, each link limited by a token bucket filter (`tc ... tbf`).

    Real sockets, real TCP, no sleeping: any program that runs with a prefix (`command_prefix`) and talks to the
    addresses of other nodes (`address`) sees the limited link. Use as a context manager: namespaces are removed on
    exit, and those of a killed process by the next `Links`.

    Args:
        nodes: number of nodes, at most 254.

    Raises:
        LinksRefused: On entering, if this is not root or `ip` and `tc` (iproute2) are missing or fail.
    """

    def __init__(self, nodes: int):
        self.nodes = nodes
        self._switch = f"hetjax-{os.getpid()}-switch"
        self._namespaces = [f"hetjax-{os.getpid()}-node{j}" for j in range(nodes)]

    def __enter__(self) -> Links:
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise LinksRefused(f"`{tool}` (iproute2) is not installed.")
        if os.geteuid() != 0:
            raise LinksRefused("Only root may create network namespaces.")
        remove_stale()
        try:
            self._create()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _create(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "name", "sw0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "sw0", "up")
        for j, name in enumerate(self._namespaces):
            port = f"port{j}"
            _run("ip", "netns", "add", name)
            _run(*f"ip -n {name} link add eth0 type veth peer name {port} netns {self._switch}".split())
            _run(*f"ip -n {self._switch} link set {port} master sw0 up".split())
            _run(*f"ip -n {name} addr add {self.address(j)}/24 dev eth0".split())
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def address(self, node: int) -> str:
        """The IP address of a node, reachable from all nodes."""
        return f"10.77.0.{node + 1}"

    def command_prefix(self, node: int) -> list[str]:
        """Arguments to put before a command to run it on this node."""
        return ["ip", "netns", "exec", self._namespaces[node]]

    def limit(self, mbit: float | None) -> None:
        """Set the bandwidth of every link, in Mbit/s in each direction; None removes the limit."""
        ends = [(name, "eth0") for name in self._namespaces]
        ends += [(self._switch, f"port{j}") for j in range(self.nodes)]
        for name, device in ends:
            target = ["dev", device, "root"]
            if mbit is None:
                _run("tc", "-n", name, "qdisc", "delete", *target, check=False)
            else:
                burst = max(32_768, int(mbit * 1e6 / 8 / 250))  # bytes: 4 ms
                rate = ["tbf", "rate", f"{mbit}mbit", "burst", str(burst), "latency", "200ms"]
                _run("tc", "-n", name, "qdisc", "replace", *target, *rate)

    def cut(self, node: int) -> None:
        """Cut the link of a node: what is sent over it is lost, and nobody is told."""
        _run("ip", "-n", self._switch, "link", "set", f"port{node}", "down")

    def __exit__(self, *_: object) -> None:
        for name in [*self._namespaces, self._switch]:
            _run("ip", "netns", "delete", name, check=False)


def remove_stale() -> None:
    """Remove the namespaces of processes that no longer exist."""
    for line in _run("ip", "netns", "list").splitlines():
        found = _NAMESPACE.match(line)
        if found is not None and not os.path.exists(f"/proc/{found[1]}"):
            _run("ip", "netns", "delete", found[0], check=False)


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode:
        raise LinksRefused(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
