"""`write_report` and `trl-drgrpo report`: formats, limits, bad input, and what a page may hold."""

import json
import subprocess
import sys
import time

import pytest
from report_runs import data_of, write_run_log

from trl_drgrpo import write_report
from trl_drgrpo.cli.main import main
from trl_drgrpo.common.errors import InputError


def test_the_command_writes_beside_the_run_and_prints_the_path(runs, capsys):
    assert main(["report", str(runs[0])]) == 0
    path = runs[0] / "_drgrpo" / "report.html"
    assert capsys.readouterr().out == f"{path}\n"
    page = path.read_text(encoding="utf-8")
    assert [group["step"] for group in data_of(page)["runs"][0]["groups"]] == [10, 20, 30, 40]
    assert sorted(entry.name for entry in path.parent.iterdir())[0] == "completions.jsonl"  # no half-written file left


def test_several_runs_go_into_the_current_folder(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *map(str, runs), "--max_groups", "2"]) == 0
    assert capsys.readouterr().out == "report.html\n"
    data = data_of((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert [len(run["groups"]) for run in data["runs"]] == [2, 2]


def test_json_holds_every_logged_step(runs, tmp_path):
    contents = json.loads(write_report(runs[0], tmp_path / "deep" / "x.json", "json").read_text())
    steps, values = contents["runs"][0]["curves"]["reward"]
    assert (steps, len(values)) == (list(range(1, 41)), 40)
    assert contents["runs"][0]["eval_curves"] == {}


def test_bad_input(runs, tmp_path, capsys):
    with pytest.raises(InputError, match="got 'pdf'; expected one of html, md, json, png"):
        write_report(runs[0], format="pdf")
    with pytest.raises(InputError, match="max_groups: got -1"):
        write_report(runs[0], max_groups=-1)
    with pytest.raises(InputError, match="a folder; expected a file"):
        write_report(runs[0], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="expected a file that can be written"):
        write_report(runs[0], tmp_path / "file" / "x.html")
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "got nothing there; expected the output folder of a run" in capsys.readouterr().err
    assert main(["report"]) == 2
    assert main(["report", str(runs[0]), "--format", "pdf"]) == 2


def test_an_empty_run_has_a_page(tmp_path):
    folder = write_run_log(tmp_path / "run", steps=1, every=5)
    (folder / "_drgrpo" / "metrics.jsonl").write_text("")
    for format in ("html", "md", "json", "png"):
        assert write_report(folder, tmp_path / f"x.{format}", format).stat().st_size > 500


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from trl_drgrpo.cli.main import main\n"
        "try: main(['report', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'trl', 'transformers', 'jinja2', 'matplotlib', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip().endswith("[]")


def test_a_report_needs_no_torch(runs, tmp_path):
    code = (
        f"import sys; from trl_drgrpo import write_report; write_report({str(runs[0])!r}, {str(tmp_path / 'x')!r})\n"
        "print([m for m in ('torch', 'trl', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_hundred_thousand_completions(tmp_path):
    folder = write_run_log(tmp_path / "run", steps=12_500, every=1, text_length=400)
    start = time.process_time()
    path = write_report(folder)
    assert time.process_time() - start < 40  # 4 s on the machine it was written on
    page = path.read_text(encoding="utf-8")
    assert len(page.encode()) < 5_000_000
    (run,) = data_of(page)["runs"]
    assert run["groups_total"] == 12_500
    assert 500 < run["rows_shown"] < run["rows_total"] == 100_000
    steps = [group["step"] for group in run["groups"]]
    assert all(any(start < step <= start + 1250 for step in steps) for start in range(0, 12_500, 1250))
    assert steps[-1] == 12_500
