"""A whole optimizer step, generation by transformers: stock GRPOTrainer with the two switches against DrGRPOTrainer.

Generation, rewards, loss and optimizer, of 4 prompts with 8 completions of up to 192 tokens each; the rewards of one
group in four are equal. The model is the Qwen3 of `generation.py`, with random values and 259 tokens, one of which
ends a completion. Both trainers sample from the same seed. Process CPU time, medians over pairs.

Run: this file with `--prompts 64 256 512`, `--pairs 3`.
"""

import statistics
import tempfile
from functools import partial

from bench import KINDS, StepClock, command_line, interleaved, quietly, ratio, settings_of, without_prints
from datasets import Dataset
from generation import GROUP, small_model
from runs import build
from tiny import tiny_tokenizer

PROMPTS, DEAD = 4, 1


def step(kind, prompt, completion=192):
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
    with tempfile.TemporaryDirectory() as folder:
        fields = {
            **settings,
            "per_device_train_batch_size": GROUP,
            "gradient_accumulation_steps": PROMPTS,
            "num_generations": GROUP,
            "max_completion_length": completion,
        }
        prompts, model = Dataset.from_dict({"prompt": texts}), small_model("cpu", vocabulary=259)
        run = settings_of(folder, 1, **fields)
        trainer = build(trainer_class, run, prompts, tiny_tokenizer(), reward, model)
        clock = StepClock()
        trainer.add_callback(clock)
        without_prints(trainer).train()
    return clock.ends[0] - clock.begins[0], seen


def main():
    parser = command_line(__doc__, pairs=3)
    parser.add_argument("--prompts", nargs="*", type=int, default=[64, 256, 512], help="tokens of a prompt")
    arguments = quietly(parser)
    print("| case | stock, s | ours, s | ratio (min to max) | |\n|---|---|---|---|---|", flush=True)
    for prompt in arguments.prompts:
        stock, ours = interleaved(arguments.pairs, partial(step, "stock", prompt), partial(step, "ours", prompt))
        same = [seen for _, seen in stock] == [seen for _, seen in ours]
        theirs, own = ([seconds for seconds, _ in results] for results in (stock, ours))
        print(
            f"| prompts of {prompt} | {statistics.median(theirs):.2f} | {statistics.median(own):.2f} | "
            f"{ratio(theirs, own)} | {'same completions' if same else 'OTHER COMPLETIONS'} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
