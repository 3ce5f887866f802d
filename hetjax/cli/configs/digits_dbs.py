"""DBS (arXiv 2007.11831): counts by throughput, updated once per epoch; every worker has its own shard.

command   hetjax train --config digits_dbs
run time  22 s on two cores
expected  equal counts in the first epoch, nearly balanced ones from the second on; efficiency 67%,
          test accuracy 0.983
"""

from hetjax.cli.training.configs import Config, MethodFlags

CONFIG = Config(method=MethodFlags(strategy="dbs"))
