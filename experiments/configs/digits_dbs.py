"""A published method: DBS (arXiv 2007.11831), shares by throughput once an epoch, every worker its own shard.

command   python experiments/train.py --config digits_dbs
run time  22 s on two cores
expected  equal counts in the first epoch, near the balanced ones from the second on; 67% of the
          ideal, test accuracy 0.983
"""

from training.configs import Config, Method

CONFIG = Config(method=Method(strategy="dbs"))
