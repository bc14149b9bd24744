"""Values after a flag, by the type of their field."""

import pytest

from trl_drgrpo.cli.flags import read_flags
from trl_drgrpo.cli.values import coerce


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_steps", "5", 5),
        ("num_generations", "none", None),
        ("use_peft", "true", True),
        ("reward_funcs", ["a", "b"], ["a", "b"]),
        ("report_to", "none", "none"),
        ("datasets", ["a/b"], [{"path": "a/b"}]),
        ("bf16", "0", False),
    ],
)
def test_text_after_a_flag(name, text, value):
    assert coerce(read_flags()[name], text) == value
