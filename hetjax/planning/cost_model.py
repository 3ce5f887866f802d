"""What each worker costs, learned while it works: t = startup + per_work x, for x the work of its samples.

Bayesian recursive least squares on h = (1, x) per worker, all workers at once. Notation: theta = (startup, per_work),
P its covariance, s = sigma (startup + per_work x) the sd of one timing, sigma the worker's relative noise: one common
number learned fast, and a factor per worker learned slowly.

    innovation  e = t - h theta,  S = h P h' + s^2,  z = e / sqrt S, clipped at 3
    update      theta += P h' z / sqrt S,  P -= P h' h P / S
    forgetting  P += q^2 theta theta'; and the startup returns to its prior, rate r, at the same time for x

Workers on one machine, or behind one switch, are also slow together: t = (1 + c) (h theta + own noise), c of mean 0 and
sd tau, drawn for each step. It says nothing about shares, so its best estimate is divided out first:

    c = sum(r / v) / (1 / tau^2 + sum(1 / v))      r = e / (h theta), v its variance without c, r / sd clipped at 3
    tau^2 = mean over steps of r_i r_j, i not j

What most of the workers have in common far outside the noise is divided out whole. A tenth of what is divided out is
learned, should it last, by the workers that were timed: nothing would correct the model of one that was not.

Forgetting acts along theta: a worker may become faster or slower as a whole. The split of that time into startup and
per_work falls back to what was assumed in the beginning, mean and sd: a constant x says nothing about it (forgetting
all of P would wind it up without bound), and what a drift has made of it must not be trusted for ever.

Two tests stand beside the filter, on (nearly) the logarithm of times, whose noise is not skew. Jump: a timing far
outside the noise rescales its worker at once. Change point: the sum of the last z over windows of 2 to 64 steps; a
likelihood ratio above 12 + ln N rescales the worker by the mean of that window.

Either way the worker is AWAY from the model it had, which is kept and comes back when the timings fit it better again:

    evidence = max(0, evidence + (z_now^2 - z_kept^2) / 2), z clipped at 4;  above 6 the worker is back

A disturbance is therefore forgotten as if it had not been, however long it was, up to 64 timings.

Only float64 + - * / sqrt and comparisons are used, so that unlike hosts agree to the bit.

A natural logarithm made of + - * / only: library logarithms differ in the last bit between processors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def ln(x: float) -> float:
    """ln x = e ln 2 + 2 artanh((m - 1) / (m + 1)) with x = m 2^e, 1/sqrt 2 <= m < sqrt 2, by its series."""
    m, e = math.frexp(x)
    if m < 0.7071067811865476:
        m, e = 2.0 * m, e - 1
    z = (m - 1.0) / (m + 1.0)
    square, total = z * z, 0.0
    for k in range(25, 0, -2):
        total = total * square + 1.0 / k
    return e * 0.6931471805599453 + 2.0 * z * total


FIRST_NOISE = 0.12  # relative sd of a timing before any was seen, worth FIRST_WEIGHT timings
FIRST_WEIGHT = 8.0
COMMON_WEIGHT = 16.0  # steps that the assumption of no common noise is worth
OWN_WEIGHT = 32.0  # timings that the common noise is worth for a single worker
STARTUP_SHARE, STARTUP_SD = 0.05, 0.15  # of the first time
DRIFT = 0.0005  # relative change of a worker's speed per step that is always expected
RETURN = 0.005  # of the way back to the prior that the startup goes per step
CLIP = 3.0
JUMP_Z, JUMP_RATIO = 5.0, 0.2
MOST_LEARNED = 0.2  # of a common slowdown, in one step: a hiccup of 40x says little about the next step
CHANGE_LIMIT, CHANGE_CLIP, CHANGE_SCALES = 12.0, 4.0, 6
BACK_LIMIT, PASSING, AWAY = 6.0, 4, 64  # evidence; timings of a disturbance that just passes, and of the longest one
SHORTEST, LONGEST = 1e-6, 1e6  # seconds; a timing outside counts as the nearest of these, so nothing overflows
STEADY = 24  # timings at the same work before a change point counts as news
NOISE_MEMORY = 400.0  # steps
_SCALES_S = 1 << np.arange(CHANGE_SCALES)


class CostModel:
    """Startup and cost per work of every worker with their uncertainty, updated once a step."""

    saved = (
        "startup_W", "per_work_W", "var_ss_W", "var_sp_W", "var_pp_W", "seen_W", "noise", "weight", "ratio_W",
        "doubt_W", "kept_5xW", "away_W", "evidence_W", "lasting", "passing", "sums_2xSxW", "clock", "age_W", "work_W",
        "steady_W", "jumped", "passed", "shifted", "common", "common_weight",
    )  # fmt: skip

    def __init__(self, workers: int) -> None:
        zero_W = np.zeros(workers)
        self.startup_W, self.per_work_W = zero_W, zero_W
        self.var_ss_W, self.var_sp_W, self.var_pp_W = zero_W, zero_W, zero_W
        self.seen_W = np.zeros(workers, np.int64)
        self.noise, self.weight = FIRST_NOISE, FIRST_WEIGHT
        self.common, self.common_weight = 0.0, COMMON_WEIGHT  # tau^2
        self.ratio_W = np.ones(workers)  # a worker's noise variance over the common one
        self.doubt_W = np.zeros(workers, bool)  # rescaled by its last timing alone
        self.away_W = np.zeros(workers, np.int64)  # timings since it left the model that is kept; 0: none is
        self.kept_5xW, self.evidence_W = np.zeros((5, workers)), zero_W
        self.sums_2xSxW = np.zeros((2, CHANGE_SCALES, workers))  # sums of z: last full block, block now filling
        self.clock = 0
        self.age_W = np.zeros(workers, np.int64)
        self.work_W, self.steady_W = zero_W, np.zeros(workers, np.int64)  # the last work, and timings since it changed
        self.jumped = self.passed = self.shifted = False  # in the last step: a jump, somebody back, a change point
        self.lasting = self.passing = 0.0  # disturbances that stayed, and that just passed
        self.limit = CHANGE_LIMIT + ln(max(workers, 1))

    @property
    def noise_W(self) -> np.ndarray:
        """Relative sd of one timing of each worker."""
        return self.noise * np.sqrt(self.ratio_W)

    @property
    def known(self) -> bool:
        return bool(self.seen_W.any())

    def costs(self) -> tuple[np.ndarray, np.ndarray]:
        """(startup_W, per_work_W); a worker never timed counts as the mean of the others."""
        known_W = self.seen_W > 0
        if known_W.all():
            return self.startup_W, self.per_work_W
        number = max(int(known_W.sum()), 1)
        startup = float(self.startup_W[known_W].sum()) / number
        per_work = float(self.per_work_W[known_W].sum()) / number
        return np.where(known_W, self.startup_W, startup), np.where(known_W, self.per_work_W, per_work)

    def relative_sd(self, work_W: np.ndarray) -> np.ndarray:
        """Posterior sd of the expected time at this work, relative to it; 1 where nothing is known."""
        time_W = self.startup_W + self.per_work_W * work_W
        var_W = self.var_ss_W + work_W * (2.0 * self.var_sp_W + work_W * self.var_pp_W)
        known_W = (self.seen_W > 0) & (time_W > 0)
        return np.where(known_W, np.sqrt(np.maximum(var_W, 0.0)) / np.where(known_W, time_W, 1.0), 1.0)

    def observe(self, work_W: np.ndarray, times_W: np.ndarray, valid_W: np.ndarray) -> None:
        """Learn the times of one step. Entries outside `valid_W` are not looked at."""
        self.jumped = self.passed = self.shifted = False
        valid_W = valid_W & (work_W > 0)
        first_W = valid_W & (self.seen_W == 0)
        later_W = valid_W & ~first_W
        times_W = np.minimum(np.maximum(np.where(valid_W, times_W, 1.0), SHORTEST), LONGEST)
        work_W = np.where(valid_W, work_W, 1.0)
        if later_W.any():
            self._learn(work_W, times_W, later_W)
        if first_W.any():
            self._begin(work_W, times_W, first_W)
        self.seen_W = self.seen_W + valid_W

    def _begin(self, x_W: np.ndarray, t_W: np.ndarray, first_W: np.ndarray) -> None:
        """startup = 0.05 t (sd 0.15 t) and startup + per_work x = t (sd sigma t), independent."""
        own_W = STARTUP_SD * STARTUP_SD * t_W * t_W
        self.startup_W = np.where(first_W, STARTUP_SHARE * t_W, self.startup_W)
        self.per_work_W = np.where(first_W, (1.0 - STARTUP_SHARE) * t_W / x_W, self.per_work_W)
        self.var_ss_W = np.where(first_W, own_W, self.var_ss_W)
        self.var_sp_W = np.where(first_W, -own_W / x_W, self.var_sp_W)
        self.var_pp_W = np.where(
            first_W, (own_W + self.noise * self.noise * self.ratio_W * t_W * t_W) / (x_W * x_W), self.var_pp_W
        )

    def _without_common(self, x_W: np.ndarray, t_W: np.ndarray, on_W: np.ndarray) -> np.ndarray:
        """The timings with what is common to all divided out but for the tenth that is learned."""
        seen_W, on_W = on_W, on_W & ~self.doubt_W
        number = int(on_W.sum())
        if number < 2:
            return t_W
        time_W = np.where(on_W, self.startup_W + self.per_work_W * x_W, 1.0)
        own_W = np.where(on_W, np.square(self.relative_sd(x_W)) + np.square(self.noise_W), 1.0)
        limit_W = CLIP * np.sqrt(own_W + self.common)
        r_W = np.where(on_W, t_W / time_W - 1.0, 0.0)
        mild_W = _within(r_W, limit_W)
        sum_r = float(mild_W.sum())
        pairs = (sum_r * sum_r - float((mild_W * mild_W).sum())) / (number * (number - 1))
        factor = 1.0 + self._event(r_W[on_W], float(limit_W[on_W].sum()) / number)
        if self.common > 0:
            rest_W = np.where(on_W, _within((1.0 + r_W) / factor - 1.0, limit_W) / own_W, 0.0)
            factor *= 1.0 + float(rest_W.sum()) / (1.0 / self.common + float((on_W / own_W).sum()))
        self.common_weight = min(self.common_weight + 1.0, NOISE_MEMORY)
        self.common = max(self.common + (pairs - self.common) / self.common_weight, 0.0)
        learned = 1.0 + min(0.1 * (factor - 1.0), MOST_LEARNED)
        self._scale(np.where(seen_W, learned, 1.0))
        self.kept_5xW[:2] *= np.where(seen_W, learned, 1.0)
        return t_W * (learned / factor)

    def _event(self, r_N: np.ndarray, limit: float) -> float:
        """How far most of the workers were off to the same side, if that is outside the noise; else 0."""
        number, most = len(r_N), len(r_N) // 2 + 1
        r_N = np.sort(r_N, kind="stable")
        least, highest = float(r_N[number - most]), float(r_N[most - 1])
        return least if least > limit else highest if highest < -limit else 0.0

    def _learn(self, x_W: np.ndarray, t_W: np.ndarray, on_W: np.ndarray) -> None:
        t_W = self._without_common(x_W, t_W, on_W)
        if self.away_W.any():
            self._who_is_back(x_W, t_W, on_W)
        self.doubt_W = self.doubt_W & ~on_W
        self._forget(on_W)
        self._return(x_W, on_W)
        time_W = np.where(on_W, self.startup_W + self.per_work_W * x_W, 1.0)
        gain_s_W = self.var_ss_W + x_W * self.var_sp_W  # P h'
        gain_p_W = self.var_sp_W + x_W * self.var_pp_W
        spread_W = gain_s_W + x_W * gain_p_W  # h P h'
        own_W = self.noise * self.noise * self.ratio_W * time_W * time_W
        total_W = np.where(on_W, spread_W + own_W, 1.0)
        sd_W = np.sqrt(total_W)
        z_W = np.where(on_W, (t_W - time_W) / sd_W, 0.0)
        ratio_W = t_W / time_W
        off_W = (ratio_W > 1.0 + JUMP_RATIO) | (ratio_W < 1.0 / (1.0 + JUMP_RATIO))
        # (r - 1) / sqrt r is close to ln r: noise on times is skew, that on their logarithms is not.
        even_W = np.where(on_W, z_W / np.sqrt(ratio_W), 0.0)
        jump_W = on_W & off_W & (np.abs(even_W) > JUMP_Z)
        learn_W = on_W & ~jump_W
        step_W = np.where(learn_W, _within(z_W, CLIP) / sd_W, 0.0)
        self.startup_W = self.startup_W + gain_s_W * step_W
        self.per_work_W = self.per_work_W + gain_p_W * step_W
        shrink_W = np.where(learn_W, 1.0 / total_W, 0.0)
        self.var_ss_W = self.var_ss_W - gain_s_W * gain_s_W * shrink_W
        self.var_sp_W = self.var_sp_W - gain_s_W * gain_p_W * shrink_W
        self.var_pp_W = self.var_pp_W - gain_p_W * gain_p_W * shrink_W
        self._keep_positive(x_W, learn_W)
        self._learn_noise(z_W, own_W / total_W, learn_W)
        if jump_W.any():
            self._jump(jump_W, ratio_W)
        same_W = np.abs(x_W - self.work_W) <= 0.02 * x_W
        self.steady_W = np.where(on_W, np.where(same_W, self.steady_W + 1, 0), self.steady_W)
        self.work_W = np.where(on_W, x_W, self.work_W)
        mild_W = np.where(learn_W, _within(even_W, CHANGE_CLIP), 0.0)
        self._change_point(mild_W, sd_W / time_W, learn_W, jump_W)

    def _forget(self, on_W: np.ndarray, drift: float | np.ndarray = DRIFT) -> None:
        square_W = np.where(on_W, drift * drift, 0.0)
        self.var_ss_W = self.var_ss_W + square_W * self.startup_W * self.startup_W
        self.var_sp_W = self.var_sp_W + square_W * self.startup_W * self.per_work_W
        self.var_pp_W = self.var_pp_W + square_W * self.per_work_W * self.per_work_W

    def _return(self, x_W: np.ndarray, on_W: np.ndarray) -> None:
        """In coordinates (v, a) = (time at x, startup): a and its covariances go a step back to the prior, v stays."""
        keep = 1.0 - RETURN
        v_W = self.startup_W + self.per_work_W * x_W
        var_va_W = self.var_ss_W + x_W * self.var_sp_W
        var_vv_W = var_va_W + x_W * (self.var_sp_W + x_W * self.var_pp_W)
        prior_W = STARTUP_SD * STARTUP_SD * v_W * v_W
        self.startup_W = np.where(on_W, keep * self.startup_W + (1.0 - keep) * STARTUP_SHARE * v_W, self.startup_W)
        self.per_work_W = np.where(on_W, (v_W - self.startup_W) / x_W, self.per_work_W)
        self.var_ss_W = np.where(on_W, keep * keep * self.var_ss_W + (1.0 - keep * keep) * prior_W, self.var_ss_W)
        var_va_W = keep * var_va_W
        self.var_sp_W = np.where(on_W, (var_va_W - self.var_ss_W) / x_W, self.var_sp_W)
        self.var_pp_W = np.where(on_W, (var_vv_W - 2.0 * var_va_W + self.var_ss_W) / (x_W * x_W), self.var_pp_W)

    def _keep_positive(self, x_W: np.ndarray, on_W: np.ndarray) -> None:
        """No negative startup, and always some cost per work: move the excess from the one to the other."""
        time_W = self.startup_W + self.per_work_W * x_W
        least_W = 0.02 * np.abs(time_W) / x_W
        startup_W = np.where(on_W, np.maximum(self.startup_W, 0.0), self.startup_W)
        per_work_W = np.where(on_W & (startup_W != self.startup_W), time_W / x_W, self.per_work_W)
        low_W = on_W & (per_work_W < least_W)
        self.per_work_W = np.where(low_W, least_W, per_work_W)
        self.startup_W = np.where(low_W, 0.98 * np.abs(time_W), startup_W)

    def _learn_noise(self, z_W: np.ndarray, part_W: np.ndarray, on_W: np.ndarray) -> None:
        """sigma^2 grows by the surprise z^2 - 1, clipped, times its part in S; a worker's own factor does so slowly."""
        number = int(on_W.sum())
        if number == 0:
            return
        surprise_W = np.where(on_W, part_W * (np.minimum(z_W * z_W, CLIP * CLIP) - 1.0), 0.0)
        self.weight = min(self.weight + number, NOISE_MEMORY * number)
        variance = self.noise * self.noise * (1.0 + float(surprise_W.sum()) / self.weight)
        self.noise = float(np.sqrt(max(variance, 1e-8)))
        weight_W = np.minimum(OWN_WEIGHT + self.seen_W, NOISE_MEMORY)
        ratio_W = self.ratio_W * (1.0 + surprise_W / weight_W)
        ratio_W = np.minimum(np.maximum(ratio_W, 0.05), 20.0)
        mean = float(ratio_W[on_W].sum()) / float(self.ratio_W[on_W].sum())  # which is the common one's business
        self.ratio_W = np.where(on_W, ratio_W / mean, self.ratio_W)

    def _jump(self, jump_W: np.ndarray, ratio_W: np.ndarray) -> None:
        self._leave(jump_W, 1)
        self.doubt_W = self.doubt_W | jump_W
        self.jumped = True
        self._rescale(jump_W, ratio_W, self.noise_W)

    def _now_5xW(self) -> np.ndarray:
        return np.stack([self.startup_W, self.per_work_W, self.var_ss_W, self.var_sp_W, self.var_pp_W])

    def _leave(self, who_W: np.ndarray, timings: int | np.ndarray) -> None:
        """Keep the model that these workers left so many timings ago, unless they are away already."""
        who_W = who_W & (self.away_W == 0)
        self.kept_5xW = np.where(who_W, self._now_5xW(), self.kept_5xW)
        self.away_W = np.where(who_W, timings, self.away_W)
        self.evidence_W = np.where(who_W, 0.0, self.evidence_W)

    def _rescale(self, who_W: np.ndarray, ratio_W: np.ndarray, sd: float | np.ndarray) -> None:
        """theta *= ratio, and the new scale is known to a relative sd."""
        self._scale(np.where(who_W, ratio_W, 1.0))
        self._forget(who_W, sd)

    def _scale(self, ratio: float | np.ndarray) -> None:
        self.startup_W, self.per_work_W = self.startup_W * ratio, self.per_work_W * ratio
        square = ratio * ratio
        self.var_ss_W, self.var_sp_W = self.var_ss_W * square, self.var_sp_W * square
        self.var_pp_W = self.var_pp_W * square

    def _who_is_back(self, x_W: np.ndarray, t_W: np.ndarray, on_W: np.ndarray) -> None:
        """Give workers that are away the model back that they had, where the timings fit it again."""
        asked_W = (self.away_W > 0) & on_W
        noise_W = self.noise * self.noise * self.ratio_W
        now_5xW = self._now_5xW()
        square_W, kept_square_W = (_surprise(m_5xW, x_W, t_W, noise_W, asked_W) for m_5xW in (now_5xW, self.kept_5xW))
        self.evidence_W = np.maximum(self.evidence_W + 0.5 * (square_W - kept_square_W), 0.0)
        back_W = asked_W & (self.evidence_W > BACK_LIMIT)
        restored_5xW = np.where(back_W, self.kept_5xW, now_5xW)
        self.startup_W, self.per_work_W, self.var_ss_W, self.var_sp_W, self.var_pp_W = restored_5xW
        self.passed = bool(back_W.any())
        self.passing += float((back_W & (self.away_W <= PASSING)).sum())
        self.lasting += float((asked_W & ~back_W & (self.away_W == PASSING)).sum())
        self.away_W = np.where(back_W | (self.away_W >= AWAY), 0, self.away_W + asked_W)
        self.sums_2xSxW = np.where(back_W, 0.0, self.sums_2xSxW)
        self.age_W = np.where(back_W, 0, self.age_W)

    def _change_point(self, z_W: np.ndarray, relative_W: np.ndarray, on_W: np.ndarray, reset_W: np.ndarray) -> None:
        """Window sums of z on dyadic scales: the last s + 1 .. 2 s steps for s = 1, 2, 4, ..., 32."""
        self.clock += 1
        self.age_W = np.where(reset_W, 0, self.age_W + on_W)
        sums_2xSxW = np.where(reset_W, 0.0, self.sums_2xSxW)
        sums_2xSxW[1] += z_W
        length_SxW = np.maximum(np.minimum(self.age_W, (_SCALES_S + 1 + (self.clock - 1) % _SCALES_S)[:, None]), 1)
        sum_SxW = sums_2xSxW[0] + sums_2xSxW[1]
        ratio_SxW = np.where(length_SxW >= 2, sum_SxW * sum_SxW / (2.0 * length_SxW), 0.0)
        changed_W = on_W & (ratio_SxW.max(axis=0) > self.limit)
        full_S = self.clock % _SCALES_S == 0
        sums_2xSxW[0, full_S] = sums_2xSxW[1, full_S]
        sums_2xSxW[1, full_S] = 0.0
        if changed_W.any():
            # Soon after new counts it is the model that was wrong about them, not the world that has changed.
            self.shifted = bool(np.any(changed_W & (self.steady_W >= STEADY)))
            likeliest = ratio_SxW.argmax(axis=0), np.arange(len(z_W))
            length_W = length_SxW[likeliest]
            log_W = sum_SxW[likeliest] / length_W * relative_W
            self._leave(changed_W & (self.steady_W >= STEADY), length_W)
            self._rescale(changed_W, 1.0 + log_W + 0.5 * log_W * log_W, self.noise_W / np.sqrt(length_W))  # about exp
            sums_2xSxW = np.where(changed_W, 0.0, sums_2xSxW)
            self.age_W = np.where(changed_W, 0, self.age_W)
        self.sums_2xSxW = sums_2xSxW

    def state_dict(self) -> dict[str, Any]:
        plain = lambda v: v.tolist() if isinstance(v, np.ndarray) else v
        return {name: plain(getattr(self, name)) for name in self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.saved:
            value = state.get(name, getattr(self, name))  # what an older version did not save starts afresh
            setattr(self, name, np.array(value) if isinstance(value, list) else value)


def _surprise(m_5xW: np.ndarray, x_W: np.ndarray, t_W: np.ndarray, noise_W: np.ndarray, on_W: np.ndarray) -> np.ndarray:
    """z^2 of a timing under a model, clipped; `noise_W` is the relative variance of one timing."""
    startup_W, per_work_W, var_ss_W, var_sp_W, var_pp_W = m_5xW
    time_W = np.where(on_W, startup_W + per_work_W * x_W, 1.0)
    spread_W = var_ss_W + x_W * (2.0 * var_sp_W + x_W * var_pp_W)
    ratio_W = np.where(on_W, t_W / time_W, 1.0)
    square_W = (ratio_W - 1.0) * (ratio_W - 1.0) / (ratio_W * (noise_W + spread_W / (time_W * time_W)))
    return np.minimum(square_W, CHANGE_CLIP * CHANGE_CLIP)


def _within(x_W: np.ndarray, limit: float | np.ndarray) -> np.ndarray:
    """As np.clip, which takes ten times as long for a few workers."""
    return np.minimum(np.maximum(x_W, -limit), limit)
