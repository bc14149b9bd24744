"""A whole optimizer step, generation included: stock GRPOTrainer with the two switches against DrGRPOTrainer.

transformers generates; both trainers sample the same completions from the same seed. Process CPU time. A row varies
one thing of `base`: 4 prompts of 64 tokens, 8 completions of each of up to 192, one token in 259 ends a completion,
the rewards of one group in four are equal; the Qwen3 of `generation.py`, 192 wide with 4 layers, with random values.
`large` is 640 wide with 12 layers, and its completions have up to 96 tokens. `hybrid` is a Qwen3.5 with three layers
of running states and one of attention, `window` a Gemma 3 with windows of 128 tokens in three layers of four, `full`
the model of `base`, and `experts` a Qwen3 of eight experts, whose load ours balances over the generation batch;
completions of these four have up to 64 tokens.

Run: `make bench-steps`, or this file with `--rows base prompt-512`. A row that takes stock TRL a minute takes four
minutes with three pairs.
"""

import tempfile
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from bench import KINDS, StepClock, command_line, interleaved, medians, print_head, print_row, quietly, trainer_of
from generation import experts_model, hybrid_model, small_model, window_model


@dataclass(frozen=True)
class Case:
    """One row: numbers of prompts, completions of each, tokens, width and layers, and groups without signal.

    `layers`: `"full"` attention, or as `size` of 192 by 4 `"hybrid"`, `"window"` and `"experts"`.
    """

    prompts: int = 4
    group: int = 8
    prompt: int = 64
    completion: int = 192
    size: tuple[int, int] = (192, 4)
    dead: int = 1
    layers: str = "full"

    def model(self):
        """A model with random values."""
        if self.layers == "full":
            return small_model("cpu", 259, *self.size)
        return {"hybrid": hybrid_model, "window": window_model, "experts": experts_model}[self.layers]("cpu", 259)


BASE, LARGE = Case(), (640, 12)
ROWS = {
    "base": BASE,
    **{f"G-{group}": replace(BASE, group=group) for group in (4, 16, 32)},
    **{f"completion-{tokens}": replace(BASE, completion=tokens) for tokens in (512, 1024)},
    **{f"prompt-{tokens}": replace(BASE, prompt=tokens) for tokens in (256, 512, 1024, 2048)},
    **{f"width-{width}": replace(BASE, size=(width, 4)) for width in (96, 384, 768)},
    **{f"dead-{dead}": replace(BASE, dead=dead) for dead in (0, 2, 3)},
    **{f"large-{tokens}": replace(BASE, prompt=tokens, completion=96, size=LARGE) for tokens in (64, 256, 512)},
    **{
        f"{layers}-{tokens}": replace(BASE, prompt=tokens, completion=64, layers=layers)
        for layers, tokens in product(("full", "hybrid", "window", "experts"), (64, 256, 512))
    },
    # Nothing to skip, share or trim: one completion of two is no group that shares much, and none ends early.
    "nothing": replace(BASE, prompt=8, group=2, prompts=16, dead=0),
}


def seconds(kind, case):
    """Seconds of an optimizer step, and its completions."""
    trainer_class, settings = KINDS[kind]
    seen = []

    def reward(prompts, completion_ids, **kwargs):
        seen.extend(tuple(ids) for ids in completion_ids)
        groups = {text: number for number, text in enumerate(dict.fromkeys(prompts))}
        return [
            float(groups[text] >= case.dead and sum(ids) % 2)
            for text, ids in zip(prompts, completion_ids, strict=True)
        ]

    texts = [(f"{number}: " + "abcdefgh " * case.prompt)[: case.prompt] for number in range(case.prompts)]
    fields = {
        **settings,
        "per_device_train_batch_size": case.group,
        "gradient_accumulation_steps": case.prompts,
        "num_generations": case.group,
        "max_completion_length": case.completion,
    }
    if case.layers == "experts" and kind == "ours":
        fields["router_aux_scope"] = "batch"
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(trainer_class, folder, 1, texts, reward, case.model(), **fields)
        clock = StepClock()
        trainer.add_callback(clock)
        trainer.train()
    return clock.ends[0] - clock.begins[0], seen


def main():
    parser = command_line(__doc__, pairs=3)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=ROWS, help="which rows")
    arguments = quietly(parser)
    print_head("case", "stock, s", "ours, s", "stock / ours (min to max)", "tokens of a completion, mean", "")
    for name in arguments.rows:
        stock, ours = interleaved(arguments.pairs, *(partial(seconds, kind, ROWS[name]) for kind in ("stock", "ours")))
        same = [seen for _, seen in stock] == [seen for _, seen in ours]
        theirs, own = ([taken for taken, _ in results] for results in (stock, ours))
        length = sum(map(len, ours[0][1])) / len(ours[0][1])
        print_row(
            name,
            *medians(theirs, own),
            f"{length:.0f}",
            "same completions" if same else "OTHER COMPLETIONS",
        )


if __name__ == "__main__":
    main()
