"""A model learns to play a game through a tool, in several turns: on a CPU, offline, in about two minutes.

The environment holds a number from 1 to 4. The model guesses through the tool `guess`, is told `higher`, `lower` or
`found`, and guesses again. A turn that finds the number is rewarded with 1. First the tiny model sees games whose
guesses are random; it learns how to call the tool. Then `DrGRPOTrainer` teaches it to use the answers.

Run: `python recipes/environment.py`
"""

import random
import statistics

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed
from trl.chat_template_utils import qwen3_chat_template

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer

NUMBERS, TURNS = 4, 3  # the guesses of a game
IMITATION, STEPS = 200, 30
PROMPT = [{"role": "user", "content": "Find the number."}]


class Game:
    """One game, reused for many rollouts: `reset` begins each of them."""

    def reset(self, number: int, **columns) -> None:
        """Begins a rollout; `columns` are the other columns of its row."""
        self.number, self.rewards = number, []

    def on_turn_begin(self) -> None:
        """The model begins a turn."""
        self.rewards.append(0.0)

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: From 1 to 4.
        """
        if not 1 <= number <= NUMBERS:
            raise ValueError("not from 1 to 4")  # the model is told, and plays on
        if number == self.number:
            self.rewards[-1] = 1.0
            return "found"
        return "higher" if number < self.number else "lower"

    def get_turn_rewards(self) -> list[float]:
        """A reward for each turn of the rollout."""
        return self.rewards


def random_game(rng: random.Random) -> list[dict]:
    """The messages of a game whose guesses are random."""
    game, messages = Game(), list(PROMPT)
    game.reset(rng.randint(1, NUMBERS))
    for _ in range(TURNS):
        game.on_turn_begin()
        number = rng.randint(1, NUMBERS)
        call = {"type": "function", "function": {"name": "guess", "arguments": {"number": number}}}
        said = game.guess(number)
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": said}]
        if said == "found":
            break
    return [*messages, {"role": "assistant", "content": "done"}]


def build(games: list[list[dict]]) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """A tiny model that has seen games, and its tokenizer; with a pretrained model nothing of this is needed."""
    marks, whole = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], {"add_prefix_space": False, "use_regex": False}
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(**whole), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = qwen3_chat_template  # knows tools; TRL knows how to parse what it writes
    texts = [tokenizer.apply_chat_template(game, tools=[Game().guess], tokenize=False) for game in games]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(
        [part for text in texts for part in text.split("<|im_start|>")],
        trainers.BpeTrainer(vocab_size=500, special_tokens=marks, initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=marks[2], pad_token=marks[0])
    tokenizer.chat_template = qwen3_chat_template
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4}
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(vocab_size=len(tokenizer), num_key_value_heads=2, head_dim=16, **sizes, **tokens)
    config.max_position_embeddings = 1024
    model = Qwen3ForCausalLM(config)
    rows = [tokenizer(text, return_tensors="pt")["input_ids"][0] for text in texts]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.01, IMITATION)
    for _ in range(IMITATION):
        batch = random.sample(rows, 16)
        ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=tokenizer.pad_token_id)
        model(input_ids=ids, labels=ids.masked_fill(ids == tokenizer.pad_token_id, -100)).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model, tokenizer


def main(output_dir: str = "runs/environment", steps: int = STEPS) -> list[float]:
    """Trains; returns the share of games that were won, by step."""
    set_seed(0)
    rng = random.Random(0)
    model, tokenizer = build([random_game(rng) for _ in range(500)])
    rows = [{"prompt": PROMPT, "number": rng.randint(1, NUMBERS)} for _ in range(512)]
    args = DrGRPOConfig(
        output_dir=output_dir,
        max_steps=steps,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=100,
        max_tool_calling_iterations=TURNS,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
    )
    trainer = DrGRPOTrainer(
        model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, environment_factory=Game
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "process/steps_mean" in log]
    return [log["process/steps_mean"] * log["process/reward_mean"] for log in logs]


if __name__ == "__main__":
    torch.set_num_threads(1)
    won = main()
    first, last = statistics.mean(won[:5]), statistics.mean(won[-5:])
    print(f"games won within {TURNS} guesses: {first:.0%} in the first five steps, {last:.0%} in the last five")  # noqa: T201
