"""The Hogbatch family: asynchronous training, without a barrier, on unlike devices of one machine.

`hogbatch` and `adaptive-hogbatch` (Y. Ma, F. Rusu, arXiv 2004.08771) apply each gradient to one shared model on
arrival; `adaptive-sgd` (Y. Ma, F. Rusu, K. Wu, A. Sim, arXiv 2110.07029) trains a replica per worker and merges them
after every mega-batch.

One update, from free worker to applied gradient:

1. A driver runs the workers: threads.py in real time, one thread each or several, with a watchdog for those that hang;
   virtual.py on a seeded virtual clock, reproducible to the bit.
2. A free worker takes a `WorkItem` from the coordinator (coordinator.py): the next range of samples from the pool
   (sampling/ranges.py, each sample once per epoch), of the worker's current batch size. Sizes and the factor on the
   gradient follow the published rules (rules.py).
3. The worker gets its rows (data/prefetch.py), reads the parameters (`Method.read`) and computes gradient sums with the
   chunked engine (`Training._local_phase`). The model's version at reading defines the update's staleness.
4. `Coordinator.finish` commits the sums in order of arrival, by one of two methods (interface in method.py):
   immediate.py updates the newest shared model; merged.py updates the worker's replica, and merges all replicas when
   nothing is in flight and the mega-batch is complete. Both run the update program of scaling.py, the user's optimizer
   with gradients scaled by batch size.
5. The coordinator emits an `UpdateEvent`. training.py, one call of `fit`, adds it to the metrics (metrics.py) and, for
   each step's worth of samples, writes a record and a state to resume from, and runs the hooks.

A worker that raises, hangs or dies is dropped; its ranges return to the pool. family.py holds the public syncs: their
options and defaults, set-up, and resuming.
"""

from hetjax.sync.hogbatch.family import AdaptiveHogbatch, AdaptiveSgd, Asynchronous, Hogbatch
from hetjax.sync.hogbatch.virtual import VirtualSchedule

__all__ = ["AdaptiveHogbatch", "AdaptiveSgd", "Asynchronous", "Hogbatch", "VirtualSchedule"]
