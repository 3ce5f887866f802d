"""Arms of a reproduced claim, paired differences between them, and the rule of the verdict."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from studies.rcd_sgd import reached

LEAST = 0.01  # relative gain below which there is none, however certain
VERDICTS = ("reproduced", "only against the paper's control", "not reproduced")
UNREPORTED = ("no gain, as reported", "gain where the paper saw none")  # where the paper reports no gain


@dataclass(frozen=True)
class Arm:
    """One way to train, over all seeds."""

    step_E: np.ndarray  # after which the loss was evaluated
    clock_SxE: np.ndarray  # seconds until then
    loss_SxE: np.ndarray
    run_S: np.ndarray  # seconds of the whole run
    target: float  # loss to reach
    rate: float  # the learning rate that was tuned for it
    more: dict[str, str] = field(default_factory=dict)  # further columns

    @property
    def steps_S(self) -> np.ndarray:
        """Steps to the target; NaN: not reached."""
        return self._reached(np.broadcast_to(self.step_E, self.loss_SxE.shape))

    @property
    def seconds_S(self) -> np.ndarray:
        """Seconds to the target; NaN: not reached."""
        return self._reached(self.clock_SxE)

    def _reached(self, at_SxE: np.ndarray) -> np.ndarray:
        pairs = zip(at_SxE, self.loss_SxE, strict=True)
        return np.array([reached(at_E, loss_E, self.target) for at_E, loss_E in pairs])


@dataclass(frozen=True)
class Comparison:
    """One row of the page: a method, its paper's control, and the controls that the paper left out."""

    claim: str  # number of the paper
    setting: str
    reported: str
    method: str  # names of arms
    control: str
    omitted: tuple[str, ...]
    arms: dict[str, Arm]
    measure: str = "seconds_S"  # or run_S, where the claim is about the time of a given training
    gain_reported: bool = True  # False: the paper saw none

    @property
    def target(self) -> float:
        """The loss that all arms have to reach."""
        return self.arms[self.control].target

    def with_target(self, factor: float) -> Comparison:
        """The same runs, with a target `factor` times as high."""
        return replace(self, arms={name: replace(arm, target=factor * arm.target) for name, arm in self.arms.items()})


def gain(comparison: Comparison, method: str, against: str) -> tuple[float, float]:
    """Mean and standard error over seeds of the relative difference of a measure, method / against - 1.

    A target that was not reached counts as infinitely late.
    """
    mine_S, other_S = (getattr(comparison.arms[name], comparison.measure) for name in (method, against))
    if not np.isfinite(mine_S).all():
        return (float("nan") if not np.isfinite(other_S).all() else float("inf")), 0.0
    if not np.isfinite(other_S).all():
        return -1.0, 0.0
    ratio_S = mine_S / other_S - 1
    return float(ratio_S.mean()), float(ratio_S.std(ddof=1) / len(ratio_S) ** 0.5) if len(ratio_S) > 1 else 0.0


def by_strength(comparison: Comparison) -> list[str]:
    """The omitted controls by the mean of the measure, smallest first; those that miss the target come last."""
    mean = lambda name: np.mean(getattr(comparison.arms[name], comparison.measure))
    return sorted(comparison.omitted, key=lambda name: np.nan_to_num(mean(name), nan=np.inf))


def better(difference: tuple[float, float]) -> bool:
    """Whether a relative difference is a gain: by more than 1% and more than two standard errors."""
    mean, error = difference
    return bool(mean < -max(2 * error, LEAST))


def verdict(comparison: Comparison) -> str:
    """What survives of a claim.

    reproduced                        better than the paper's control and than the strongest omitted control
    only against the paper's control  better than the former, not than the latter; weaker ones that it beats are named
    not reproduced                    not better than the paper's own control

    Where the paper reports no gain, it says whether there is one over the paper's control.
    """
    gains = better(gain(comparison, comparison.method, comparison.control))
    if not comparison.gain_reported:
        return UNREPORTED[gains]
    if not gains:
        return VERDICTS[2]
    controls = by_strength(comparison)
    beaten = [name for name in controls if better(gain(comparison, comparison.method, name))]
    return VERDICTS[0] if controls[0] in beaten else " and ".join([VERDICTS[1], *beaten])
