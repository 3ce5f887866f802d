"""Nodes behind slow links on one machine: a network namespace each, a switch between them, bandwidth limited by tbf.

    with Links(2) as links:
        links.limit(100)                                # Mbit/s up and down for each node; None: as fast as it goes
        subprocess.Popen([*links.inside(0), "python", ...])

Needs root, `ip` and `tc`. Everything is taken away at the end; what a killed run left behind, by the next one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess

_STALE = re.compile(r"hetjax-(\d+)-(?:switch|node\d+)")


class LinksRefused(OSError):
    """Network namespaces cannot be had here; the message says why."""


class Links:
    def __init__(self, nodes: int):
        self.nodes = nodes
        self._switch = f"hetjax-{os.getpid()}-switch"
        self._names = [f"hetjax-{os.getpid()}-node{j}" for j in range(nodes)]

    def __enter__(self) -> Links:
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise LinksRefused(f"There is no `{tool}` here (iproute2).")
        if os.geteuid() != 0:
            raise LinksRefused("Only root may make network namespaces.")
        remove_stale()
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "name", "sw0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "sw0", "up")
        for j, name in enumerate(self._names):
            port = f"port{j}"
            _run("ip", "netns", "add", name)
            _run(*f"ip -n {name} link add eth0 type veth peer name {port} netns {self._switch}".split())
            _run(*f"ip -n {self._switch} link set {port} master sw0 up".split())
            _run(*f"ip -n {name} addr add {self.address(j)}/24 dev eth0".split())
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def inside(self, node: int) -> list[str]:
        """What to put before a command that shall run on this node."""
        return ["ip", "netns", "exec", self._names[node]]

    def limit(self, mbit: float | None) -> None:
        ends = [(name, "eth0") for name in self._names]
        ends += [(self._switch, f"port{j}") for j in range(self.nodes)]
        for name, device in ends:
            where = ["dev", device, "root"]
            if mbit is None:
                _run("tc", "-n", name, "qdisc", "delete", *where, check=False)
            else:
                burst = max(32_768, int(mbit * 1e6 / 8 / 250))  # 4 ms
                rate = ["tbf", "rate", f"{mbit}mbit", "burst", str(burst), "latency", "200ms"]
                _run("tc", "-n", name, "qdisc", "replace", *where, *rate)

    def __exit__(self, *_: object) -> None:
        for name in [*self._names, self._switch]:
            _run("ip", "netns", "delete", name, check=False)


def remove_stale() -> None:
    """Remove the namespaces of runs that are dead."""
    for line in _run("ip", "netns", "list").splitlines():
        found = _STALE.match(line)
        if found is not None and not os.path.exists(f"/proc/{found[1]}"):
            _run("ip", "netns", "delete", found[0], check=False)


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode:
        raise LinksRefused(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
