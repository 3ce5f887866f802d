"""When the nodes of DASO exchange parameters (Coquelin et al., arXiv 2104.05588): a state machine without clocks.

An epoch is a row of steps, b = 0, 1, ... A `skip` of 0 means that nodes agree in every step. Otherwise, after step b:

    the last of an epoch, or b % skip == 0        send the parameters
    `wait` steps after sending                    receive the average and blend it in
    the last of an epoch                          receive what is pending, and wait for the average of what was sent

At the end of an epoch, e of them done, of `total`:

    e <  warm_up, or e >= total - cool_down       skip = wait = 0
    coming from skip = 0                          skip = 4, wait = 1
    loss stable, skip > 1                         skip //= 2, wait = max(wait - 1, 1)
    loss stable, skip == 1                        skip = max_skip, wait = max_skip // 4          (4 -> 2 -> 1 -> 8 -> 4)

stable: for more than `patience` epochs the loss has not fallen below the best one by the fraction `stability`.

On a slow link an exchange may take longer than the steps that the paper waits for it, and all would stand still for
the rest. `needs` says how many steps it takes; it is then received as late as that, at the latest with the next send.

`faithful` keeps two things of the published code: the step before a send never receives, so that at skip 2 the average
comes a step late, and blending goes by the planned wait and not by the steps that have really passed. Its local
skip, which lets the workers of one node diverge and then throws away all but one, is in neither form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

FIRST_SKIP, FIRST_WAIT = 4, 1


@dataclass(frozen=True)
class Act:
    """What a node does in one step. `send` and `receive` may fall into the same one."""

    gradients: bool = False  # sum gradients over all nodes before the update
    send: bool = False  # after the update: start to average the parameters over the nodes
    receive: int = 0  # blend in the average sent before, so many steps ago; 0: there is none to receive
    block: bool = False  # wait for the average just sent, and go on from it


@dataclass
class Plateau:
    """Whether a loss has stopped to fall: torch's rule, with the threshold relative to the best value."""

    stability: float = 0.05
    patience: int = 2
    best: float = math.inf
    bad: int = 0

    def stable(self, loss: float) -> bool:
        goal = self.best * (1 - self.stability) if self.best >= 0 else self.best * (1 + self.stability)
        if loss < goal:
            self.best, self.bad = loss, 0
        else:
            self.bad += 1
        if self.bad > self.patience:
            self.bad = 0
            return True
        return False


@dataclass
class DasoSchedule:
    """Call `step` after every step and `end_epoch` after the last one of an epoch, with its mean loss.

    total: epochs of the run; None for no cool-down.
    """

    warm_up: int = 4
    cool_down: int = 4
    total: int | None = None
    max_skip: int = 8
    stability: float = 0.05
    faithful: bool = False
    overlap: bool = True  # False: wait = 0 throughout, which is local SGD with the same number of exchanges
    epoch: int = 0  # epochs done
    skip: int = 0
    wait: int = 0
    at: int = 0  # steps done in this epoch
    sent: int | None = None  # the step that sent what is still pending
    needs: int = 0  # steps that an exchange takes, as far as that is known
    plateau: Plateau = field(default_factory=Plateau)

    def __post_init__(self) -> None:
        if self.warm_up < 0 or self.cool_down < 0:
            raise ValueError(
                f"warm_up is {self.warm_up} and cool_down {self.cool_down}: give epochs, none or more of each."
            )
        if self.max_skip < 1:
            raise ValueError(f"max_skip is {self.max_skip}: give the most steps between exchanges, at least 1.")
        if not 0 <= self.stability < 1:
            raise ValueError(f"stability is {self.stability}: give a fraction of the loss, such as 0.05.")
        self.plateau.stability = self.stability
        if self.epoch == 0 and self.at == 0 and not self.blocking(0):
            self._begin_cycle()

    def begin_at(self, epoch: int, at: int) -> None:
        """Start so many epochs and steps into a run that agreed in another way until then."""
        self.epoch, self.at, self.sent = epoch, at, None
        self.skip = self.wait = 0
        if not self.blocking(epoch):
            self._begin_cycle()

    def blocking(self, epoch: int) -> bool:
        """Whether the nodes agree in every step of this epoch, counted from 0: known beforehand."""
        return epoch < self.warm_up or (self.total is not None and epoch >= self.total - self.cool_down)

    def step(self, last: bool) -> Act:
        """What to do after the next step; `last`: it ends the epoch."""
        b, self.at = self.at, self.at + 1
        if self.skip == 0 and not self.faithful:
            return Act(gradients=True)
        send = last or self.skip == 0 or b % self.skip == 0
        receive = self._receives(b, send, last)
        block = send and (last or self.wait == 0)
        if send:
            self.sent = None if block else b
        return Act(send=send, receive=receive, block=block)

    def _receives(self, b: int, send: bool, last: bool) -> int:
        """The staleness that the pending average is blended with, if it is received now."""
        if self.sent is None:
            return 0
        passed = b - self.sent
        if not send:
            if self.faithful and (b + 1) % self.skip == 0:
                return 0
            if passed < max(self.wait, self.needs):
                return 0
        self.sent = None
        return min(passed, self.wait) if self.faithful else passed

    def end_epoch(self, loss: float) -> None:
        """Decide on the next epoch."""
        self.epoch, self.at, self.sent = self.epoch + 1, 0, None
        if self.blocking(self.epoch):
            self.skip = self.wait = 0
            return
        if self.skip == 0:
            self._begin_cycle()
        if self.plateau.stable(loss):
            if self.skip > 1:
                self._set(self.skip // 2, max(self.wait - 1, 1))
            else:
                self._set(self.max_skip, max(self.max_skip // 4, 1))

    def _begin_cycle(self) -> None:
        self._set(min(FIRST_SKIP, self.max_skip), FIRST_WAIT)

    def _set(self, skip: int, wait: int) -> None:
        self.skip, self.wait = skip, wait if self.overlap else 0

    def state_dict(self) -> dict[str, Any]:
        """What moves, as plain JSON values."""
        best = None if math.isinf(self.plateau.best) else self.plateau.best
        return {name: getattr(self, name) for name in _MOVING} | {"best": best, "bad": self.plateau.bad}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for name in _MOVING:
            setattr(self, name, saved[name])
        self.plateau.best = math.inf if saved["best"] is None else saved["best"]
        self.plateau.bad = saved["bad"]


_MOVING = ("epoch", "skip", "wait", "at", "sent", "needs")
