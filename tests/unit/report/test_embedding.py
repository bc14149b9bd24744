"""Data inside a page cannot end its element."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import HOSTILE

from trl_drgrpo.report.page import embedded


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
