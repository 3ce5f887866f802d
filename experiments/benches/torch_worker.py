"""One process of bench_cluster.py --with-torch: the same CNN in PyTorch, with gloo, under the same quotas.

    ddp        DistributedDataParallel, the same number of samples everywhere
    hand       counts by the quotas, fixed by hand; gradients of a flat vector summed by one all-reduce
    hand-ddp   the same counts in DistributedDataParallel, with weighted losses: its exchange overlaps the backward pass
    dbs@5      counts by DBS's law every 5 steps: in proportion to samples/s of the local phases (arXiv 2007.11831)

Settings come as JSON on the command line. Process 0 reads one JSON line per turn on standard input, {"mode", "steps",
"swap"}, and answers with one line on standard output. It needs torch, and nothing of hetjax.
"""

import json
import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

PERIOD = 5


class Model(nn.Module):
    """The CNN of cluster_worker.py: two convolutions, each pooled, an optional hidden layer, logits."""

    def __init__(self, hidden):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        )  # fmt: skip
        wide = 7 * 7 * 32
        self.head = (
            nn.Sequential(nn.Linear(wide, hidden), nn.ReLU(), nn.Linear(hidden, 10)) if hidden else nn.Linear(wide, 10)
        )

    def forward(self, images):
        """The logits."""
        return self.head(self.features(images))


def counts_of(shares, batch):
    """Whole counts in proportion to shares, with the sum of the batch: largest remainders."""
    exact = np.asarray(shares, float) / np.sum(shares) * batch
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact)[: batch - counts.sum()]] += 1
    return np.maximum(counts, 1)


class Trainer:
    """Trains by any of the modes with the same data, and measures."""

    def __init__(self, settings):
        self.settings, self.rank, self.world = settings, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.model = Model(settings["hidden"])
        self.ddp = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(1)
        self.images = torch.rand(settings["batch_size"], 1, 28, 28, generator=generator)
        self.labels = torch.randint(0, 10, (settings["batch_size"],), generator=generator)
        self.loss = nn.CrossEntropyLoss(reduction="sum")

    def backward(self, model, counts, factor=1.0):
        """The gradients of this process's samples of a batch."""
        start = int(np.sum(counts[: self.rank]))
        own = slice(start, start + int(counts[self.rank]))
        self.optimizer.zero_grad(set_to_none=False)
        (factor * self.loss(model(self.images[own]), self.labels[own]) / self.settings["batch_size"]).backward()

    def exchange(self):
        """Sum the gradients of all processes."""
        grads = [p.grad for p in self.model.parameters()]
        flat = torch._utils._flatten_dense_tensors(grads)
        dist.all_reduce(flat)
        for grad, total in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads), strict=True):
            grad.copy_(total)

    def gathered(self, value):
        """A number of every process."""
        values = [torch.zeros(1, dtype=torch.float64) for _ in range(self.world)]
        dist.all_gather(values, torch.tensor([value], dtype=torch.float64))
        return np.array([float(x) for x in values])

    def run(self, mode, steps):
        """Step times, local times and counts."""
        batch, shares = self.settings["batch_size"], np.asarray(self.settings["quotas"], float)
        counts = counts_of(shares if mode.startswith("hand") else np.ones(self.world), batch)
        step_times, times = [], []
        for step in range(steps):
            began = time.perf_counter()
            if "ddp" in mode:
                self.backward(self.ddp, counts, self.world)
                local = np.nan
            else:
                self.backward(self.model, counts)
                local = time.perf_counter() - began
                self.exchange()
            self.optimizer.step()
            step_times.append(time.perf_counter() - began)
            times.append(local)
            if mode == "dbs@5" and (step + 1) % PERIOD == 0:
                counts = counts_of(counts / self.gathered(np.mean(times[-PERIOD:])), batch)
                step_times[-1] = time.perf_counter() - began
        times_P = [None] * self.world
        dist.all_gather_object(times_P, times)
        return {"mode": mode, "step_times": step_times, "times": np.array(times_P).T.tolist()}

    def solo(self, seconds):
        """Samples/s of each process, all at once, without an exchange."""
        counts = counts_of(self.settings["quotas"], self.settings["batch_size"])
        dist.barrier()
        began, rounds = time.perf_counter(), 0
        while time.perf_counter() < began + seconds:
            self.backward(self.model, counts)
            rounds += 1
        rate = rounds * int(counts[self.rank]) / (time.perf_counter() - began)
        return self.gathered(rate).tolist()


def main():
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{os.environ['TORCH_COORDINATOR']}",
                            rank=int(os.environ["TORCH_RANK"]), world_size=len(settings["quotas"]))  # fmt: skip
    trainer = Trainer(settings)
    for mode in settings["modes"]:
        trainer.run(mode, 2)  # warm up before quotas are set
    if trainer.rank == 0:
        print(json.dumps({"ready": torch.__version__}), flush=True)
    while True:
        order = [json.loads(sys.stdin.readline() or "{}") if trainer.rank == 0 else None]
        dist.broadcast_object_list(order)
        if not order[0]:
            break
        result = {"solo": trainer.solo(settings["solo_s"])}
        if "mode" in order[0]:
            result |= trainer.run(order[0]["mode"], order[0]["steps"])
        if trainer.rank == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
