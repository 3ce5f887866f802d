"""RCD-SGD (arXiv 2211.00839): representative blocks of data, parameters mixed between neighbors.

The paper trains CIFAR-10 for 200 epochs with plain SGD (learning rate 0.8, divided by 10 twice); 24 epochs of digits
use momentum and a cosine schedule instead.

command   hetjax train --config digits_rcd_sgd
run time  20 s on two cores
expected  blocks of 523, 523, 261 and 131 samples; efficiency 67%, test accuracy 0.978
"""

from hetjax.cli.training.configs import Config, MethodFlags, OptimizerFlags

CONFIG = Config(method=MethodFlags(strategy="rcd-sgd"), optimizer=OptimizerFlags(optimizer="sgd", learning_rate=0.1))
