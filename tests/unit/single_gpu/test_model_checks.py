"""What a model cannot do is said from its configuration: no weights are read."""

import functools
from types import SimpleNamespace

import pytest
from peft import LoraConfig
from transformers import LlamaConfig, PreTrainedModel

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.single_gpu.model_checks import check_model
from trl_drgrpo.single_gpu.vocabulary import context_length


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    original = PreTrainedModel.from_pretrained.__func__

    @functools.wraps(original)
    def load(cls, name, **keywords):
        return original(cls, name, **keywords) if name is None else pytest.fail("weights were about to load")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(load))


def check(model, init=None, peft_config=None, rewards=(), **changes):
    settings = {"use_vllm": False, "trust_remote_code": False, "max_completion_length": 12, "beta": 0.0, **changes}
    check_model(SimpleNamespace(model_init_kwargs=init, **settings), model, list(rewards), None, peft_config)


def adapter(targets, **options):
    return LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": {"foo": 1}}, "model_init_kwargs: got the key 'foo'; expected a field of Qwen2Config"),
        ({"init": {"devicemap": None}}, "Did you mean device_map?"),
        # words in the source of `from_pretrained` that are no keywords of it
        ({"init": {"sdpa": True}}, "model_init_kwargs: got the key 'sdpa'"),
        ({"init": {"framework": "pt"}}, "model_init_kwargs: got the key 'framework'"),
        ({"init": {"attn_implementation": "sdp"}}, "attn_implementation: got 'sdp'; .*Did you mean sdpa?"),
        (
            {"max_completion_length": 1024},
            "max_completion_length: got 1024; .* the model's context of 1024",
        ),
        (
            {"peft_config": adapter(["q_prj"])},
            "target_modules .*got q_prj, matching no layer .*Did you mean q_proj?",
        ),
        ({"peft_config": adapter(r".*\.q_prj")}, "matching no layer of Qwen2ForCausalLM"),
        (
            {"peft_config": adapter("all-linear", modules_to_save=["lm_heda"])},
            "lora_modules_to_save.*: got 'lm_heda', .*Did you mean lm_head?",
        ),
        (
            {"peft_config": adapter(["q_proj"], target_parameters=["foo"])},
            "lora_target_parameters.*: got 'foo', which no parameter",
        ),
        ({"init": {"dtype": "float7"}}, "model_init_kwargs: dtype: got 'float7'; expected a dtype of torch"),
        ({"rewards": ["some/reward"]}, "reward_funcs: got some/reward, which is not in the local cache"),
    ],
)
def test_a_bad_setting_is_refused_by_the_configuration_alone(saved_model, options, message):
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        check(saved_model, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"init": {"device_map": None, "low_cpu_mem_usage": True, "use_cache": False, "dtype": "float32"}},
        {"init": {"attn_implementation": "eager"}},
        {"init": {"use_safetensors": True, "max_memory": {0: "1GB"}, "offload_folder": "x", "state_dict": None}},
        {"init": {"revision": None, "trust_remote_code": False, "attn_implementation": None}},
        {"init": {"max_position_embeddings": 2048}, "max_completion_length": 1024},
        {"max_completion_length": 1023},
        {"max_completion_length": None},
        {"peft_config": adapter(["q_proj", "not_in_this_model"])},
        {"peft_config": adapter(r".*\.(q|v)_proj")},
        {"peft_config": adapter("all-linear", modules_to_save=["lm_head"])},
        {"peft_config": adapter(None)},
    ],
)
def test_good_settings_pass(saved_model, options):
    check(saved_model, **options)


def test_a_model_that_is_loaded_already(model):
    check(model)
    with pytest.raises(InputError, match="less than the model's context of 1024"):
        check(model, max_completion_length=2000)
    with pytest.raises(InputError, match="got q_prj, matching no layer"):
        check(model, peft_config=adapter(["q_prj"]))


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({}, 4096),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, 16384),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 1e4,
                    "factor": 8.0,
                    "original_max_position_embeddings": 256,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                }
            },
            4096,
        ),
    ],
)
def test_the_context_with_scaled_positions(fields, length):
    assert context_length(LlamaConfig(max_position_embeddings=4096, **fields)) == length
