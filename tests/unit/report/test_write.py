"""`write_report` and `trl-drgrpo report`: contents, formats, limits, bad input, and what a report may name."""

import json
import re

import pytest
from processes import loaded_after
from report_runs import data_of, write_forked, write_hostile, write_run_log
from runs import write_lines

from trl_drgrpo import write_report
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.report.contents import difficulty, report_contents
from trl_drgrpo.report.curves import Curve, curves_of
from trl_drgrpo.report.page import markdown_page
from trl_drgrpo.report.records import JsonLines
from trl_drgrpo.report.run_folders import read_runs


def test_the_command_writes_beside_the_run_and_prints_the_path(runs, ran):
    path = runs[0] / "_drgrpo" / "report.html"
    assert ran(["report", str(runs[0])]).out == f"{path}\n"
    page = path.read_text(encoding="utf-8")
    assert [group["step"] for group in data_of(page)["runs"][0]["groups"]] == [10, 20, 30, 40]
    assert sorted(entry.name for entry in path.parent.iterdir())[0] == "completions.jsonl"  # no half-written file left


def test_several_runs_go_into_the_current_folder(runs, tmp_path, monkeypatch, ran):
    monkeypatch.chdir(tmp_path)
    assert ran(["report", *map(str, runs), "--max_groups", "2"]).out == "report.html\n"
    data = data_of((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert [len(run["groups"]) for run in data["runs"]] == [2, 2]


def test_json_holds_every_logged_step(runs, tmp_path):
    contents = json.loads(write_report(runs[0], tmp_path / "deep" / "x.json", "json").read_text())
    steps, values = contents["runs"][0]["curves"]["reward"]
    assert (steps, len(values)) == (list(range(1, 41)), 40)
    assert contents["runs"][0]["eval_curves"] == {}


def test_bad_input(runs, tmp_path, ran):
    with pytest.raises(InputError, match="got 'pdf'; expected one of html, md, json, png"):
        write_report(runs[0], format="pdf")
    with pytest.raises(InputError, match="max_groups: got -1"):
        write_report(runs[0], max_groups=-1)
    with pytest.raises(InputError, match="a folder; expected a file"):
        write_report(runs[0], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file is a file; expected a folder to write to"):
        write_report(runs[0], tmp_path / "file" / "x.html")
    said = ran(["report", str(tmp_path / "nothing")], 2).err
    assert "got nothing there; expected the output folder of a run" in said
    ran(["report"], 2)
    ran(["report", str(runs[0]), "--format", "pdf"], 2)


def test_an_empty_run_has_a_page(tmp_path):
    folder = write_run_log(tmp_path / "run", steps=1, every=5)
    (folder / "_drgrpo" / "metrics.jsonl").write_text("")
    for format in ("html", "md", "json", "png"):
        assert write_report(folder, tmp_path / f"x.{format}", format).stat().st_size > 500


REPORT = "from trl_drgrpo import write_report; write_report({!r}, {!r})"
HELP = "from trl_drgrpo.cli.main import main\ntry: main(['report', '--help'])\nexcept SystemExit: pass"


@pytest.mark.parametrize(
    ("code", "heavy"),
    [(HELP, ("torch", "trl", "transformers", "jinja2", "matplotlib", "pyarrow")), (REPORT, ("torch", "trl"))],
)
def test_the_report_loads_no_heavy_library(runs, tmp_path, code, heavy):
    assert loaded_after(code.format(str(runs[0]), str(tmp_path / "x")), heavy) == []


@pytest.mark.slow
def test_tens_of_thousands_of_completions(tmp_path, monkeypatch):
    folder = write_run_log(tmp_path / "run", steps=2_500, every=1, text_length=400)
    parsed, parse = [], JsonLines.parse
    monkeypatch.setattr(JsonLines, "parse", lambda self, line: parsed.append(len(line)) or parse(self, line))
    path = write_report(folder)
    sizes = [(folder / "_drgrpo" / name).stat().st_size for name in ("metrics.jsonl", "completions.jsonl")]
    assert sum(sizes) > 8_000_000
    assert sum(parsed) < 2 * sum(sizes)  # what is read once more is a small part
    page = path.read_text(encoding="utf-8")
    assert len(page.encode()) < 5_000_000
    (run,) = data_of(page)["runs"]
    assert run["groups_total"] == 2_500
    assert len(run["groups"]) > 60
    steps = [group["step"] for group in run["groups"]]
    assert all(any(start < step <= start + 250 for step in steps) for start in range(0, 2_500, 250))
    assert steps[-1] == 2_500


def test_differences_of_settings_and_numbers(runs):
    contents = report_contents(read_runs(runs))
    rows = {row["name"]: row for row in contents["settings_table"]}
    assert rows["beta"] == {"name": "beta", "part": "objective", "values": [0.001, 0.0], "differs": True}
    assert not rows["loss_normalizer"]["differs"]
    assert rows["epsilon"]["values"] == [0.2, None]
    assert not rows["epsilon"]["differs"]  # not recorded is not another value
    final = {row["name"]: row for row in contents["final_table"]}
    row = final["Completion length, incorrect"]
    first, second = row["last"]
    assert second > first + 100
    assert row["change"] == [None, pytest.approx(second - first, rel=0.01)]


def test_levels_of_runs_of_different_lengths_are_over_as_many_steps(tmp_path):
    long, short = (write_run_log(tmp_path / str(steps), steps=steps, every=50) for steps in (100, 10))
    contents = report_contents(read_runs([long, short]))
    assert contents["window"] == 1
    (reward,) = [row for row in contents["final_table"] if row["name"] == "Reward"]
    logged = [curves_of(run.logged, "train")["reward"] for run in read_runs([long, short])]
    assert reward["first"] == pytest.approx([curve.values[0] for curve in logged], rel=1e-3)
    page = write_report([long, short], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "the first and in the last 1 step of each run" in page
    one = write_report(short, tmp_path / "one.html").read_text(encoding="utf-8")
    assert "mean of the last tenth" not in one  # which is the last value
    assert '<th scope="col" class="num">end</th>' not in one


def test_the_difficulty_counts_the_curriculum():
    curves = {
        "difficulty/groups_frac/0-25": Curve([1, 2], [1.0, 1.0]),
        "sampling/keep_probability/0-25": Curve([1, 2], [0.2, 0.4]),
    }
    kept = difficulty(curves)["keep_probability"]
    assert kept == {"0": None, "0-25": 0.3, "25-50": None, "50-75": None, "75-100": None, "100": None}
    del curves["sampling/keep_probability/0-25"]
    assert difficulty(curves)["keep_probability"] == {}


@pytest.mark.parametrize("format", ["html", "md", "json"])
def test_no_folder_of_the_machine_is_in_a_report(tmp_path, format, monkeypatch):
    monkeypatch.setattr("trl_drgrpo.report.page.find_spec", lambda name: None)  # the figure takes seconds
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


def test_markdown_and_its_picture(runs, tmp_path, few_panels):
    text = write_report(runs, tmp_path / "r.md", "md").read_text()
    assert "![curves](<r.png>)" in text
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "| beta (differs) | 0.001 | 0 |" in text
    assert "![" not in markdown_page(report_contents(read_runs(runs)), None)
    steps = re.findall(r"^\| 1 \| (\d+) \| ([01]) \| (\S+) \| \S.* \|$", text, re.MULTILINE)
    assert [int(step) for step, *_ in steps[:3]] == [1, 2, 3]  # of the first completion
    assert "| completion | step | step reward | advantage | text |" in text


def test_markdown_of_hostile_texts(tmp_path, few_panels):
    text = write_report(write_hostile(tmp_path / "run"), tmp_path / "r.md", "md").read_text(encoding="utf-8")
    assert [word for word in ("<script", "<img", "\u202e") if word in text] == []
    assert len(text) < 20_000


def test_a_group_that_forks_is_a_list_of_its_stretches(tmp_path):
    text = markdown_page(report_contents(read_runs([write_forked(tmp_path / "run")])), None)
    items = [line for line in text.splitlines() if "- **" in line and "advantage" in line]
    assert items[:4] == [
        "- **Parent 1**: mean reward 0.75, advantage 0.5: 2+3=5",
        "  - **Branch 1.1**: mean reward 0.5, advantage -0.5: so 5+4=9",
        "    - **Completion 1**: reward 1, advantage 1: 9",
        "    - **Completion 2**: reward 0, advantage -1: 10",
    ]
    assert "  - **Completion 5, not cut (x 2)**: reward 0, advantage -0.5: 10" in items
    assert len(items) == 2 + 2 + 4 + 1 + 1 + 2  # every stretch once
