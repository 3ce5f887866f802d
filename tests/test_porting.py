"""Every piece of code in docs/porting.md runs, and the ported script gives the result of the plain one."""

import re
from pathlib import Path

import numpy as np
import plain_flax
import pytest

import hetjax

PAGE = (Path(__file__).parents[1] / "docs" / "porting.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
def test_the_code_of_the_page_runs(capsys):
    names, plain = {}, None
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"porting.md, block {number + 1}", "exec"), names)
        if number == 0:
            plain, plain_loss = names["model"], float(names["loss"])
        elif number == 1:
            plain_flax.assert_same_model(names["model"], plain)
            assert int(names["optimizer"].step[...]) == 10
            assert np.isfinite(plain_loss)
        if "wrt=nnx.LoRAParam" in block:
            plain_flax.assert_same_model(names["tuned"].base, names["model"], rtol=0, atol=0)
    assert capsys.readouterr().out.count("'loss'") == 2
    backbone = hetjax.unfrozen(names["state"].params)["backbone"]
    np.testing.assert_array_equal(backbone, np.ones((8, 16)))
    assert names["record"].step == 10
