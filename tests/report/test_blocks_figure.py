"""The figure of a partition: its files and panels, with empty blocks, blocks of one sample, and many classes."""

from __future__ import annotations

import re

import numpy as np
import pytest
from matplotlib.image import imread

from hetjax.report.blocks import View, blocks_figure, draw_blocks
from hetjax.report.drawing import style, worker_color
from hetjax.sampling.blocks import random_blocks


def views(size):
    points = np.random.default_rng(0).normal(size=(size, 2))
    return [View("all", np.arange(size), points), View("some", np.arange(3), points[:3])]


def test_drawing_twice_writes_the_same_figure(tmp_path):
    """Up to the last bit of positions, which the layout may round differently."""
    owner = np.arange(40) % 3
    shares = {"ours": np.full((3, 4), 3), "chance": np.full((3, 4), 3)}
    draw = lambda: draw_blocks(tmp_path, "blocks", "title", {"ours": owner, "chance": owner[::-1]}, views(40), shares)
    png, svg = draw()
    assert [png.name, svg.name] == ["blocks.png", "blocks.svg"]
    assert png.stat().st_size > 10_000
    assert "<dc:date>" not in svg.read_text()
    first, words = imread(png), re.findall(r"<!-- (.*?) -->", svg.read_text())
    draw()
    assert np.abs(imread(png) - first).mean() < 1e-3
    assert re.findall(r"<!-- (.*?) -->", svg.read_text()) == words


def test_the_points_shown_represent_all_blocks():
    points = np.random.default_rng(1).normal(size=(20_000, 2))
    shown = View("all", np.arange(20_000), points)
    for owner in (random_blocks(np.zeros(20_000), [4, 2, 1, 1], seed=0).owner_D, np.repeat([0, 1, 2, 3], 5000)):
        with style():
            figure = blocks_figure("t", {"p": owner}, [shown], {"p": np.ones((4, 1), int)})
        colors = np.unique(figure.axes[0].collections[0].get_facecolors(), axis=0, return_counts=True)[1]
        np.testing.assert_allclose(np.sort(colors) / 2500, np.sort(np.bincount(owner)) / 20_000, atol=0.03)


@pytest.mark.parametrize("classes", [1, 20, 200])
def test_every_block_but_an_empty_one_has_its_mean_marked(classes):
    owner = np.array([0, 0, 2, 2, 2, 3])  # block 1 is empty, block 3 has one sample
    shown = views(6)
    with style():
        figure = blocks_figure("t", {"p": owner}, shown, {"p": np.ones((4, classes), int)})
    axes = figure.axes[0]
    marks = {line.get_label(): line.get_xydata()[0] for line in axes.lines}
    assert set(marks) == {"block 0", "block 2", "block 3", "all: mean and standard deviation"}
    np.testing.assert_allclose(marks["block 2"], shown[0].points_Vx2[2:5].mean(axis=0))
    assert axes.lines[0].get_color() == worker_color(0)
    assert len(figure.axes) == 3
