"""The wording of every literal `InputError` and `RewardError`; a missing package is one line before a model loads."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from transformers import BitsAndBytesConfig
from trl.rewards import accuracy_reward, think_format_reward

import trl_drgrpo
from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.common import errors
from trl_drgrpo.common.errors import InputError, require_for_quantization, require_package

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


# Missing packages ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["bitsandbytes", "math_verify", "vllm"])
def missing(request, monkeypatch):
    """One package that is not there, the others as they are."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        errors.importlib.util, "find_spec", lambda name, *args: None if name == request.param else find(name, *args)
    )
    return request.param


def build(prompts, reward=len, model="no/such-model", config=None, **arguments):
    """A trainer that would have to load a model that does not exist."""
    return DrGRPOTrainer(model, reward, config or DrGRPOConfig(report_to="none"), prompts, **arguments)


def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def test_what_is_installed_is_no_error():
    require_package("torch", "anything", "True", "none")
    require_for_quantization(None)
    require_for_quantization({"quant_method": "gptq", "bits": 4})
    require_for_quantization(BitsAndBytesConfig())


@pytest.mark.parametrize("missing", ["bitsandbytes"], indirect=True)
@pytest.mark.parametrize("config", [BitsAndBytesConfig(load_in_4bit=True), {"load_in_8bit": True}])
def test_quantisation_without_bitsandbytes(missing, config, prompts):
    with pytest.raises(InputError, match=r'^quantization_config: .* `pip install "trl-drgrpo\[qlora\]"`'):
        build(prompts, length, quantization_config=config)
    in_model = DrGRPOConfig(report_to="none", model_init_kwargs={"quantization_config": config})
    with pytest.raises(InputError, match="bitsandbytes is not installed"):
        build(prompts, length, config=in_model)


@pytest.mark.parametrize("missing", ["math_verify"], indirect=True)
def test_trls_accuracy_reward_without_math_verify(missing, prompts):
    with pytest.raises(InputError, match=r'TRL\'s accuracy_reward, .* `pip install "trl-drgrpo\[math\]"`'):
        build(prompts.rename_column("answer", "solution"), accuracy_reward)
    with pytest.raises(InputError, match="^model_name_or_path: got "):  # another one of TRL's goes on to the model
        build(prompts, think_format_reward)


@pytest.mark.parametrize("missing", ["vllm"], indirect=True)
def test_vllm_that_is_not_there(missing, prompts):
    with pytest.raises(InputError, match=r'^use_vllm: got True, but vllm .* `pip install "trl-drgrpo\[vllm\]"`'):
        build(prompts, length, config=DrGRPOConfig(report_to="none", use_vllm=True))
