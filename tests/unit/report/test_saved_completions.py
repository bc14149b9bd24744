"""Texts of saved completions."""

from trl_drgrpo.report.completions import conversation


def test_conversations_become_text():
    turns = [{"role": "assistant", "content": "4"}, {"role": "tool", "content": "ok"}]
    assert conversation("plain") == "plain"
    assert conversation(turns[:1]) == "4"
    assert conversation(turns) == "[assistant] 4\n[tool] ok"
    assert (
        conversation([{"role": "user", "content": [{"type": "text", "text": "é"}]}])
        == '[{"type": "text", "text": "é"}]'
    )
