"""CPU seconds that hetjax compiles for accelerators that are not there, against one plain jitted train step.

    python experiments/bench_compile.py [--target T4 v5e] [--config cnn resnet] [--engine chunked looped before]

first     CPU seconds of the programs that the first step needs / those of a plain jitted train step of the same model
          and global batch, written by hand: loss, gradient and optimizer in one program over the target's chips
complete  the same with the whole ladder of microbatches

The engine `before` is `chunked` with JAX's own random bits and the four rungs that a CPU starts with. At the end come
the rows of the table in docs/accelerators.md.

Each figure is the median of some repetitions, each in a process of its own with nothing cached: from tracing to the
compiled program. Memory is that of one run of the largest program of training on one device, as its compiler says. The
compilers: pip install 'hetjax[cuda,tpu]'.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any, Literal, TypedDict

from benches.flags import JsonFile, from_flags

PLAIN, BEFORE = "plain", "before"


class Figures(TypedDict):
    """CPU seconds and memory of what was compiled in one process."""

    first: float
    complete: float
    mib: float


def measure(target: str, config: str, engine: str, batch: int) -> Figures:
    """Compile what training takes, in a process in which nothing was compiled before."""
    import jax

    from hetjax.cli import compile as command
    from hetjax.cli.compiled_steps import maker
    from hetjax.devices import compile as compiling
    from hetjax.devices import memory, targets
    from hetjax.engines import Chunked

    jax.config.update("jax_platforms", "cpu")
    given = targets.target(target)
    devices = given.devices()
    if engine == PLAIN:
        seconds, program = plain(config, devices, batch)
        return {"first": seconds, "complete": seconds, "mib": (memory.needed(program) or 0) / 2**20}
    make = maker(config, batch)
    if engine == BEFORE:
        compiling.quick_to_compile = nullcontext
        rungs = sorted({max(1, batch // factor) for factor in (1, 4, 16, 64)})
        make, engine = partial(_with_engine, make, Chunked(rungs=rungs)), "chunked"
    report = command.compiled(given, make, engine, devices)
    first = report.seconds("first step")
    most = max(memory.needed(program.program) or 0 for program in report.training)
    return {"first": first, "complete": first + report.seconds("later"), "mib": most / 2**20}


def _with_engine(make: Any, chosen: Any, devices: Any, engine: Any) -> Any:
    return make(devices=devices, engine=chosen)


def plain(config: str, devices: list[Any], batch: int) -> tuple[float, Any]:
    """The train step that one would write without hetjax: CPU seconds to trace and compile it, and the program."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from hetjax.cli.compiled_steps import small_task

    task, optimizer = small_task(config), optax.adamw(1e-3)
    loss_fn, params = task.model.loss_fn, task.model.params

    def train_step(params: Any, opt_state: Any, rows: Any, key: jax.Array) -> Any:
        keys = jax.random.split(key, batch)

        def mean(params: Any) -> Any:
            example = loss_fn(params, rows, keys)
            weight = batch if example.weight_b is None else example.weight_b.sum()
            return example.loss_b.sum() / weight, jax.tree.map(lambda x: x.sum() / weight, example.metrics)

        (loss, metrics), grads = jax.value_and_grad(mean, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, metrics

    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))

    def like(tree: Any, *axes: str) -> Any:
        place = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype, sharding=place), tree)

    state = like(jax.eval_shape(lambda: (params, optimizer.init(params))))
    rows = like(jax.tree.map(np.asarray, task.train.rows(np.arange(batch))), "data")
    key = like(jax.eval_shape(lambda: jax.random.key(0)))
    began = time.process_time()
    program = jax.jit(train_step, donate_argnums=(0, 1)).lower(*state, rows, key).compile()
    return time.process_time() - began, program


def main(
    target: tuple[str, ...] = ("T4", "v5e"),
    config: tuple[str, ...] = ("cnn", "resnet", "transformer"),
    engine: tuple[str, ...] = ("chunked", "looped"),
    batch_size: int = 128,
    repeats: int = 3,
    json_file: JsonFile = None,
) -> None:
    """Measure how long compiling for a target takes.

    Args:
        target: as for `hetjax compile`.
        config: as for `hetjax compile`.
        engine: as for `hetjax compile`, or before.
        batch_size: samples of a step.
        repeats: processes per figure.
        json_file: write the figures to this file (--json FILE).
    """
    figures, rows = [], []
    print(f"{'target':8} {'model':12} {'engine':8} {'first':>8} {'complete':>8} {'ratio':>6} {'ratio':>6} {'MiB':>8}")
    for name in target:
        for model in config:
            base, medians = None, {}
            for each in (PLAIN, *engine):
                runs = [_alone(name, model, each, batch_size) for _ in range(repeats)]
                found = {key: median(run[key] for run in runs) for key in ("first", "complete", "mib")}
                base = base or found
                medians[each] = found
                ratio = {key: found[key] / base[key] for key in ("first", "complete")}
                print(
                    f"{name:8} {model:12} {each:8} {found['first']:8.1f} {found['complete']:8.1f} "
                    f"{ratio['first']:6.2f} {ratio['complete']:6.2f} {found['mib']:8.1f}",
                    flush=True,
                )
                figures.append({"target": name, "config": model, "engine": each, "runs": runs, "ratio": ratio})
            rows.append(table_row(name, model, medians))
    print("[targets: first <= 1.3, complete <= 3]\n")
    print("\n".join([*TABLE, *rows]))
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


TABLE = (
    "| target | model | plain | before | `chunked`: first step | `chunked`: ladder complete | `looped` | MiB |",
    "|---|---|---|---|---|---|---|---|",
)


def table_row(target: str, model: str, medians: dict[str, Figures]) -> str:
    """A row of the table in docs/accelerators.md; in brackets the ratio to the plain step, – for what was not run."""

    def cell(engine: str, key: Literal["first", "complete"]) -> str:
        if engine not in medians:
            return "–"
        seconds = medians[engine][key]
        return f"{seconds:.1f}" + (f" ({seconds / medians[PLAIN][key]:.1f})" if engine != PLAIN else "")

    sizes = (medians.get(engine) for engine in (PLAIN, BEFORE, "chunked", "looped"))
    memory = ", ".join("–" if found is None else f"{found['mib']:.3g}" for found in sizes)
    shown = [(PLAIN, "first"), (BEFORE, "first"), ("chunked", "first"), ("chunked", "complete"), ("looped", "first")]
    return f"| {target} | {model} | {' | '.join(cell(*each) for each in shown)} | {memory} |"


def _alone(*args: Any) -> Figures:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *args).result()


if __name__ == "__main__":
    from_flags(main)
