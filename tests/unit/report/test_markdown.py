"""The report as Markdown."""

from report_runs import write_hostile

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
