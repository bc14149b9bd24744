"""The report as a page: its content, its policy, and data inside it that cannot end its element."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import HOSTILE, data_of, write_hostile

from trl_drgrpo import write_report
from trl_drgrpo.report import page as html
from trl_drgrpo.report.page import embedded, visible


def test_the_page_states_the_objective_that_was_recorded(runs, tmp_path):
    page = write_report(runs[0], tmp_path / "x.html").read_text()
    assert '<div class="formula"><p>loss = 1 / (B * L)' in page
    assert "A_i  = r_i - &lt;b&gt;" in page


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


def test_no_function_of_the_pages_scripts_replaces_another():
    folder = Path(html.__file__).parent / "assets"
    source = "\n".join((folder / name).read_text() for name in html._SCRIPTS if not name.startswith("uplot"))
    names = re.findall(r"^(?:function|const|let) (\w+)", source, flags=re.MULTILINE)
    assert len(names) > 30
    assert len(set(names)) == len(names)


@given(st.text() | st.sampled_from(HOSTILE))
def test_embedded_data_is_the_same_and_cannot_end_its_element(text):
    written = embedded({"text": text})
    assert json.loads(written)["text"] == text
    assert "<" not in written
    assert "\u2028" not in written
    written.encode()  # lone surrogates are escaped


def test_nan_is_refused_rather_than_written():
    with pytest.raises(ValueError, match="JSON"):
        embedded({"x": float("nan")})


def test_joiners_of_emoji_stay():
    assert visible("👩\u200d💻 é 中") == "👩\u200d💻 é 中"
