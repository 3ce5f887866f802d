"""The package's own commands: check on these devices, report on a made-up run, mistakes answered by a sentence."""

from pathlib import Path

import pytest
from fake_run import write_fake_run

from hetjax.__main__ import main


@pytest.mark.slow
def test_check_says_what_there_is_and_that_it_agrees(capsys):
    assert main(["check", "--devices", "2"]) == 0
    told = capsys.readouterr().out
    for word in ("cpu:0", "cpu:1", "GiB", "Engine chunked", "Ladder for cpu", "Transport psum", "samples/s", "agree"):
        assert word in told


def test_report_names_what_it_wrote(tmp_path, capsys):
    write_fake_run(tmp_path / "a")
    assert main(["report", str(tmp_path)]) == 0
    told = capsys.readouterr().out.split()
    assert [Path(path).name for path in told] == ["run.png", "run.svg", "report.html"]
    assert all(Path(path).is_file() for path in told)


def test_a_folder_without_a_run_is_a_mistake(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "There is no metrics.jsonl" in capsys.readouterr().err
