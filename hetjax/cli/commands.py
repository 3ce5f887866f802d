"""The commands' flags and help texts. What a command needs is imported when it runs, so that --help is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from hetjax.launch.options import Options, Switch, optional


def train() -> None:
    """Train a model on these devices, and see what balancing gains."""


def check(
    devices: Annotated[str | None, optional("N|KINDS")] = None,
    parameters: Annotated[int | None, optional("INT")] = None,
) -> None:
    """Check the devices: their speed, and whether they compute what one of them does.

    Of several processes: hetjax launch --processes 4 -- hetjax check.

    Args:
        devices: a number, gpu, cpu, gpu+cpu, cuda:0,2+cpu or all (default: all accelerators, else 4 simulated CPU
            devices, with several processes 1 each)
        parameters: time the exchange of a model of this size (default: that of a small CNN)
    """
    from hetjax.cli.check import main

    main(devices, parameters)


def compile(
    target: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TARGET [TARGET ...]")],
    config: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]")] = ("cnn",),
    engine: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]")] = ("looped", "chunked", "masked"),
    batch_size: Annotated[int, tyro.conf.arg(metavar="INT")] = 128,
    transport: Literal["auto", "mesh", "host"] = "auto",
    max_programs: Annotated[int | None, optional("INT")] = None,
    max_mib: Annotated[tuple[float, ...] | None, optional("MIB [MIB ...]")] = None,
) -> None:
    """Compile a run's programs for an accelerator that is not there.

    Fails if a program does not fit or does not reuse a donated buffer.

    Needs the compilers: pip install 'hetjax[cuda,tpu]'.

    A program that compiles proves neither its speed nor its results.

    Args:
        target: T4, A100, H100, v4, v5e, v6e; several GPUs, such as T4:2, or a TPU with a topology, such as v5e:2x4;
            or a .toml file
        config: mlp, cnn, resnet or transformer; an experiment of hetjax train --config; or FILE.py:FUNCTION, where
            FUNCTION(devices, engine) returns a hetjax.Step, its first state and a batch
        engine: looped, chunked, masked
        batch_size: samples of a step of the small models
        transport: how sums travel between the workers: host as for a GPU beside a CPU
        max_programs: fail if training with one engine takes more programs (default: no limit)
        max_mib: fail if a program of training needs more memory: one number, or one per config (default: no limit)
    """
    from hetjax.cli.compile import main

    main(target, config, engine, batch_size, transport=transport, max_programs=max_programs, max_mib=max_mib)


def key(file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]) -> None:
    """Make a key: only processes that have it join a run; messages are encrypted.

    Copy the file to all hosts, and start all processes with --key FILE.

    Args:
        file: a file that does not exist yet; only you will be able to read it
    """
    from hetjax.fleet.keys import make_key

    make_key(file)
    print(f"{file} holds a new key: copy it to all hosts, and start all processes with --key {file}.")


def rendezvous(
    bind: Annotated[str, tyro.conf.arg(metavar="HOST:PORT")],
    processes: Annotated[int, tyro.conf.arg(metavar="INT")],
    key: Annotated[Path | None, optional("FILE")] = None,
    state: Annotated[Path | None, optional("FILE")] = None,
    min_members: int = 1,
    silent_limit: float = 10.0,
) -> None:
    """Serve the rendezvous of an elastic run on several hosts, until the run is over.

    On every host: hetjax launch --rendezvous HOST:PORT -- PROGRAM

    Later, to join: hetjax launch --join HOST:PORT -- PROGRAM

    Args:
        bind: address to listen on
        processes: number of processes, on all hosts together, with which the run starts
        key: key of the fleet (hetjax key FILE), to authenticate and encrypt (default: none)
        state: file from which it goes on when it is started again after a crash (default: it asks the members)
        min_members: the run stops, with a checkpoint, when fewer are left
        silent_limit: seconds without a message after which a member is lost
    """
    from hetjax.fleet.keys import read_key
    from hetjax.fleet.registry import Patience
    from hetjax.fleet.service import serve

    if processes < 1 or min_members < 1 or silent_limit < 2:
        raise ValueError("--processes and --min-members have to be at least 1, and --silent-limit at least 2.")
    limits = Patience(silent=silent_limit, answer=silent_limit / 2)
    say = lambda message: print(message, flush=True)
    secret = None if key is None else read_key(key)
    raise SystemExit(serve(bind, processes, secret, state, min_members=min_members, limits=limits, log=say))


def report(
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, optional("FOLDER [FOLDER ...]")],
    page: Annotated[Path | None, optional("PATH")] = None,
) -> None:
    """Compare runs: a figure in every run's folder, and one self-contained page.

    Args:
        folders: folders of training runs; runs in the folders directly below them count too
        page: path of the page (default: report.html in the folder that contains all runs)
    """
    from hetjax.report import report as write_report

    written = write_report(*folders, page=page)
    for path in (*written.figures, written.page):
        print(path)


def launch(options: Annotated[Options, tyro.conf.arg(name="")]) -> Options:
    """Run several processes on this machine: launch [FLAGS] -- PROGRAM [ARGUMENTS].

    PROGRAM is a Python file, -m MODULE or a command, such as hetjax train.

    When a process dies the others are stopped; --restart starts all of them again.

    Nothing is left running. Quotas can slow processes down while they run.
    """
    return options  # launched by `main`, which has the program's arguments


def partition(
    dataset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATASET")],
    rates: Annotated[str | None, optional("LIST")] = None,
    workers: Annotated[int, tyro.conf.arg(metavar="INT")] = 4,
    objective: Annotated[str | None, optional("NAME")] = None,
    rule: Annotated[str | None, optional("NAME")] = None,
    features: Annotated[str | None, optional("NAME")] = None,
    bandwidth: Annotated[float | None, optional("FLOAT")] = None,
    pseudo_classes: Annotated[int | None, optional("INT")] = None,
    out: Path = Path("blocks.npz"),
    recut: Annotated[Path | None, optional("FILE")] = None,
    compare: Switch = False,
    seed: int = 0,
) -> None:
    """Partition a dataset into one representative block per worker.

    Blocks are chosen by submodular greedy selection (arXiv 2211.00839).

    Args:
        dataset: digits, synthetic, idx:DIR, npz:FILE (with labels, other targets or none) or tfds:NAME
        rates: relative speeds of the workers, such as 4,2,1,1; block sizes are proportional to them
        workers: without --rates: number of workers, of equal rate
        objective: facility-location or graph-cut (default: facility-location)
        rule: which block grows next: min-block (published), per-rate, fill, parts or auto (default: auto);
            auto is min-block at equal rates, otherwise parts
        features: features that define similarity: raw, pca, pca:COMPONENTS or MODULE:FUNCTION of a batch (default: pca)
        bandwidth: bandwidth of the Gaussian kernel (default: the median distance within each class)
        pseudo_classes: number of k-means clusters to use instead of labels (default: 10 if the data has no labels)
        out: file for the blocks; a figure is written next to it
        recut: file of earlier blocks of the same data: move as few of its samples as the new rates require
        compare: compare with every objective and rule, not only with random and class-balanced blocks
        seed: seed of random partitions and pseudo-classes
    """
    from hetjax.cli.partition import cut, parse_rates

    cut(
        dataset,
        parse_rates(rates, workers),
        out,
        Console(),
        objective=objective,
        rule=rule,
        features=features,
        bandwidth=bandwidth,
        pseudo_classes=pseudo_classes,
        compare=compare,
        old=recut,
        seed=seed,
    )
