"""Process reward models named in a recipe: checked at once, loaded at the first step that is to be scored."""

import inspect
from functools import partial

import pytest
from transformers import BertConfig, Qwen2Config

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.process_rewards import PRMScorer, step_verifier
from trl_drgrpo.process_rewards.named import FORMATS, _format_of
from trl_drgrpo.rewards.contract import declared
from trl_drgrpo.rewards.recipe_rewards import resolve_reward

PUBLISHED = {
    "peiyi9979/math-shepherd-mistral-7b-prm": "math_shepherd_prm",
    "UW-Madison-Lee-Lab/VersaPRM-Base-8B": "versa_prm",
    "openreasoner/Math-psa": "math_psa_prm",
    "RLHFlow/Llama3.1-8B-PRM-Deepseek-Data": "chat_turn_prm",
    "PRIME-RL/EurusPRM-Stage2": "implicit_prm",
}


def test_the_format_is_that_of_the_published_id():
    assert {model: _format_of(model) for model in PUBLISHED} == PUBLISHED


def test_each_says_whether_a_score_reads_later_text():
    specs = {name: resolve_reward({name: "a/b"}, "step_reward_funcs") for name in FORMATS}
    declarations = {name: declared(partial(scorer), "is_causal") for name, scorer in specs.items()}
    assert declarations == {name: prm_format.is_causal for name, prm_format in FORMATS.items()}
    assert declarations.pop("token_classification_prm") is None  # a decoder or an encoder, as its configuration says
    assert {name for name, is_causal in declarations.items() if not is_causal} == {"implicit_prm"}
    assert "is_causal" in inspect.getdoc(PRMScorer)  # which describes what all formats have
    assert step_verifier(lambda prompt, before, step: 1.0).is_causal


@pytest.mark.parametrize(("kind", "said"), [(Qwen2Config, True), (BertConfig, False)])
def test_a_token_classifier_says_so_before_its_weights_are_read(kind, said, tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    architecture = f"{kind.__name__.removesuffix('Config')}ForTokenClassification"
    kind(**sizes, architectures=[architecture]).save_pretrained(tmp_path)
    assert resolve_reward({"prm": str(tmp_path)}, "step_reward_funcs").is_causal is said


def test_a_causal_model_does_not_say_which_format_it_has(saved_model):
    with pytest.raises(InputError, match=r"whose architecture, Qwen2ForCausalLM, does not say which format it has"):
        resolve_reward({"prm": saved_model}, "step_reward_funcs")


def test_no_scorer_loads_before_the_first_step(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    named = resolve_reward({"math_shepherd_prm": str(tmp_path)}, "step_reward_funcs")  # no weights there
    with pytest.raises(InputError, match="math|model|tokenizer"):
        named(prompts=["a"], steps=[["b"]])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen_math_prm", {"model": "./nowhere"}, "step_reward_funcs: qwen_math_prm.model: got ./nowhere, which does"),
        ("qwen_math_prm", {"model": "a/b", "markr": "x"}, "qwen_math_prm.markr: .* Did you mean marker?"),
        ("math_shepherd_prm", {"model": 3}, "math_shepherd_prm.model: got 3; expected a path or Hub id"),
        ("token_classification_prm", {}, "got no model"),
        ("qwen_math_prn", {"model": "a/b"}, "Did you mean qwen_math_prm"),
        ("prm", {"model": "a/b"}, "prm.model: got a/b, which is not in the local cache"),
        ("step_judge", {"model": "m", "base_url": "here"}, "step_judge.base_url: got an address of another form"),
    ],
)
def test_faults_of_a_scorer_are_found_before_it_loads(name, options, message):
    with pytest.raises(InputError, match=message):
        resolve_reward({name: options}, "step_reward_funcs")
