"""Strict reading: what a recipe or a flag may say, and the one line that everything else gets."""

import pytest

from trl_drgrpo.cli.flags import read_flags
from trl_drgrpo.cli.recipe import coerce, read_recipe
from trl_drgrpo.common.errors import InputError


@pytest.fixture
def read(tmp_path):
    def read_text(text: str):
        (tmp_path / "recipe.yaml").write_text(text)
        return read_recipe(str(tmp_path / "recipe.yaml"))

    return read_text


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("learning_rate: 1e-6", "learning_rate", 1e-6),  # PyYAML reads it as text
        ("learning_rate: 1.0e-6", "learning_rate", 1e-6),
        ("learning_rate: '1e-6'", "learning_rate", 1e-6),
        ("beta: 0", "beta", 0),
        ("num_generations: 8", "num_generations", 8),
        ("num_generations: null", "num_generations", None),
        ("use_peft: yes", "use_peft", True),
        ("use_peft: 'false'", "use_peft", False),
        ("bf16: false", "bf16", False),
        ("eval_strategy: no", "eval_strategy", "no"),  # YAML 1.1 reads False
        ("run_name: 2024", "run_name", "2024"),
        ("scale_rewards: false", "scale_rewards", False),
        ("scale_rewards: none", "scale_rewards", "none"),
        ("resume_from_checkpoint: true", "resume_from_checkpoint", True),
        ("report_to: none", "report_to", "none"),
        ("report_to: [wandb, trackio]", "report_to", ["wandb", "trackio"]),
        ("reward_funcs: accuracy_reward", "reward_funcs", ["accuracy_reward"]),  # TRL takes it letter by letter
        ("reward_weights: [1, 0.5, 1e-1]", "reward_weights", [1, 0.5, 0.1]),
        ("lora_target_modules: all-linear", "lora_target_modules", ["all-linear"]),
        ("model_init_kwargs: {rope_theta: 1e6}", "model_init_kwargs", {"rope_theta": 1e6}),
        ("""generation_kwargs: '{"top_k": 5}'""", "generation_kwargs", {"top_k": 5}),
        ("""liger_kernel_config: '{"rope": true}'""", "liger_kernel_config", {"rope": True}),
        ("pad_to_multiple_of: 8", "pad_to_multiple_of", 8),
        ("pad_to_multiple_of: auto", "pad_to_multiple_of", "auto"),
        ("trackio_static_space_id: false", "trackio_static_space_id", False),
        ("include_num_input_tokens_seen: all", "include_num_input_tokens_seen", "all"),
        ("datasets: [{path: a/b, split: train}]", "datasets", [{"path": "a/b", "split": "train"}]),
        ("base: &b {beta: 0.1}\n<<: *b", None, None),  # `base` is no key
        ("<<: {beta: 0.1}\nbeta: 0.2", "beta", 0.2),  # merge keys are YAML; what is written out wins
    ],
)
def test_values(read, text, key, value):
    if key is None:
        with pytest.raises(InputError, match="base: got an unknown key"):
            read(text)
        return
    result = read(text).values[key]
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "bata: 0.1\nnum_generation: 8",
            r"bata: .* line 1; .*Did you mean beta\? Line 2, num_generation, too: Did you mean num_generations\?",
        ),
        ("scale_reward: false", r"scale_reward: got an unknown key in .*, line 1; .*Did you mean scale_rewards\?"),
        ("beta: 0.1\nloss-normalizer: 5", r"loss-normalizer: .*line 2; .*Did you mean loss_normalizer\?"),
        ("max_prompt_length: 5", "max_prompt_length: .*TRL no longer truncates prompts"),
        ("torch_dtype: float16", "torch_dtype: .*It is called dtype now"),
        (
            "num_processes: 2\nmixed_precision: bf16",
            "num_processes: .*accelerate launch .* Line 2, mixed_precision, too",
        ),
        ("qwertz: 5", r"qwertz: .*Remove it\."),
        ("beta: 0.0\nlearning_rate: 1.0\nbeta: 0.1", "beta: got the same key twice, in lines 1 and 3"),
        ("model_init_kwargs:\n  a: 1\n  a: 2", "a: got the same key twice, in lines 2 and 3"),
        ("- beta", "got a list in .*expected a YAML mapping"),
        ("beta", "got a single value in .*expected a YAML mapping"),
        ("", "got nothing in .*expected a YAML mapping"),
        ("a: [1\nb: 2", "not valid YAML, line 2"),
        ("a: 1\n---\nb: 2", "not valid YAML, line 2"),
        ("num_generations: eight", "num_generations: got 'eight' in .*line 1; expected a whole number or null"),
        ("num_generations: 8.5", "num_generations: got 8.5"),
        ("num_generations: true", "num_generations: got True"),
        ("lora_r: null", "lora_r: got None .*expected a whole number"),
        ("learning_rate: fast", "learning_rate: got 'fast' .*expected a number"),
        ("learning_rate: {a: 1}", "learning_rate: got {'a': 1}"),
        ("learning_rate: [1]", r"learning_rate: got \[1\]"),
        ("output_dir: [a]", r"output_dir: got \['a'\]"),
        ("use_peft: perhaps", "use_peft: got 'perhaps' .*true or false"),
        ("use_peft: 2", "use_peft: got 2"),
        ("reward_weights: [1, x]", r"reward_weights: got \[1, 'x'\]"),
        ("liger_kernel_config: 3", "liger_kernel_config: got 3 .*a mapping"),
        ("generation_kwargs: '{top_k: 5}'", "generation_kwargs: .*not valid JSON"),
        ("dtype: bfloat", r"dtype: got 'bfloat' .*one of auto, bfloat16, .*Did you mean bfloat16\?"),
        ("parallelism_config: {tp: 2}", "parallelism_config: .*cannot be written in a recipe"),
        ("datasets: [{paht: a}]", r"datasets: paht: got an unknown key; .*Did you mean path\?"),
        ("datasets: [{name: a}]", "datasets: .*a mapping with a `path`"),
        ("env: [a]", "env: .*a mapping of variable names"),
        ("env: {a: [1]}", "env: .*a mapping of variable names"),
    ],
)
def test_errors(read, text, message):
    with pytest.raises(InputError, match=message):
        read(text)


def test_env_and_missing_files(read, tmp_path):
    read_in = read("env: {SOME_NUMBER: 1, SOME_TEXT: a}\nbeta: 0.1")
    assert (read_in.env, read_in.values) == ({"SOME_NUMBER": "1", "SOME_TEXT": "a"}, {"beta": 0.1})
    for path, problem in ((tmp_path / "no.yaml", "which does not exist"), (tmp_path, "a directory")):
        with pytest.raises(InputError, match=f"--config: got .*{problem}"):
            read_recipe(str(path))


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
