"""A worker slows down in the middle of a run, another one recovers: the counts follow.

command   python experiments/train.py --config digits_slowdown
run time  half a minute on two cores
expected  run.png: within a few steps the counts of worker 1 fall at step 60 and those of worker 3 rise at step 120
"""

from pathlib import Path

from training.configs import Config, Data, Method, Workers

TRACE = Path(__file__).parents[1] / "traces" / "slowdown.json"
CONFIG = Config(data=Data(steps=180), workers=Workers(trace=TRACE), method=Method(strategy="balanced"))
