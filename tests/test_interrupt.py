"""Signals as a wish to end."""

import os
import signal

import pytest

from hetjax.interrupt import stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_is_a_wish_and_the_second_ends_at_once(number):
    wishes, before = [], signal.getsignal(number)
    with stop_on_signals(lambda: wishes.append(number)) as interrupt:
        os.kill(os.getpid(), number)
        assert interrupt.requested
        assert wishes == [number]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_a_hangup_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals(lambda: None) as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupt.requested
    finally:
        signal.signal(signal.SIGHUP, before)
