"""Characters that cannot be seen."""

from trl_drgrpo.report.page import visible


def test_joiners_of_emoji_stay():
    assert visible("👩\u200d💻 é 中") == "👩\u200d💻 é 中"
