"""The commands check and report of `python -m hetjax`."""

from pathlib import Path

import pytest
from fake_run import write_fake_run

from hetjax.__main__ import main


@pytest.mark.slow
def test_check_describes_the_devices_and_verifies_their_results(capsys):
    assert main(["check", "--devices", "2"]) == 0
    printed = capsys.readouterr().out
    for word in ("cpu:0", "cpu:1", "GiB", "Engine chunked", "Ladder for cpu", "Transport psum", "samples/s", "agree"):
        assert word in printed


def test_report_prints_the_paths_it_wrote(tmp_path, capsys):
    write_fake_run(tmp_path / "a")
    assert main(["report", str(tmp_path)]) == 0
    paths = [Path(path) for path in capsys.readouterr().out.split()]
    assert [path.name for path in paths] == ["run.png", "run.svg", "report.html"]
    assert all(path.is_file() for path in paths)


def test_report_on_a_folder_without_a_run_exits_with_2(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "There is no metrics.jsonl" in capsys.readouterr().err
