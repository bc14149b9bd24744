"""The wording of every literal `InputError` and `RewardError`; what is installed is no error."""

import ast
import re
from pathlib import Path

from transformers import BitsAndBytesConfig

import trl_drgrpo
from trl_drgrpo.common.errors import require_for_quantization, require_package

OLD_WORDS = re.compile(r"\b(mend|anew|roll-outs?|goes in|goes away)\b", re.IGNORECASE)


def literal(node: ast.expr) -> str | None:
    """A text as it stands in the code, with `{}` for its values; `None` for an expression."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def problems(source: str) -> list[str]:
    """Texts out of form: `got` and `expected` without a full stop, the remedy a sentence, all in today's words."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and len(node.args) == 4]
    found = []
    for call in calls:
        if getattr(call.func, "id", "") in ("InputError", "RewardError"):
            _, got, expected, remedy = map(literal, call.args)
            found += [text for text in (got, expected) if text and text.endswith(".")]
            found += [remedy] if remedy and not remedy.endswith((".", "?", "{}")) else []
            found += [text for text in (got, expected, remedy) if text and OLD_WORDS.search(text)]
    return found


def test_every_error_has_its_form():
    files = sorted(Path(trl_drgrpo.__file__).parent.rglob("*.py"))
    assert {str(file): out for file in files if (out := problems(file.read_text(encoding="utf-8")))} == {}


def test_what_is_installed_is_no_error():
    require_package("torch", "anything", "True", "none")
    require_for_quantization(None)
    require_for_quantization({"quant_method": "gptq", "bits": 4})
    require_for_quantization(BitsAndBytesConfig())
