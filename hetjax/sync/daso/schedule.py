"""When the nodes of DASO exchange parameters: a state machine without clocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

FIRST_SKIP, FIRST_WAIT = 4, 1


@dataclass(frozen=True)
class StepActions:
    """What a node does in one step. `send` and `receive` may coincide."""

    sum_gradients: bool = False  # before the update: over all nodes
    send: bool = False  # after the update: start averaging the parameters over the nodes
    receive: int = 0  # blend in the pending average with this staleness in steps; 0: nothing to receive
    block: bool = False  # wait for the average just sent, and continue from it


@dataclass
class Plateau:
    """Detects that a loss has stopped falling: the rule of torch's ReduceLROnPlateau with a relative threshold."""

    stability: float = 0.05  # relative improvement over the best loss that counts as progress
    patience: int = 2
    best: float = math.inf
    bad: int = 0  # epochs without progress

    def stable(self, loss: float) -> bool:
        """Record the loss of an epoch; True after more than `patience` epochs without progress."""
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
    """The schedule of DASO (Coquelin et al., arXiv 2104.05588).

    Call `step` after every step, and `end_epoch` with the mean loss after the last step of an epoch. With skip = 0 the
    nodes agree in every step. Otherwise, after step b = 0, 1, ... of an epoch:

        last step of the epoch, or b % skip == 0      send the parameters
        `wait` steps after sending                    receive the average and blend it in
        last step of the epoch                        receive what is pending, and block on the average just sent

    At the end of an epoch, with e epochs done of `total`:

        e <  warm_up, or e >= total - cool_down       skip = wait = 0
        coming from skip = 0                          skip = 4, wait = 1
        loss stable, skip > 1                         skip //= 2, wait = max(wait - 1, 1)
        loss stable, skip == 1                        skip = max_skip, wait = max_skip // 4      (4 -> 2 -> 1 -> 8 -> 4)

    The loss is stable if for more than `patience` epochs it has not fallen by the fraction `stability` below the best.

    On a slow link an exchange may take longer than the paper's wait, and all nodes would block for the rest. If
    `exchange_steps` is known, the average is received that much later, at the latest with the next send.

    `faithful` keeps the receive of the published code. It caps the wait at the steps left in the epoch, anew in every
    step, and receives in step b if b % skip equals the capped wait: at skip 8 and wait 2, an epoch of 3 mod 8 steps
    receives its last average after one step, one of 4 mod 8 steps only with the last send. The step before a send never
    receives, so that at skip 2 the average comes a step later than planned. Blending uses the wait capped when sending
    instead of the true staleness. Its local skip, which lets the workers of a node diverge and then discards all but
    one, exists in neither form.
    """

    warm_up: int = 4
    cool_down: int = 4
    total: int | None = None  # epochs of the run; None: no cool-down
    max_skip: int = 8
    stability: float = 0.05
    faithful: bool = False
    overlap: bool = True  # False: wait = 0 throughout, which is local SGD with the same number of exchanges
    epoch: int = 0  # epochs done
    skip: int = 0
    wait: int = 0
    steps_done: int = 0  # in this epoch
    sent: int | None = None  # the step that sent the pending exchange
    exchange_steps: int = 0  # duration of an exchange in steps; 0: unknown
    plateau: Plateau = field(default_factory=Plateau)

    def __post_init__(self) -> None:
        if self.warm_up < 0 or self.cool_down < 0:
            raise ValueError(
                f"warm_up is {self.warm_up} and cool_down {self.cool_down}: expected 0 or more epochs each."
            )
        if self.max_skip < 1:
            raise ValueError(f"max_skip is {self.max_skip}: expected the maximum steps between exchanges, at least 1.")
        if not 0 <= self.stability < 1:
            raise ValueError(f"stability is {self.stability}: expected a fraction of the loss below 1, such as 0.05.")
        self.plateau.stability = self.stability
        if self.epoch == 0 and self.steps_done == 0 and not self.blocking(0):
            self._begin_cycle()

    def begin_at(self, epoch: int, steps_done: int) -> None:
        """Start at this epoch and step of a run that used another sync before."""
        self.epoch, self.steps_done, self.sent = epoch, steps_done, None
        self.skip = self.wait = 0
        if not self.blocking(epoch):
            self._begin_cycle()

    def blocking(self, epoch: int) -> bool:
        """Whether the nodes agree in every step of this epoch, counted from 0; known in advance."""
        return epoch < self.warm_up or (self.total is not None and epoch >= self.total - self.cool_down)

    def step(self, left: int) -> StepActions:
        """The actions of the next step; `left`: steps of the epoch after it, 0 for the last."""
        b, last, self.steps_done = self.steps_done, left == 0, self.steps_done + 1
        if self.skip == 0 and not self.faithful:
            return StepActions(sum_gradients=True)
        send = last or self.skip == 0 or b % self.skip == 0
        receive = self._received_staleness(b, send, left)
        block = send and (last or self.wait == 0)
        if send:
            self.sent = None if block else b
        return StepActions(send=send, receive=receive, block=block)

    def compresses(self, last: bool) -> bool:
        """Whether parameters sent in the next step may travel in 16 bits.

        As published (`faithful`), while nodes block; in the cycling phase the original sends 32 bits. By default the
        other way round, except for the mean that ends an epoch, from which nodes continue; gradients are summed while
        they block.
        """
        return self.skip == 0 if self.faithful else not last

    def _received_staleness(self, b: int, send: bool, left: int) -> int:
        """The staleness with which the pending average is blended in step b; 0 if it is not received now."""
        if self.sent is None:
            return 0
        staleness = b - self.sent
        planned = min(self.wait, left + staleness)  # as capped when sending
        if not send:
            if self.faithful:
                if (b + 1) % self.skip == 0 or b % self.skip != min(self.wait, left):
                    return 0
            elif staleness < max(self.wait, self.exchange_steps):
                return 0
        self.sent = None
        return planned if self.faithful else staleness

    def end_epoch(self, loss: float) -> None:
        """Set skip and wait for the next epoch, given the mean loss of this one."""
        self.epoch, self.steps_done, self.sent = self.epoch + 1, 0, None
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
        """The variable part as JSON values."""
        best = None if math.isinf(self.plateau.best) else self.plateau.best
        saved = {key: getattr(self, name) for key, name in _SAVED.items()}
        return saved | {"best": best, "bad": self.plateau.bad}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        for key, name in _SAVED.items():
            setattr(self, name, saved[key])
        self.plateau.best = math.inf if saved["best"] is None else saved["best"]
        self.plateau.bad = saved["bad"]


_SAVED = {  # key in checkpoints: attribute
    "epoch": "epoch",
    "skip": "skip",
    "wait": "wait",
    "at": "steps_done",
    "sent": "sent",
    "needs": "exchange_steps",
}
