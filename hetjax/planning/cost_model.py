"""What each worker costs, learned online: t = startup + per_work x, for x the work of its samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

FIRST_NOISE = 0.12  # relative sd of a timing before any was seen, with the weight of FIRST_WEIGHT timings
FIRST_WEIGHT = 8.0
COMMON_WEIGHT = 16.0  # weight of the prior "no common noise", in steps
OWN_WEIGHT = 32.0  # weight of the common noise as a prior for a single worker, in timings
STARTUP_SHARE, STARTUP_SD = 0.05, 0.15  # prior of the startup, relative to the first time
DRIFT = 0.0005  # relative sd per step of a worker's speed
RETURN = 0.005  # fraction of the way back to its prior that the startup goes per step
CLIP = 3.0
JUMP_Z, JUMP_RATIO = 5.0, 0.2
MOST_LEARNED = 0.2  # of a common slowdown, in one step: a hiccup of 40x says little about the next step
CHANGE_LIMIT, CHANGE_CLIP, CHANGE_SCALES = 12.0, 4.0, 6
BACK_LIMIT = 6.0  # evidence for the saved model at which it is restored
PASSING, AWAY = 4, 64  # timings of the longest disturbance that counts as passing, and of the longest one remembered
SHORTEST, LONGEST = 1e-6, 1e6  # seconds; timings are clipped to this range, so nothing overflows
STEADY = 24  # timings at the same work before a change point counts as a change of the worker
NOISE_MEMORY = 400.0  # steps
_SCALES_S = 1 << np.arange(CHANGE_SCALES)


def ln(x: float) -> float:
    """Natural logarithm from + - * / only: library logarithms differ in the last bit between processors.

    ln x = e ln 2 + 2 artanh((m - 1) / (m + 1)) with x = m 2^e, 1/sqrt 2 <= m < sqrt 2, by its series.
    """
    m, e = math.frexp(x)
    if m < 0.7071067811865476:
        m, e = 2.0 * m, e - 1
    z = (m - 1.0) / (m + 1.0)
    square, total = z * z, 0.0
    for k in range(25, 0, -2):
        total = total * square + 1.0 / k
    return e * 0.6931471805599453 + 2.0 * z * total


@dataclass(init=False, eq=False)
class CostModel:
    """Startup and cost per work of every worker with their uncertainty, updated once per step.

    Bayesian recursive least squares on h = (1, x) per worker, all workers at once. Notation: theta = (startup,
    per_work), P its covariance, s = sigma (startup + per_work x) the sd of one timing, sigma the worker's relative
    noise: a common value learned fast, times a factor per worker learned slowly.

        innovation  e = t - h theta,  S = h P h' + s^2,  z = e / sqrt S, clipped at 3
        update      theta += P h' z / sqrt S,  P -= P h' h P / S
        forgetting  P += q^2 theta theta'; and the startup returns to its prior at rate r, the time at x unchanged

    Forgetting acts along theta: a worker may become faster or slower as a whole. The split of its time into startup
    and per_work returns to the prior, mean and sd: a constant x says nothing about it (forgetting all of P would wind
    it up without bound), and a split that a drift has produced must not be trusted forever.

    Common noise: workers on one machine, or behind one switch, are also slow together, t = (1 + c) (h theta + own
    noise) with c of mean 0 and sd tau, drawn for each step. It says nothing about shares, so its best estimate is
    divided out first:

        c = sum(r / v) / (1 / tau^2 + sum(1 / v))      r = e / (h theta), v its variance without c, r / sd clipped at 3
        tau^2 = mean over steps of r_i r_j, i not j

    A deviation far outside the noise that most workers share is divided out whole. A tenth of what is divided out is
    learned, in case it lasts, by the workers that were timed: nothing would correct the model of the others.

    Two tests run beside the filter, on (nearly) the logarithm of times, whose noise is not skewed. Jump: a timing far
    outside the noise rescales its worker at once. Change point: the sum of the last z over windows of 2 to 64 steps; a
    likelihood ratio above 12 + ln N rescales the worker by the mean of that window.

    Either way the worker is AWAY: it deviates from its saved model, which is restored when the timings fit it better:

        evidence = max(0, evidence + (z_now^2 - z_saved^2) / 2), z clipped at 4;  restored above 6

    A disturbance of up to 64 timings therefore leaves no trace.

    Only float64 + - * / sqrt and comparisons are used, so that unlike hosts agree to the bit. The fields are what a
    checkpoint holds.
    """

    startup_W: np.ndarray
    per_work_W: np.ndarray
    var_ss_W: np.ndarray  # P
    var_sp_W: np.ndarray
    var_pp_W: np.ndarray
    seen_W: np.ndarray  # number of timings
    noise: float  # common relative sd of one timing
    weight: float
    ratio_W: np.ndarray  # a worker's noise variance over the common one
    doubt_W: np.ndarray  # rescaled by its last timing alone
    kept_5xW: np.ndarray  # saved models: startup, per_work and P
    away_W: np.ndarray  # timings since the worker left its saved model; 0: it has none
    evidence_W: np.ndarray  # for the saved model
    lasting: float  # number of disturbances that lasted
    passing: float  # number of disturbances that passed
    sums_2xSxW: np.ndarray  # sums of z per scale: the last full block, and the block now filling
    clock: int
    age_W: np.ndarray  # timings in those sums
    work_W: np.ndarray  # the last work
    steady_W: np.ndarray  # timings since it changed
    jumped: bool  # in the last step: some worker jumped
    passed: bool  # in the last step: some worker is back at its saved model
    shifted: bool  # in the last step: some worker has a change point
    common: float  # tau^2
    common_weight: float

    def __init__(self, workers: int) -> None:
        zero_W, none_W = np.zeros(workers), np.zeros(workers, np.int64)
        self.startup_W, self.per_work_W = zero_W, zero_W
        self.var_ss_W, self.var_sp_W, self.var_pp_W = zero_W, zero_W, zero_W
        self.seen_W = none_W
        self.noise, self.weight = FIRST_NOISE, FIRST_WEIGHT
        self.common, self.common_weight = 0.0, COMMON_WEIGHT
        self.ratio_W = np.ones(workers)
        self.doubt_W = np.zeros(workers, bool)
        self.kept_5xW, self.away_W, self.evidence_W = np.zeros((5, workers)), none_W, zero_W
        self.sums_2xSxW = np.zeros((2, CHANGE_SCALES, workers))
        self.clock, self.age_W = 0, none_W
        self.work_W, self.steady_W = zero_W, none_W
        self.jumped = self.passed = self.shifted = False
        self.lasting = self.passing = 0.0
        self._change_limit = CHANGE_LIMIT + ln(max(workers, 1))

    @property
    def noise_W(self) -> np.ndarray:
        """Relative sd of one timing of each worker."""
        return self.noise * np.sqrt(self.ratio_W)

    @property
    def known(self) -> bool:
        """Whether any worker has been timed."""
        return bool(self.seen_W.any())

    def costs(self) -> tuple[np.ndarray, np.ndarray]:
        """(startup_W, per_work_W); a worker without a timing gets the mean of the others."""
        known_W = self.seen_W > 0
        if known_W.all():
            return self.startup_W, self.per_work_W
        number = max(int(known_W.sum()), 1)
        startup = float(self.startup_W[known_W].sum()) / number
        per_work = float(self.per_work_W[known_W].sum()) / number
        return np.where(known_W, self.startup_W, startup), np.where(known_W, self.per_work_W, per_work)

    def relative_sd(self, work_W: np.ndarray) -> np.ndarray:
        """Posterior sd of the expected time at this work, relative to it; 1 without a timing."""
        time_W = self.startup_W + self.per_work_W * work_W
        var_W = self.var_ss_W + work_W * (2.0 * self.var_sp_W + work_W * self.var_pp_W)
        known_W = (self.seen_W > 0) & (time_W > 0)
        return np.where(known_W, np.sqrt(np.maximum(var_W, 0.0)) / np.where(known_W, time_W, 1.0), 1.0)

    def observe(self, work_W: np.ndarray, times_W: np.ndarray, valid_W: np.ndarray) -> None:
        """Learn the times of one step. Entries outside `valid_W` are ignored."""
        self.jumped = self.passed = self.shifted = False
        valid_W = valid_W & (work_W > 0)
        first_W = valid_W & (self.seen_W == 0)
        later_W = valid_W & ~first_W
        times_W = np.minimum(np.maximum(np.where(valid_W, times_W, 1.0), SHORTEST), LONGEST)
        work_W = np.where(valid_W, work_W, 1.0)
        if later_W.any():
            self._learn(work_W, times_W, later_W)
        if first_W.any():
            self._initialize(work_W, times_W, first_W)
        self.seen_W = self.seen_W + valid_W

    def _initialize(self, x_W: np.ndarray, t_W: np.ndarray, first_W: np.ndarray) -> None:
        """The prior: startup = 0.05 t (sd 0.15 t) and startup + per_work x = t (sd sigma t), independent."""
        own_W = STARTUP_SD * STARTUP_SD * t_W * t_W
        self.startup_W = np.where(first_W, STARTUP_SHARE * t_W, self.startup_W)
        self.per_work_W = np.where(first_W, (1.0 - STARTUP_SHARE) * t_W / x_W, self.per_work_W)
        self.var_ss_W = np.where(first_W, own_W, self.var_ss_W)
        self.var_sp_W = np.where(first_W, -own_W / x_W, self.var_sp_W)
        self.var_pp_W = np.where(
            first_W, (own_W + self.noise * self.noise * self.ratio_W * t_W * t_W) / (x_W * x_W), self.var_pp_W
        )

    def _without_common(self, x_W: np.ndarray, t_W: np.ndarray, on_W: np.ndarray) -> np.ndarray:
        """The timings without the common noise, except for the tenth of it that is learned."""
        timed_W, on_W = on_W, on_W & ~self.doubt_W
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
        factor = 1.0 + _shared_deviation(r_W[on_W], float(limit_W[on_W].sum()) / number)
        if self.common > 0:
            rest_W = np.where(on_W, _within((1.0 + r_W) / factor - 1.0, limit_W) / own_W, 0.0)
            factor *= 1.0 + float(rest_W.sum()) / (1.0 / self.common + float((on_W / own_W).sum()))
        self.common_weight = min(self.common_weight + 1.0, NOISE_MEMORY)
        self.common = max(self.common + (pairs - self.common) / self.common_weight, 0.0)
        learned = 1.0 + min(0.1 * (factor - 1.0), MOST_LEARNED)
        self._scale(np.where(timed_W, learned, 1.0))
        self.kept_5xW[:2] *= np.where(timed_W, learned, 1.0)
        return t_W * (learned / factor)

    def _learn(self, x_W: np.ndarray, t_W: np.ndarray, on_W: np.ndarray) -> None:
        t_W = self._without_common(x_W, t_W, on_W)
        if self.away_W.any():
            self._restore(x_W, t_W, on_W)
        self.doubt_W = self.doubt_W & ~on_W
        self._forget(on_W)
        self._return_to_prior(x_W, on_W)
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
        # (r - 1) / sqrt r is close to ln r: noise on times is skewed, noise on their logarithms is not.
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
        """P += q^2 theta theta'."""
        square_W = np.where(on_W, drift * drift, 0.0)
        self.var_ss_W = self.var_ss_W + square_W * self.startup_W * self.startup_W
        self.var_sp_W = self.var_sp_W + square_W * self.startup_W * self.per_work_W
        self.var_pp_W = self.var_pp_W + square_W * self.per_work_W * self.per_work_W

    def _return_to_prior(self, x_W: np.ndarray, on_W: np.ndarray) -> None:
        """In coordinates (v, a) = (time at x, startup): a and its covariances move toward the prior, v is unchanged."""
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
        """Startup >= 0 and per_work > 0, at the same time for x: move the excess from one to the other."""
        time_W = self.startup_W + self.per_work_W * x_W
        least_W = 0.02 * np.abs(time_W) / x_W
        startup_W = np.where(on_W, np.maximum(self.startup_W, 0.0), self.startup_W)
        per_work_W = np.where(on_W & (startup_W != self.startup_W), time_W / x_W, self.per_work_W)
        low_W = on_W & (per_work_W < least_W)
        self.per_work_W = np.where(low_W, least_W, per_work_W)
        self.startup_W = np.where(low_W, 0.98 * np.abs(time_W), startup_W)

    def _learn_noise(self, z_W: np.ndarray, part_W: np.ndarray, on_W: np.ndarray) -> None:
        """sigma^2 grows by z^2 - 1, clipped, times its part in S; the worker's own factor does so slowly."""
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
        mean = float(ratio_W[on_W].sum()) / float(self.ratio_W[on_W].sum())  # the mean belongs to the common noise
        self.ratio_W = np.where(on_W, ratio_W / mean, self.ratio_W)

    def _jump(self, jump_W: np.ndarray, ratio_W: np.ndarray) -> None:
        """Rescale workers by their last timing."""
        self._save(jump_W, 1)
        self.doubt_W = self.doubt_W | jump_W
        self.jumped = True
        self._rescale(jump_W, ratio_W, self.noise_W)

    def _now_5xW(self) -> np.ndarray:
        """The models as `kept_5xW` holds them."""
        return np.stack([self.startup_W, self.per_work_W, self.var_ss_W, self.var_sp_W, self.var_pp_W])

    def _save(self, who_W: np.ndarray, timings: int | np.ndarray) -> None:
        """Save the model of these workers, which they left `timings` ago, unless they have a saved one already."""
        who_W = who_W & (self.away_W == 0)
        self.kept_5xW = np.where(who_W, self._now_5xW(), self.kept_5xW)
        self.away_W = np.where(who_W, timings, self.away_W)
        self.evidence_W = np.where(who_W, 0.0, self.evidence_W)

    def _rescale(self, who_W: np.ndarray, ratio_W: np.ndarray, sd: float | np.ndarray) -> None:
        """Scale theta by `ratio_W`, known to a relative sd."""
        self._scale(np.where(who_W, ratio_W, 1.0))
        self._forget(who_W, sd)

    def _scale(self, ratio: float | np.ndarray) -> None:
        self.startup_W, self.per_work_W = self.startup_W * ratio, self.per_work_W * ratio
        square = ratio * ratio
        self.var_ss_W, self.var_sp_W = self.var_ss_W * square, self.var_sp_W * square
        self.var_pp_W = self.var_pp_W * square

    def _restore(self, x_W: np.ndarray, t_W: np.ndarray, on_W: np.ndarray) -> None:
        """Restore the saved model of workers whose timings fit it again."""
        deviating_W = (self.away_W > 0) & on_W
        noise_W = self.noise * self.noise * self.ratio_W
        now_5xW = self._now_5xW()
        now_W = _surprise(now_5xW, x_W, t_W, noise_W, deviating_W)
        kept_W = _surprise(self.kept_5xW, x_W, t_W, noise_W, deviating_W)
        self.evidence_W = np.maximum(self.evidence_W + 0.5 * (now_W - kept_W), 0.0)
        back_W = deviating_W & (self.evidence_W > BACK_LIMIT)
        models_5xW = np.where(back_W, self.kept_5xW, now_5xW)
        self.startup_W, self.per_work_W, self.var_ss_W, self.var_sp_W, self.var_pp_W = models_5xW
        self.passed = bool(back_W.any())
        self.passing += float((back_W & (self.away_W <= PASSING)).sum())
        self.lasting += float((deviating_W & ~back_W & (self.away_W == PASSING)).sum())
        self.away_W = np.where(back_W | (self.away_W >= AWAY), 0, self.away_W + deviating_W)
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
        changed_W = on_W & (ratio_SxW.max(axis=0) > self._change_limit)
        full_S = self.clock % _SCALES_S == 0
        sums_2xSxW[0, full_S] = sums_2xSxW[1, full_S]
        sums_2xSxW[1, full_S] = 0.0
        if changed_W.any():
            # Soon after new counts the model was wrong about them; the worker has not changed.
            self.shifted = bool(np.any(changed_W & (self.steady_W >= STEADY)))
            likeliest = ratio_SxW.argmax(axis=0), np.arange(len(z_W))
            length_W = length_SxW[likeliest]
            log_W = sum_SxW[likeliest] / length_W * relative_W
            self._save(changed_W & (self.steady_W >= STEADY), length_W)
            self._rescale(changed_W, 1.0 + log_W + 0.5 * log_W * log_W, self.noise_W / np.sqrt(length_W))  # about exp
            sums_2xSxW = np.where(changed_W, 0.0, sums_2xSxW)
            self.age_W = np.where(changed_W, 0, self.age_W)
        self.sums_2xSxW = sums_2xSxW


