"""The report as Markdown."""

from report_runs import write_forked, write_hostile

from trl_drgrpo import write_report
from trl_drgrpo.report.contents import report_contents
from trl_drgrpo.report.markdown import markdown_page
from trl_drgrpo.report.reading import read_runs


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
