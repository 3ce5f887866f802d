"""Equal against balanced counts: a CNN on digits, relative speeds 1, 1, 0.5 and 0.25.

command   hetjax train --config digits          (the same as without --config)
run time  under a minute on two cores
expected  efficiency about 35% with equal and above 85% with balanced counts; equal losses; test accuracy 0.98
"""

from hetjax.cli.training.configs import Config

CONFIG = Config()
