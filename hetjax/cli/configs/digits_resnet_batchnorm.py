"""BatchNorm independent of the allocation: a ResNet on digits, statistics over fixed groups of the global batch.

command   hetjax train --config digits_resnet_batchnorm
run time  one to two minutes on two cores
expected  equal losses and test accuracy 0.98 with equal and with balanced counts
"""

from hetjax.cli.training.configs import Config, DataFlags, ModelFlags

CONFIG = Config(data=DataFlags(epochs=15), model=ModelFlags(model="resnet", width=8, norm="batch"))
