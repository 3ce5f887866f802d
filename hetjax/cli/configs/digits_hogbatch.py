"""Asynchronous: Adaptive Hogbatch (arXiv 2004.08771), a CPU-like and a GPU-like worker of speeds 1 and 4.

command   hetjax train --config digits_hogbatch
run time  25 s on two cores
expected  utilization of both workers above 93%; the CPU-like one, whose batches grow from 16, makes half of the
          updates instead of 80%; test accuracy 0.96
"""

from hetjax.cli.training.configs import AsynchronousFlags, Config, DataFlags, MethodFlags, ModelFlags, WorkerFlags

CONFIG = Config(
    data=DataFlags(epochs=30),
    model=ModelFlags(model="mlp"),
    workers=WorkerFlags(speeds="1,4", row_time=2.0),
    method=MethodFlags(sync="adaptive-hogbatch"),
    asynchronous=AsynchronousFlags(batches="16,256"),
)
