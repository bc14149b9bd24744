"""The names of TRL's reward functions. TRL is imported when a recipe uses one."""

from trl_drgrpo.rewards.recipe_names import register_reward

register_reward(
    "accuracy_reward",
    "trl.rewards:accuracy_reward",
    help="TRL's: 1 if Math-Verify finds the answer equal to the column `solution`.",
)
register_reward(
    "reasoning_accuracy_reward",
    "trl.rewards:reasoning_accuracy_reward",
    help="TRL's: `accuracy_reward` of the text after the reasoning.",
)
register_reward(
    "think_format_reward",
    "trl.rewards:think_format_reward",
    help="TRL's: 1 for reasoning in `<think>..</think>`.",
)
register_reward(
    "get_soft_overlong_punishment",
    help="TRL's: falls from 0 to -1 over the last tokens before a limit.",
    factory="trl.rewards:get_soft_overlong_punishment",
    usual_options={"max_completion_len": 1280, "soft_punish_cache": 256},  # as in TRL's own script
    is_harmless=True,
)
register_reward(
    "get_repetition_penalty_reward",
    help="TRL's: negative for repeated n-grams.",
    factory="trl.rewards:get_repetition_penalty_reward",
    is_harmless=True,
)
register_reward(
    "get_cosine_scaled_reward",
    help="TRL's: correctness, scaled by the cosine of the length.",
    factory="trl.rewards:get_cosine_scaled_reward",
    is_harmless=True,
)
