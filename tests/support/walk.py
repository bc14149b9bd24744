"""A two-turn environment, and a trainer whose completions are given: a random model never calls a tool."""

import json
import re

from tiny import tiny_model, tiny_tokenizer
from trl.chat_template_utils import qwen3_chat_template

from trl_drgrpo import DrGRPOTrainer


class Walk:
    """Pays for the place that it is sent to, on every call."""

    def reset(self, **kwargs):
        self.place, self.paid = 0, []

    def on_turn_begin(self):
        self.paid.append(0.0)

    def state_key(self):
        return self.place

    def go(self, row: int, to: int) -> str:
        """Go to a place.

        Args:
            row: Who goes.
            to: The place.

        Returns:
            Where it is, or something much too long.
        """
        self.place = to
        self.paid[-1] += to
        return "far away " * 100 if to == 4 else f"at {to}"

    def get_turn_rewards(self):
        return self.paid


def with_tools():
    """The tiny model and its tokenizer with a chat template that has tools."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = qwen3_chat_template
    model = tiny_model(tokenizer)
    model.config.max_position_embeddings = 4096  # the tools' description comes with the prompt
    return model, tokenizer


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# What the four rows of a group say, turn by turn. They earn, and begin in the places:
#   0: 1, 2, 0      0, 1, 2
#   1: 2, 0, 0      0, 2, 2     its second turn calls what is no tool
#   2: 2, 0         0, 1        its first turn makes two calls
#   3: 4            0           the answer to its call does not fit and is dropped
SAYS = [
    [call("go", row=0, to=1), call("go", row=0, to=2), "there"],
    [call("go", row=1, to=2), call("get_turn_rewards"), "there"],
    [call("go", row=2, to=1) + call("go", row=2, to=1), "there"],
    [call("go", row=3, to=4)],
]


class Scripted(DrGRPOTrainer):
    """Says `SAYS` in the place of the random model: row after row of a group."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        sampled = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        first = self.accelerator.process_index * len(prompt_ids)  # of all ranks' rows, in the first turn
        for place, ids in enumerate(prompt_ids):
            said = self.processing_class.decode(ids).split("<|im_start|>assistant\n")[1:-1]
            row = (first + place) % self.num_generations % len(SAYS)
            if said:  # fewer rows than before
                row = int(re.search(r'"row": (\d)', said[0])[1])
            sampled[0][place] = self.processing_class.encode((SAYS[row] + ["there"])[len(said)] + "<|im_end|>")
        return sampled
