"""Rewards that read text and compute nothing: equal answers, choices, forms, JSON, lengths and repetition.

`matching` holds an answer against a column (text, number or letter); `formats` checks the form, JSON included, and has
TRL's three penalties under one kind of name.
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.rewards.functions.strings.formats import FormatReward as FormatReward
    from trl_drgrpo.rewards.functions.strings.formats import JsonSchemaReward as JsonSchemaReward
    from trl_drgrpo.rewards.functions.strings.formats import RegexReward as RegexReward
    from trl_drgrpo.rewards.functions.strings.formats import format_reward as format_reward
    from trl_drgrpo.rewards.functions.strings.formats import json_schema_reward as json_schema_reward
    from trl_drgrpo.rewards.functions.strings.formats import length_penalty as length_penalty
    from trl_drgrpo.rewards.functions.strings.formats import overlong_penalty as overlong_penalty
    from trl_drgrpo.rewards.functions.strings.formats import repetition_penalty as repetition_penalty
    from trl_drgrpo.rewards.functions.strings.matching import ChoiceReward as ChoiceReward
    from trl_drgrpo.rewards.functions.strings.matching import ExactMatchReward as ExactMatchReward
    from trl_drgrpo.rewards.functions.strings.matching import NumericReward as NumericReward
    from trl_drgrpo.rewards.functions.strings.matching import choice_reward as choice_reward
    from trl_drgrpo.rewards.functions.strings.matching import exact_match_reward as exact_match_reward
    from trl_drgrpo.rewards.functions.strings.matching import numeric_reward as numeric_reward

attach(__name__)
