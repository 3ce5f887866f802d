"""Formats of numbers between processes: against references of their own, and with error feedback."""

import struct
import tracemalloc
from fractions import Fraction

import jax
import numpy as np
import optax
import pytest

import hetjax
from hetjax.reduce import wire
from hetjax.reduce.wire import BLOCK, FORMATS, WIRES, Cut

SEED = 11


def values(size, spread=3.0):
    rng = np.random.default_rng(SEED)
    return (rng.normal(size=size) * np.exp(spread * rng.normal(size=size))).astype(np.float32)


def decoded(name, x):
    form = FORMATS[name]
    frames = [np.frombuffer(bytes(frame), np.uint8) for frame in form.encode(x)]  # as they arrive
    return form.decode(frames, np.empty(len(x), np.float32))


def test_bfloat16_is_the_nearest_number_with_eight_bits_ties_to_even():
    special = np.array([0.0, -0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1e-40, -3.4e38, 3.5], np.float32)
    x = np.concatenate([special, values(500)])
    for found, given in zip(decoded("bfloat16", x), x, strict=True):
        bits = struct.unpack("<I", struct.pack("<f", given))[0]
        low, high = bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000
        rest = bits - low
        nearest = high if rest > 0x8000 or (rest == 0x8000 and (low >> 16) & 1) else low
        assert struct.pack("<f", found) == struct.pack("<I", nearest)


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 7, 2**16 + BLOCK + 3])
def test_int8_is_within_half_a_step_of_the_scale_of_its_block(size):
    x = values(size)
    found = decoded("int8", x)
    for start in range(0, size, BLOCK):
        block, mine = x[start : start + BLOCK], found[start : start + BLOCK]
        scale = Fraction(float(np.abs(block).max())) / 127
        for given, result in list(zip(block, mine, strict=True))[:: max(1, size // 500)]:
            assert abs(Fraction(float(given)) - Fraction(float(result))) <= scale * Fraction(50001, 100000)
        whole = mine / np.float32(float(scale))
        np.testing.assert_allclose(whole, np.rint(whole), atol=1e-4)
        assert np.abs(whole).max() <= 127.001


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_and_values_that_are_not_finite_never_become_finite(name):
    assert not decoded(name, np.zeros(700, np.float32)).any()
    assert not decoded(name, np.full(700, 1e-44, np.float32))[1:].any() or name == "bfloat16"
    for bad in (np.nan, np.inf, -np.inf):
        x = values(700)
        x[300] = bad
        assert not np.isfinite(decoded(name, x)[300])
        assert np.isfinite(decoded(name, x)[:BLOCK]).all()


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_sent_and_what_is_left_over_add_up(name):
    """Over steps of unlike sizes, of which one is left out: sum of c / samples + what is left = sum of g / samples."""
    cut, rng = Cut(FORMATS[name], [[300, 200]]), np.random.default_rng(SEED)
    sent, given = np.zeros(500), np.zeros(500)
    for step, samples in enumerate([32, 32, 5, 32, 17, 32]):
        runs = [rng.normal(size=300).astype(np.float32) * samples, rng.normal(size=200).astype(np.float32) * samples]
        before = {k: left.copy() for k, left in cut.left.items()}
        frames = cut.encoded(0, runs, samples)
        came = np.concatenate(cut.decoded(0, [bytes(frame) for frame in frames], False)).astype(np.float64)
        if step == 3:  # left out: its gradient is gone, what was left over is not
            cut.drop()
            np.testing.assert_array_equal(cut.left[0], before[0])
            continue
        cut.commit()
        sent, given = sent + came / samples, given + np.concatenate(runs).astype(np.float64) / samples
        np.testing.assert_allclose(sent + cut.left[0], given, atol=1e-5)
    last = cut.whole(0, None, 8) / 8  # a process that leaves
    cut.commit()
    np.testing.assert_allclose(sent + last, given, atol=1e-5)
    assert not cut.left


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_left_over_takes_four_bytes_per_parameter_between_steps(name):
    pieces, size = 8, 40_000
    runs_K = [[values(size)] for _ in range(pieces)]
    tracemalloc.start()
    try:
        cut = Cut(FORMATS[name], [[size]] * pieces)
        for _ in range(3):
            for k in range(pieces):
                cut.encoded(k, runs_K[k], 32)
            cut.commit()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(left.nbytes for left in cut.left.values()) == 4 * pieces * size
    assert held < 4 * (pieces + 2) * size + 50_000  # and room to work for two pieces


@pytest.mark.parametrize("name", FORMATS)
def test_parameters_follow_their_masters(name):
    """The error does not grow: what a difference leaves over is part of the next one."""
    cut, rng = Cut(FORMATS[name], [[400]]), np.random.default_rng(SEED)
    params, masters = np.zeros(400, np.float32), np.zeros(400, np.float32)
    for _ in range(50):
        masters = masters + 0.1 * rng.normal(size=400).astype(np.float32)
        frames = [bytes(frame) for frame in cut.differences(0, [masters], [params])]
        (moved,) = cut.moved(0, [params], frames)
        params = moved.copy()
    assert np.abs(params - masters).max() < {"bfloat16": 2e-3, "int8": 4e-3}[name]
    masters = masters.copy()
    (still,) = cut.moved(0, [params], cut.differences(0, [masters], [params]))
    assert np.abs(still - masters).max() < 3e-5


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [((0.1, 0.08, 0.07), "int8"), ((0.1, 0.08, 0.08), "float32"), ((0.1, 0.06, 0.05), "bfloat16")],
)
@pytest.mark.parametrize("scale", [1, 100])
def test_the_quickest_format_saves_a_quarter_and_long_exchanges_are_made_once(seconds, chosen, scale):
    made = []

    def seconds_of(name):
        made.append(name)
        warm_up = made.count(name) == 1 and scale == 1
        return 0.5 if warm_up else scale * dict(zip(WIRES, seconds, strict=True))[name]

    assert wire.quickest(seconds_of) == chosen
    assert made == [name for name in WIRES for _ in range(1 if scale > 1 else 4)]


@pytest.mark.parametrize("options", [{"wire": "int8"}, {"wire": "bfloat16"}, {"delay": 1}])
def test_options_of_the_exchange_are_refused_without_other_processes(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name}=.* is about the exchange between processes"):
        hetjax.Step(lambda p, b, k: b["x"] @ p, optax.sgd(0.1), batch_size=8, devices=jax.devices()[:2], **options)


@pytest.mark.parametrize(("name", "value", "text"), [("wire", "float16", "Unknown wire"), ("delay", 2, "must be 0")])
def test_unknown_options_of_the_exchange_are_refused(name, value, text):
    with pytest.raises(ValueError, match=text):
        hetjax.Step(lambda p, b, k: b["x"] @ p, optax.sgd(0.1), batch_size=8, **{name: value})
