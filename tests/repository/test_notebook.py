"""Laws of the notebook of examples/: it runs, the degree changes no loss, and no trace of a machine is stored."""

import base64
import copy
import re
import struct
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from scripts import run_notebook

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "context_parallel.ipynb"
MOST_BYTES = 250_000
DEGREES = ("1", "2", "4")
LINE = re.compile(r"^degree (\d): loss ([\d.]+) in step 1, ([\d.]+) in step (\d+)$", re.MULTILINE)


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(notebook: Any) -> str:
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    return "\n".join(output.text for output in outputs if output.output_type == "stream")


def pictures_of(notebook: Any) -> list[tuple[int, int]]:
    """Width and height of each PNG of the outputs."""
    outputs = [output for cell in code(notebook) for output in cell.outputs if "data" in output]
    images = [base64.b64decode(output.data["image/png"]) for output in outputs]
    assert all(image.startswith(b"\x89PNG") for image in images)
    return [struct.unpack(">II", image[16:24]) for image in images]


@pytest.fixture
def stored() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_its_short_form_runs_and_the_losses_are_those_of_one_rank(tmp_path: Path) -> None:
    output = tmp_path / "short.ipynb"
    assert run_notebook.main([str(NOTEBOOK), "--steps", "2", "--output", str(output)]) == 0
    notebook = nbformat.read(output, as_version=4)
    lines = LINE.findall(text_of(notebook))
    assert [line[0] for line in lines] == [*DEGREES]
    assert {line[1:] for line in lines} == {lines[0][1:]}
    assert lines[0][3] == "2"
    assert len(pictures_of(notebook)) == 2
    assert "STEPS = 2\n" not in nbformat.read(NOTEBOOK, as_version=4).cells[1].source


def test_the_stored_one_has_its_outputs_and_no_trace_of_a_machine(stored: Any) -> None:
    nbformat.validate(stored)
    assert NOTEBOOK.stat().st_size < MOST_BYTES
    assert [cell.execution_count for cell in code(stored)] == [*range(1, len(code(stored)) + 1)]
    assert run_notebook.places(stored) == []
    assert stored.metadata.keys() == {"kernelspec"}
    assert not [cell.id for cell in stored.cells if cell.metadata]
    assert not re.search(r'"(/(home|root|tmp|usr|work|Users|opt)/|[A-Z]:\\\\)', NOTEBOOK.read_text())


def test_the_stored_outputs_are_those_of_its_cells(stored: Any) -> None:
    (steps,) = re.findall(r"^STEPS = (\d+)$", code(stored)[0].source, re.MULTILINE)
    lines = LINE.findall(text_of(stored))
    assert [line[0] for line in lines] == [*DEGREES]
    assert {line[3] for line in lines} == {steps}
    for _, first, last, _ in lines:
        assert float(first) == pytest.approx(float(lines[0][1]), abs=1e-3)
        assert float(last) == pytest.approx(float(lines[0][2]), abs=1e-3)
        assert float(last) < float(first) - 2
    curve, plan = pictures_of(stored)
    assert curve[0] > 400
    assert plan[0] > 1000


def test_a_cell_that_fails_is_seen(stored: Any) -> None:
    broken = copy.deepcopy(stored)
    broken.cells = [broken.cells[1], nbformat.v4.new_code_cell('lct("train", "--training.stpes", 2)')]
    with pytest.raises(CellExecutionError, match=r"did you mean 'training\.steps'"):
        run_notebook.executed(broken, steps=2)


def test_a_path_in_an_output_is_refused(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("from pathlib import Path\nPath.cwd()")])
    nbformat.write(notebook, tmp_path / "a.ipynb")
    with pytest.raises(SystemExit, match=re.escape(str(ROOT))):
        run_notebook.main([str(tmp_path / "a.ipynb"), "--output", str(tmp_path / "b.ipynb")])
    assert not (tmp_path / "b.ipynb").exists()
    with pytest.raises(SystemExit, match="--steps needs a cell"):
        run_notebook.main([str(tmp_path / "a.ipynb"), "--steps", "2"])
