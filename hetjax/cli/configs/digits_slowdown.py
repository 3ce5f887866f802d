"""A worker slows down during the run, another one recovers: the counts follow.

command   hetjax train --config digits_slowdown
run time  half a minute on two cores
expected  in run.png the count of worker 1 falls within a few steps of step 60, that of worker 3 rises at step 120
"""

from pathlib import Path

from hetjax.cli.training.configs import Config, DataFlags, MethodFlags, WorkerFlags

TRACE = Path(__file__).with_name("slowdown.json")
CONFIG = Config(data=DataFlags(steps=180), workers=WorkerFlags(trace=TRACE), method=MethodFlags(strategy="balanced"))
