"""Signals request a stop."""

import os
import signal

import pytest

from hetjax.interrupt import stop_on_signals


@pytest.fixture(autouse=True)
def handled_hangup():
    """Tests may run under nohup, which ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_requests_a_stop_and_the_second_ends_the_program(number):
    stops, before = [], signal.getsignal(number)
    with stop_on_signals(lambda: stops.append(number)) as interrupt:
        os.kill(os.getpid(), number)
        assert interrupt.requested
        assert stops == [number]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_an_ignored_hangup_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_on_signals(lambda: None) as interrupt:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not interrupt.requested
