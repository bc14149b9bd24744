"""How much of an adapter on a 4-bit base moves in 20 optimizer steps, in float32 and in TRL's bfloat16.

    python tests/benchmarks/adapter_dtype.py

Prints the share of sampled elements of LoRA-A and LoRA-B that changed, per dtype and learning rate. CPU, a minute.
"""

import tempfile
from pathlib import Path

from bench import command_line, quietly, trainer_of
from runs import length_reward
from tiny import tiny_tokenizer
from tiny_bases import save_base

from trl_drgrpo import DrGRPOTrainer, lora_preset

STEPS = 20


def shares(base, folder, adapter_dtype, learning_rate):
    """Per group of parameters, the share that changed."""
    fields = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant",
        "logging_steps": STEPS,
        "adapter_dtype": adapter_dtype,
        "bf16": True,
    }
    prompts, options = [f"{i}+{i * i}=" for i in range(16)], {"peft_config": lora_preset("qlora")}
    trainer = trainer_of(DrGRPOTrainer, folder, STEPS, prompts, length_reward, base, options=options, **fields)
    trainer.movement_watch.steps = STEPS
    trainer.train()
    return trainer.movement_watch.shares


def main():
    quietly(command_line(__doc__, pairs=0))
    with tempfile.TemporaryDirectory() as folder:
        base = save_base(Path(folder) / "base", tiny_tokenizer(), hidden_size=256, intermediate_size=512, head_dim=64)
        for adapter_dtype in ("upstream", "float32"):
            for learning_rate in (1e-6, 1e-5, 1e-4):
                found = shares(base, folder, adapter_dtype, learning_rate)
                text = ", ".join(f"{group} {share:.2%}" for group, share in found.items())
                print(f"adapter_dtype={adapter_dtype}, learning rate {learning_rate:.0e}: {text}", flush=True)


if __name__ == "__main__":
    main()
