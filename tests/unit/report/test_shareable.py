"""A report names no folder of the machine, whatever its format."""

import json

import pytest
from report_runs import write_lines, write_run_log

from trl_drgrpo import write_report


@pytest.mark.parametrize("format", ["html", "md", "json"])
def test_no_folder_of_the_machine_is_in_a_report(tmp_path, format, monkeypatch):
    monkeypatch.setattr("trl_drgrpo.report.figure.has_matplotlib", lambda: False)  # the figure takes seconds
    secret = "/home/somebody/secret_project"
    settings = {"seed": 0, "peft": {"path": f"{secret}/a"}}
    folder = write_run_log(tmp_path / "run", steps=4, every=2, model=f"{secret}/models/m-1", settings=settings)
    message = f"cannot write {secret}/out/x.json: disk full"
    write_lines(folder / "_drgrpo" / "warnings.jsonl", [{"step": 1, "cause": "description", "message": message}])
    (folder / "_drgrpo" / "metrics.jsonl").open("a").write("torn {")  # a note names the file
    text = write_report(folder, tmp_path / f"out.{format}", format).read_text(encoding="utf-8")
    assert "secret_project" not in text
    assert str(tmp_path) not in text
    assert "m-1" in text
    assert "x.json: disk full" in text
    if format == "json":
        assert "path" not in json.loads(text)["runs"][0]