def _surprise(m_5xW: np.ndarray, x_W: np.ndarray, t_W: np.ndarray, noise_W: np.ndarray, on_W: np.ndarray) -> np.ndarray:
    """z^2 of a timing under a model, clipped; `noise_W` is the relative variance of one timing."""
    startup_W, per_work_W, var_ss_W, var_sp_W, var_pp_W = m_5xW
    time_W = np.where(on_W, startup_W + per_work_W * x_W, 1.0)
    spread_W = var_ss_W + x_W * (2.0 * var_sp_W + x_W * var_pp_W)
    ratio_W = np.where(on_W, t_W / time_W, 1.0)
    square_W = (ratio_W - 1.0) * (ratio_W - 1.0) / (ratio_W * (noise_W + spread_W / (time_W * time_W)))
    return np.minimum(square_W, CHANGE_CLIP * CHANGE_CLIP)


def _within(x_W: np.ndarray, limit: float | np.ndarray) -> np.ndarray:
    """np.clip, which takes ten times as long for a few workers."""
    return np.minimum(np.maximum(x_W, -limit), limit)


def _shared_deviation(r_N: np.ndarray, limit: float) -> float:
    """The deviation that more than half of the workers reach, on the same side and beyond the limit; else 0."""
    number, most = len(r_N), len(r_N) // 2 + 1
    r_N = np.sort(r_N, kind="stable")
    least, highest = float(r_N[number - most]), float(r_N[most - 1])
    return least if least > limit else highest if highest < -limit else 0.0
