"""The formats of process reward models, by their names in recipes."""

# Name in a recipe: the scorer, a class of this package; and what tells the format: a pattern of the published ids, or
# the architecture that a configuration states.
FORMATS = {
    "token_classification_prm": ("TokenClassificationScorer", None, "ForTokenClassification"),
    "math_shepherd_prm": ("MathShepherdScorer", "math-shepherd", None),
    "versa_prm": ("VersaScorer", "versaprm|llama-prm800k", None),
    "math_psa_prm": ("MathPSAScorer", "math-psa", None),
    "qwen_math_prm": ("QwenMathScorer", None, "Qwen2ForProcessRewardModel"),
    "chat_turn_prm": ("ChatTurnScorer", r"llama3\.1-8b-prm", None),
    "skywork_prm": ("SkyworkScorer", None, "Qwen2ForPrmModel"),
    "implicit_prm": ("ImplicitRewardScorer", "eurusprm", None),
}
