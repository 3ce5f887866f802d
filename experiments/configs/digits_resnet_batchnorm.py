"""BatchNorm independent of the allocation: a ResNet on digits, statistics over fixed groups of the global batch.

command   python experiments/train.py --config digits_resnet_batchnorm
run time  one to two minutes on two cores
expected  equal losses and test accuracy 0.98 with equal and with balanced counts
"""

from training.configs import Config, Data, Model

CONFIG = Config(data=Data(epochs=15), model=Model(model="resnet", width=8, norm="batch"))
