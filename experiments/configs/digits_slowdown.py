"""A worker slows down during the run, another one recovers: the counts follow.

command   python experiments/train.py --config digits_slowdown
run time  half a minute on two cores
expected  in run.png the count of worker 1 falls within a few steps of step 60, that of worker 3 rises at step 120
"""

from pathlib import Path

from training.configs import Config, Data, Method, Workers

TRACE = Path(__file__).parents[1] / "traces" / "slowdown.json"
CONFIG = Config(data=Data(steps=180), workers=Workers(trace=TRACE), method=Method(strategy="balanced"))
