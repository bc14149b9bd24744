"""A whole optimizer step: stock GRPOTrainer with the two switches against DrGRPOTrainer, process CPU time.

On fixed completions, the default, both trainers run the same geometry on the same tiny model, so that generation and
the model do the same in each, and ours keeps TRL's micro-batches (`fast_path.py` is about planned ones). The objective
is the same bit for bit, so the ratio is the price of checks, advantages and hooks.

With `--generate 64 256 512` transformers generates 4 prompts of so many tokens with 8 completions of up to 192 tokens
each; the rewards of one group in four are equal. The model is the Qwen3 of `generation.py`, with random values and 259
tokens, one of which ends a completion. Both trainers sample from the same seed.

Run: `make bench-overhead` (about two minutes). Prints a table; the figures in the docs name their date and machine.
"""

import tempfile
from functools import partial

from bench import KINDS, StepClock, command_line, interleaved, medians, now, print_head, print_row, quietly, trainer_of
from generation import GROUP, small_model
from runs import length_reward

PROMPTS, DEAD = 4, 1


def fixed_rollouts(prompts, trainer):
    """Completions of 16 to 64 tokens, the same for every trainer."""
    completions = [[40 + (7 * row + t) % 200 for t in range(16 + (row * 13) % 49)] for row in range(len(prompts))]
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def fixed(kind, steps):
    """Seconds of an optimizer step on fixed completions, and these."""
    trainer_class, settings = KINDS[kind]
    geometry = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "num_generations": 8}
    settings = {**settings, **({"micro_batching": "upstream"} if kind == "ours" else {})}
    fields = {**settings, **geometry, "max_completion_length": 64, "logging_steps": steps}
    prompts, options = [f"{i}+{i * i}=" for i in range(64)], {"rollout_func": fixed_rollouts}
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(trainer_class, folder, steps, prompts, length_reward, options=options, **fields)
        start = now("cpu")
        trainer.train()
        return (now("cpu") - start) / steps, []


def generated(kind, prompt, completion=192):
    """Seconds of an optimizer step, and its completions."""
    trainer_class, settings = KINDS[kind]
    seen = []

    def reward(prompts, completion_ids, **kwargs):
        seen.extend(tuple(ids) for ids in completion_ids)
        groups = {text: number for number, text in enumerate(dict.fromkeys(prompts))}
        return [
            float(groups[text] >= DEAD and sum(ids) % 2) for text, ids in zip(prompts, completion_ids, strict=True)
        ]

    texts = [(f"{number}: " + "abcdefgh " * prompt)[:prompt] for number in range(PROMPTS)]
    geometry = {"per_device_train_batch_size": GROUP, "gradient_accumulation_steps": PROMPTS, "num_generations": GROUP}
    with tempfile.TemporaryDirectory() as folder:
        model, fields = (
            small_model("cpu", vocabulary=259),
            {**settings, **geometry, "max_completion_length": completion},
        )
        trainer = trainer_of(trainer_class, folder, 1, texts, reward, model, **fields)
        clock = StepClock()
        trainer.add_callback(clock)
        trainer.train()
    return clock.ends[0] - clock.begins[0], seen


def main():
    parser = command_line(__doc__, pairs=9)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps per run on fixed completions")
    parser.add_argument("--generate", nargs="*", type=int, default=[], help="tokens of prompts that are completed")
    arguments = quietly(parser)
    cases = {f"prompts of {prompt}": (generated, prompt) for prompt in arguments.generate}
    print_head("case", "stock, s", "ours, s", "stock / ours (min to max)", "")
    for label, (step, size) in (cases or {"fixed completions": (fixed, arguments.steps)}).items():
        runs = [partial(step, kind, size) for kind in ("stock", "ours")]
        stock, ours = interleaved(arguments.pairs, *runs)
        same = [seen for _, seen in stock] == [seen for _, seen in ours]
        theirs, own = ([seconds for seconds, _ in results] for results in (stock, ours))
        print_row(label, *medians(theirs, own, digits=3), "same completions" if same else "OTHER COMPLETIONS")


if __name__ == "__main__":
    main()
