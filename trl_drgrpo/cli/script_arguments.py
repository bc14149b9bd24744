"""The script arguments of `trl-drgrpo train`: those of `trl grpo`, and some more.

Read statically by `flags.py` for `--help` and the strict check; imported only when a run is put together.
"""

from dataclasses import dataclass, field

from trl_drgrpo.config.field_kinds import with_help
from trl_drgrpo.rewards.recipe_rewards import RewardSpec
from trl_drgrpo.upstream.versions import require_supported_trl

require_supported_trl()

from trl.scripts.grpo import GRPOScriptArguments  # noqa: E402  # the version is judged before anything heavy loads


@with_help
@dataclass
class DrGRPOScriptArguments(GRPOScriptArguments):
    """
    Script arguments: TRL's [`GRPOScriptArguments`] with wider `dataset_name` and `reward_funcs`, and with
    `step_reward_funcs`, `tools`, `environment_factory`, `rollout_func`, `rename_columns`, `prompt_template`,
    `system_prompt`, `preset` and `early_stopping_patience`.

    Args:
        dataset_name (`str`, *optional*):
            What to train on: a Hub id, a local folder or file (.json, .jsonl, .parquet, .csv),
            `reasoning_gym:<task>?size=..&seed=..` or `trl_drgrpo:list_sum`. Ignored if `datasets` is given. See
            [`trl_drgrpo.cli.data.load_data`].
        reward_funcs (`list[str | dict]`, *optional*):
            Reward functions, each a name (`--help_all` ends with a list), a dotted path `package.module.function`,
            `path/to/file.py:function`, or a mapping `{name: {option: value}}` (in quotes after the flag), for example
            `{verl: path/to/file.py:compute_score}` or `{isolate: {reward: path/to/file.py:f, timeout: 5}}`. The name
            `get_soft_overlong_punishment` alone stands for `max_completion_len=1280`, `soft_punish_cache=256`. See
            [`~trl_drgrpo.rewards.resolve_reward`].
        step_reward_funcs (`list[str | dict]`, *optional*):
            Step reward functions, named like reward_funcs: one reward per step of a completion, for example
            `list_sum_line_reward` of the demo. Process reward models as mappings: `{qwen_math_prm: {model: <path or
            Hub id>}}`, or `prm`, where the model says which format it has; its folder or Hub id alone is short for
            that. With step_separator, step_credit and step_baseline.
        tools (`list[str]`, *optional*):
            Functions that the model may call, each `package.module.function` or `path/to/file.py:function`, with type
            hints and a docstring that describes the arguments.
        environment_factory (`str`, *optional*):
            Class of environments with `reset` and tools as methods, one object per completion: a path as in tools,
            to a class, a function that makes one, or a mapping of names to them (rows choose by a column
            `environment`).
        rollout_func (`str`, *optional*):
            Function of prompts and trainer that generates the completions, a path as in tools.
        rename_columns (`list[str]`, *optional*):
            Columns to rename before training, in every split, each `old=new`, for example `question=prompt`.
        prompt_template (`str`, *optional*):
            Text around each prompt: `qwen_math` or `r1` for base models (arXiv 2503.20783), or a text of your own in
            which `{prompt}` stands for the prompt and `{column}` for any other column. See
            [`trl_drgrpo.cli.data.template_text`].
        system_prompt (`str`, *optional*):
            Makes each prompt a conversation that starts with this system message, for chat models.
        preset (`str`, *optional*):
            `lora` or `qlora`: adapters on all linear layers (for qlora on a base in 4 bit) with rank, learning rate,
            optimizer and dtype for one GPU. Explicit settings win; --dry_run shows what the preset sets. See
            [`trl_drgrpo.single_gpu.lora_preset`].
        early_stopping_patience (`int`, *optional*):
            Stop after this many evaluations in a row without a new best metric_for_best_model.
    """

    dataset_name: str | None = None
    reward_funcs: list[RewardSpec] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    step_reward_funcs: list[RewardSpec] | None = None
    tools: list[str] | None = None
    environment_factory: str | None = None
    rollout_func: str | None = None
    rename_columns: list[str] | None = None
    prompt_template: str | None = None
    system_prompt: str | None = None
    preset: str | None = field(default=None, metadata={"choices": ["lora", "qlora"]})
    early_stopping_patience: int | None = None
