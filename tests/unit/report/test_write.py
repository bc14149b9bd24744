"""`write_report` and `trl-drgrpo report`: formats, limits, bad input, and what a page may hold."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from report_runs import HOSTILE, write_hostile, write_run_log

from trl_drgrpo import write_report
from trl_drgrpo.cli.main import main
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.report import page
from trl_drgrpo.report.contents import difficulty, report_contents
from trl_drgrpo.report.curves import Curve, curves_of
from trl_drgrpo.report.figure import smoothed
from trl_drgrpo.report.markdown import markdown_page
from trl_drgrpo.report.panels import PANELS, other_metrics, panels_for
from trl_drgrpo.report.reading import read_runs
from trl_drgrpo.report.records import Logged
from trl_drgrpo.report.visible_text import visible


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    objective = {"beta": 0.0, "loss_normalizer": 512}
    return [
        write_run_log(folder / "first", steps=40),
        write_run_log(folder / "second", steps=40, seed=1, growth=1.0, objective=objective, ended=None),
    ]


@pytest.fixture
def few_panels(monkeypatch):
    """Drawing eighteen panels takes seconds, and shows no more than three."""
    monkeypatch.setattr("trl_drgrpo.report.panels.PANELS", PANELS[1:4])


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


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


def test_the_page_states_the_objective_that_was_recorded(runs, tmp_path):
    page = write_report(runs[0], tmp_path / "x.html").read_text()
    assert '<div class="formula"><p>loss = 1 / (B * L)' in page
    assert "A_i  = r_i - &lt;b&gt;" in page


def test_entropies_over_different_rows_are_different_lines():
    assert [line.label for line in panels_for({"entropy", "entropy/with_signal"})[0].lines] == [
        "all rows",
        "rows with a signal",
    ]


def test_sampling_is_drawn_where_it_was_logged():
    names = {"sampling/draws", "sampling/groups_live", "sampling/keep_probability/0-25", "sampling/capped_frac"}
    panels = panels_for(names)
    assert [(panel.title, [line.label for line in panel.lines]) for panel in panels] == [
        ("Sampled prompts", ["drawn", "live"])
    ]
    assert other_metrics(names, panels) == ["sampling/capped_frac"]
    assert not any("ampl" in panel.title for panel in panels_for({"reward"}))


def test_what_the_curriculum_keeps_is_part_of_the_difficulty():
    curves = {
        "difficulty/groups_frac/0-25": Curve([1, 2], [1.0, 1.0]),
        "sampling/keep_probability/0-25": Curve([1, 2], [0.2, 0.4]),
    }
    kept = difficulty(curves)["keep_probability"]
    assert kept == {"0": None, "0-25": 0.3, "25-50": None, "50-75": None, "75-100": None, "100": None}
    del curves["sampling/keep_probability/0-25"]
    assert difficulty(curves)["keep_probability"] == {}


def test_no_function_of_the_pages_scripts_replaces_another():
    folder = Path(page.__file__).parent / "assets"
    source = "\n".join((folder / name).read_text() for name in page._SCRIPTS if not name.startswith("uplot"))
    names = re.findall(r"^(?:function|const|let) (\w+)", source, flags=re.MULTILINE)
    assert len(names) > 30
    assert len(set(names)) == len(names)


def test_differences_of_settings_and_numbers(runs):
    contents = report_contents(read_runs(runs))
    rows = {row["name"]: row for row in contents["settings_table"]}
    assert rows["beta"] == {"name": "beta", "part": "objective", "values": [0.001, 0.0], "differs": True}
    assert not rows["loss_normalizer"]["differs"]
    assert rows["epsilon"]["values"] == [0.2, None]
    assert not rows["epsilon"]["differs"]  # not recorded is not another value
    final = {row["name"]: row for row in contents["final_table"]}
    first, second = final["Completion length, incorrect"]["last"]
    assert second > first + 100


def test_json_holds_every_logged_step(runs, tmp_path):
    contents = json.loads(write_report(runs[0], tmp_path / "deep" / "x.json", "json").read_text())
    steps, values = contents["runs"][0]["curves"]["reward"]
    assert (steps, len(values)) == (list(range(1, 41)), 40)
    assert contents["runs"][0]["eval_curves"] == {}


def test_markdown_and_its_picture(runs, tmp_path, few_panels):
    text = write_report(runs, tmp_path / "r.md", "md").read_text()
    assert "![curves](<r.png>)" in text
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "| beta (differs) | 0.001 | 0 |" in text
    assert "![" not in markdown_page(report_contents(read_runs(runs)), None)


def test_markdown_of_hostile_texts(tmp_path, few_panels):
    text = write_report(write_hostile(tmp_path / "run"), tmp_path / "r.md", "md").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "<img" not in text
    assert "\u202e" not in text
    assert len(text) < 20_000


def test_png(runs, tmp_path, few_panels):
    assert write_report(runs, tmp_path / "x.png", format="png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_drgrpo.report.figure.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install \"trl-drgrpo\[report\]\""):
        write_report(runs, tmp_path / "x.png", "png")
    assert "![" not in write_report(runs, tmp_path / "x.md", "md").read_text()


def test_a_hostile_page_holds_no_markup_of_the_run(tmp_path):
    page = write_report(write_hostile(tmp_path / "run")).read_text(encoding="utf-8")
    assert len(page) < 1_000_000  # the five megabytes are folded
    assert page.count("<script") == page.count("</script>") == 2
    assert page.count("<img") == 0
    assert not re.search("[\u2028\u2029\u202e\x00\x1b]", page)
    (group,) = data_of(page)["runs"][0]["groups"]
    texts = ["".join(span["text"] for span in row["spans"]) for row in group["rows"]]
    assert texts[:4] == HOSTILE[:4]
    assert group["rows"][4]["cut"] > 4_900_000


def test_the_policy_allows_the_pages_own_script_and_style_only(runs, tmp_path):
    import base64
    import hashlib

    page = write_report(runs, tmp_path / "x.html").read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (source,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert not re.search(r"\son\w+=", page.split("<script", 1)[0])
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", page)


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


def test_gaps_stay_gaps():
    logged = [Logged(step, "train", {"a": value}) for step, value in ((1, 1.0), (2, None), (3, 3.0), (50, 4.0))]
    curve = curves_of(logged, "train")["a"]
    assert (curve.steps, curve.values) == ([1, 2, 3, 4, 50], [1.0, None, 3.0, None, 4.0])


def test_thinning_takes_means_of_equally_many():
    logged = [Logged(step, "train", {"a": float(step), "b": None}) for step in range(1, 11)]
    curves = curves_of(logged, "train", points=5)
    assert list(curves) == ["a"]
    assert (curves["a"].steps, curves["a"].values) == ([2, 4, 6, 8, 10], [1.5, 3.5, 5.5, 7.5, 9.5])
    assert curves["a"].mean_of == 2


def test_the_later_entry_of_a_step_and_the_runs_end():
    logged = [Logged(1, "train", {"a": 1.0}), Logged(1, "train", {"a": 2.0, "train_runtime": 3.0})]
    assert {name: curve.values for name, curve in curves_of(logged, "train").items()} == {"a": [2.0]}


def test_smoothing_by_hand():
    # 0.2 * 1 / 0.2 = 1; (0.8 * 0.2 + 0.2 * 3) / (0.8 * 0.2 + 0.2) = 0.76 / 0.36
    values = smoothed([1.0, None, 3.0])
    assert values[0] == pytest.approx(1.0)
    assert values[1] != values[1]
    assert values[2] == pytest.approx(0.76 / 0.36)


def test_joiners_of_emoji_stay():
    assert visible("👩\u200d💻 é 中") == "👩\u200d💻 é 中"


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
