"""The sliders of a group, for a notebook; what they compute is tested in a browser."""

import pytest

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.report.groups import group_widget_html


def test_the_snippet_holds_all_it_needs():
    html = group_widget_html([1, 0, 0.5], [10, 300, 20])
    assert html.count("<script>") == html.count("</script>") == 1
    assert "{&quot;rewards&quot;: [1.0, 0.0, 0.5], &quot;lengths&quot;: [10, 300, 20]}" in html
    assert "src=" not in html
    assert "@import" not in html


@pytest.mark.parametrize(("rewards", "lengths"), [([1, 0], None), ([1], [3]), ([1, 0], [3, 0]), ([1, 0], [1, 2, 3])])
def test_half_a_group(rewards, lengths):
    with pytest.raises(InputError, match=r"rewards, lengths: got \d rewards and \d lengths"):
        group_widget_html(rewards, lengths)
