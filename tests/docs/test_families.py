"""The table of families is what its results say, and every family is right on the installed transformers."""

import json

import families
import pytest
import transformers

RESULTS = json.loads(families.RESULTS.read_text(encoding="utf-8"))


def test_the_page_shows_the_results():
    text = families.PAGE.read_text(encoding="utf-8")
    assert families.page(text, RESULTS) == text
    if transformers.__version__ == RESULTS["versions"]["transformers"]:
        assert {name for name in families.FAMILIES if families.is_there(name)} == RESULTS["families"].keys()


# Of these, each is the only one of its kind: layers that store nothing, experts, a text part of several.
FAST = ("Nemotron-H", "OLMoE", "Gemma 4, multimodal")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in families.FAMILIES]
)
def test_a_family_is_right_and_planned(name):
    """Tokens, gradient and plan on any version; on the version of the page the same parts as there."""
    if not families.is_there(name):
        pytest.skip(f"not in transformers {transformers.__version__}")
    result = families.measure(name)
    assert result["passed"]
    assert result["plan"] == "yes"
    assert result["parameters"] > 1e9
    if transformers.__version__ == RESULTS["versions"]["transformers"]:
        shown = RESULTS["families"][name]
        assert result["parts"] == shown["parts"]
        assert result["gradient_difference"] == pytest.approx(shown["gradient_difference"], rel=9, abs=1e-6)
