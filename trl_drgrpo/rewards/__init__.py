"""Rewards: what scores a whole completion.

A reward is what TRL calls: `f(prompts=, completions=, completion_ids=, ..., <columns>)`, a list of floats, with
`None` for a completion that cannot be scored. By room: `functions` scores (mathematics, code, strings, judge, tasks of
reasoning-gym); `combine` and `isolation` are put around other rewards; `adapters` translate those of other stacks;
`scoring` runs rewards over saved completions. Below them: `contract` (what a reward owes the trainer, and limits),
`columns` (what it takes, and whether the dataset has that), `texts` (completions as strings), `recipe_rewards` (from a
name to a reward) and `sample` (the base of rewards that score one text at a time).

Names resolve on first use: importing this package loads neither torch nor trl nor sympy.
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.rewards.adapters.stacks import from_openrlhf as from_openrlhf
    from trl_drgrpo.rewards.adapters.stacks import from_r1_zero as from_r1_zero
    from trl_drgrpo.rewards.adapters.stacks import from_swift as from_swift
    from trl_drgrpo.rewards.adapters.stacks import from_trl as from_trl
    from trl_drgrpo.rewards.adapters.stacks import from_verifiers as from_verifiers
    from trl_drgrpo.rewards.adapters.stacks import from_verl as from_verl
    from trl_drgrpo.rewards.columns import check_columns as check_columns
    from trl_drgrpo.rewards.combine import clipped as clipped
    from trl_drgrpo.rewards.combine import gated as gated
    from trl_drgrpo.rewards.combine import weighted_sum as weighted_sum
    from trl_drgrpo.rewards.contract import RewardFunction as RewardFunction
    from trl_drgrpo.rewards.contract import checked_reward as checked_reward
    from trl_drgrpo.rewards.functions.code.program_reward import CodeReward as CodeReward
    from trl_drgrpo.rewards.functions.code.program_reward import code_reward as code_reward
    from trl_drgrpo.rewards.functions.code.sandbox import Sandbox as Sandbox
    from trl_drgrpo.rewards.functions.judge import JudgeReward as JudgeReward
    from trl_drgrpo.rewards.functions.mathematics import MathReward as MathReward
    from trl_drgrpo.rewards.functions.mathematics import math_reward as math_reward
    from trl_drgrpo.rewards.functions.reasoning_gym import reasoning_gym_reward as reasoning_gym_reward
    from trl_drgrpo.rewards.functions.strings.formats import FormatReward as FormatReward
    from trl_drgrpo.rewards.functions.strings.formats import JsonSchemaReward as JsonSchemaReward
    from trl_drgrpo.rewards.functions.strings.formats import RegexReward as RegexReward
    from trl_drgrpo.rewards.functions.strings.formats import format_reward as format_reward
    from trl_drgrpo.rewards.functions.strings.formats import json_schema_reward as json_schema_reward
    from trl_drgrpo.rewards.functions.strings.formats import overlong_penalty as overlong_penalty
    from trl_drgrpo.rewards.functions.strings.formats import repetition_penalty as repetition_penalty
    from trl_drgrpo.rewards.functions.strings.matching import ChoiceReward as ChoiceReward
    from trl_drgrpo.rewards.functions.strings.matching import ExactMatchReward as ExactMatchReward
    from trl_drgrpo.rewards.functions.strings.matching import NumericReward as NumericReward
    from trl_drgrpo.rewards.functions.strings.matching import choice_reward as choice_reward
    from trl_drgrpo.rewards.functions.strings.matching import exact_match_reward as exact_match_reward
    from trl_drgrpo.rewards.functions.strings.matching import numeric_reward as numeric_reward
    from trl_drgrpo.rewards.isolation import Limits as Limits
    from trl_drgrpo.rewards.isolation import isolate as isolate
    from trl_drgrpo.rewards.recipe_names import register_reward as register_reward
    from trl_drgrpo.rewards.recipe_rewards import resolve_reward as resolve_reward
    from trl_drgrpo.rewards.sample import SampleReward as SampleReward
    from trl_drgrpo.rewards.texts import completion_text as completion_text
    from trl_drgrpo.rewards.texts import prompt_text as prompt_text

attach(__name__)
