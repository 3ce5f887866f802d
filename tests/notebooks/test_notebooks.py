"""The notebooks run top to bottom, link to Colab, and store small outputs."""

from pathlib import Path

import nbformat
import pytest
import quick_compiles
from nbclient import NotebookClient

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "colab"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
CLAIMS = {  # a last cell: what the text says of the results, except of speeds
    "04_cpu_and_gpu.ipynb": """
losses = {name: np.array(history.losses) for name, history in runs.items()}
for name in ("GPU alone", "balanced"):
    np.testing.assert_allclose(losses[name][:10], losses["equal"][:10], rtol=1e-4)
whole = [record.counts_W for record in runs["equal"].records if record.counts_W.sum() == BATCH]
assert all(counts[0] == counts[1] for counts in whole)

of_the_cpu = {record.step: record.counts_W[1] for record in full}
before = np.median([count for step, count in of_the_cpu.items() if 10 <= step < LOADED.start])
assert min(count for step, count in of_the_cpu.items() if step in LOADED) < before
assert any(record.changed for record in loaded.records if record.step in LOADED)

assert set(tables) == {"GPU alone", "CPU alone", "balanced", "adaptive-hogbatch"}
for history in tables.values():
    assert sum(record.counts_W.sum() for record in history.records) == len(table["x"])
    assert np.mean(history.losses[-8:]) < np.mean(history.losses[:8])
assert all(sum(record.counts_W for record in tables["adaptive-hogbatch"].records) > 0)
""",
}


def test_the_notebooks_are_complete():
    assert [path.name for path in NOTEBOOKS] == [
        "01_quickstart.ipynb",
        "02_your_own_model.ipynb",
        "03_how_it_works.ipynb",
        "04_cpu_and_gpu.ipynb",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_stored_with_outputs_and_a_colab_link(path):
    notebook = nbformat.read(path, as_version=4)
    assert (
        f"https://colab.research.google.com/github/hetjax/hetjax/blob/main/colab/{path.name}"
        in notebook.cells[0].source
    )
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "hetjax.devices(" in code[0].source
    assert "JAX_PLATFORMS" not in code[0].source  # a GPU is used where there is one
    assert "jax=={version('jax')}" in code[0].source  # installing keeps Colab's JAX
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [out for cell in code for out in cell.outputs if out.output_type == "error"]
    assert path.stat().st_size < 300_000


def test_outputs_without_a_gpu_say_so():
    notebook = nbformat.read(FOLDER / "04_cpu_and_gpu.ipynb", as_version=4)
    assert "not from a GPU" in notebook.cells[0].source
    outputs = [out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", [])]
    assert any("There is no GPU here: a second client of the CPU stands in for it" in text for text in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", quick_compiles.FLAGS)  # the notebook sets its number of devices
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(CLAIMS.get(path.name, "")))
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources=resources).execute()
