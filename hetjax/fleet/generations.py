"""Generations: who belongs to an elastic fleet, from one change of its membership to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


class Fenced(ConnectionError):
    """This process is no longer a member: it was silent for too long, or it is on the smaller side of a partition."""


class RunStopped(Fenced):
    """The run stops at once: those that are left are not the larger part of the fleet, or never were enough."""


class Superseded(Exception):
    """A newer generation was proposed before all members confirmed the older one."""


@dataclass(frozen=True)
class Member:
    """A process of an elastic fleet."""

    number: int  # never given to another process
    address: str  # of its inbox, for other hosts
    local: str | None = None  # of its inbox, for processes with the same `host`
    host: str = ""
    description: Mapping[str, Any] = field(default_factory=dict)  # JSON values, such as version, devices, memory
    proof: str = ""  # digest of its secret, by which a restarted rendezvous knows it again

    def to_json(self) -> dict[str, Any]:
        """The member as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Member:
        """The inverse of `to_json`.

        Raises:
            ValueError: if they are not those of a member.
        """
        number, address, proof = values.get("number"), values.get("address"), values.get("proof", "")
        local, host, description = values.get("local"), values.get("host", ""), values.get("description", {})
        fits = isinstance(number, int) and isinstance(address, str) and isinstance(host, str) and isinstance(proof, str)
        if not fits or not isinstance(local, str | None) or not isinstance(description, dict):
            raise ValueError(f"These values describe no member: {str(values)[:200]}.")
        assert isinstance(number, int)
        assert isinstance(address, str)
        return cls(number, address, local, host, description, str(proof))


@dataclass(frozen=True)
class Generation:
    """One membership of a fleet."""

    number: int  # grows with every proposal; never used twice
    token: bytes  # of the run
    members: tuple[Member, ...]  # in the order of their numbers
    reason: str = ""  # a sentence, such as "Member 5 joined."
    stop: str = ""  # a sentence: its members save a checkpoint and end the run

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of its members."""
        return tuple(member.number for member in self.members)

    def to_json(self) -> dict[str, Any]:
        """The generation as JSON values."""
        members = [member.to_json() for member in self.members]
        values = {"number": self.number, "token": self.token.hex(), "reason": self.reason, "stop": self.stop}
        return values | {"members": members}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Generation:
        """The inverse of `to_json`.

        Raises:
            ValueError: if they are not those of a generation.
        """
        try:
            members = tuple(Member.from_json(member) for member in values["members"])
            texts = str(values["reason"]), str(values.get("stop", ""))
            return cls(int(values["number"]), bytes.fromhex(values["token"]), members, *texts)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"These values describe no generation: {str(values)[:200]}.") from error
