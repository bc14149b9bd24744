"""Unit tests for Python completions, in a sandbox: `code_reward`, and `CodeReward` to choose columns and limits."""

from trl_drgrpo.rewards.code.reward import CodeReward, code_reward

__all__ = ["CodeReward", "code_reward"]
