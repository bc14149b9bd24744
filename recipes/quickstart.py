# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-drgrpo[math]"]
#
# [tool.uv.sources]
# trl-drgrpo = { path = ".." }  # this checkout
# ///
"""GSM8K with LoRA on Qwen2.5-0.5B-Instruct: a script for TRL's GRPOTrainer with two lines changed.

In a checkout:  uv run recipes/quickstart.py
HF Jobs, untested, needs the package on an index; delete the two lines on sources first:
                hf jobs uv run --flavor a10g-small recipes/quickstart.py
Hardware: one GPU. Not measured there yet; the tests run 2 steps of it on a tiny model on CPU.
"""

from datasets import load_dataset

from trl_drgrpo import DrGRPOConfig as GRPOConfig
from trl_drgrpo import DrGRPOTrainer as GRPOTrainer
from trl_drgrpo import lora_preset, preset_arguments
from trl_drgrpo.rewards import MathReward

SYSTEM = {"role": "system", "content": r"Please reason step by step, and put your final answer within \boxed{}."}

questions = load_dataset("openai/gsm8k", "main", split="train")
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=MathReward(answer_column="answer"),
    args=GRPOConfig("runs/quickstart", max_steps=200, gradient_accumulation_steps=8, **preset_arguments("lora")),
    train_dataset=questions.map(lambda row: {"prompt": [SYSTEM, {"role": "user", "content": row["question"]}]}),
    peft_config=lora_preset("lora"),
)
trainer.train()
trainer.save_model()
