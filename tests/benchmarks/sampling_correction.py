"""What the corrections for vLLM's probabilities weigh rows of different lengths, through TRL's own code.

The policy's log-probabilities are 0. The engine's differ from them by noise that is independent from token to token,
with the standard deviation sigma, such that the mean ratio of a token is 1. Every generation batch holds as many rows
of each length, so the quarters of `sampling/weight_q1_mean` to `sampling/weight_q4_mean` are the lengths. Beside what
is measured stands what a lognormal model says: the logarithm of a row's ratio has the variance `T sigma^2`.

Run: `python tests/benchmarks/sampling_correction.py` (about a minute).
"""

import argparse
import math
import statistics
import tempfile
from types import SimpleNamespace

import torch
from bench import print_head, print_row, settings_of
from datasets import Dataset
from tiny import tiny_model, tiny_tokenizer

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.features.diagnostics.statistics import QUARTERS
from trl_drgrpo.upstream.private_state import swapped

LENGTHS = (128, 512, 1024, 2048)
SIGMAS = (0.02, 0.05)
SAMPLING_CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
BOUND = 3.0  # TRL's default of vllm_importance_sampling_clip_max


class Mismatched(DrGRPOTrainer):
    """Corrects for an engine whose log-probabilities are noise around those of the policy, which are 0.

    Args:
        lengths (`Sequence[int]`): Of the rows of a generation batch, in turn.
        sigma (`float`): Standard deviation of a token's noise.
    """

    _last_loaded_step = 0  # no engine is to be synced

    def __init__(self, output_dir, rows, lengths, sigma):
        self.lengths, self.sigma = lengths, sigma
        self.noise = torch.Generator()
        tokenizer = tiny_tokenizer()
        geometry = {"per_device_train_batch_size": rows, "num_generations": len(lengths), "run_log": False}
        geometry["max_completion_length"] = 64  # rows are made here, and as long as they are
        super().__init__(
            model=tiny_model(tokenizer),
            reward_funcs=alternating,
            args=DrGRPOConfig(**settings_of(output_dir, -1, **geometry)),
            train_dataset=Dataset.from_dict({"prompt": ["1+1="] * rows}),
            processing_class=tokenizer,
            rollout_func=self.rolled_out,
        )
        self.model.train()
        self.use_vllm = True  # behind the constructor, which would start an engine
        self.vllm_generation = SimpleNamespace(sync_weights=lambda: None)

    def rolled_out(self, prompts, trainer):
        lengths = [self.lengths[i % len(self.lengths)] for i in range(len(prompts))]
        # The ratio is the policy's probability over the engine's, and its mean over what the engine samples is 1.
        log_ratios = [
            torch.randn(n, generator=self.noise, dtype=torch.float64) * self.sigma - self.sigma**2 / 2 for n in lengths
        ]
        return {
            "prompt_ids": [[65]] * len(prompts),
            "completion_ids": [[66] * n for n in lengths],
            "logprobs": [(-ratios).tolist() for ratios in log_ratios],
        }

    def score_tokens(self, model, tokens):
        return torch.zeros(len(tokens.input_ids), tokens.completion_width), None, None

    def weights(self, mode, seed):
        """The metrics of a generation batch that begin with `sampling/weight`; the same seed is the same noise."""
        self.noise.manual_seed(seed)
        self.logged_metrics.begin_step()
        with swapped(self, vllm_importance_sampling_mode=mode):
            self.sample_rollouts([{"prompt": "1+1="}] * self.args.per_device_train_batch_size)
        return {
            name: value for name, value in self.logged_metrics.of_step().items() if name.startswith("sampling/weight")
        }


def alternating(completions, **kwargs):
    return [float(i % 2) for i in range(len(completions))]


def modeled(mode, length, sigma, bound=BOUND):
    """The expected weight of a row under the lognormal model.

    Example:

    >>> [round(modeled("sequence_mask", length, 0.05), 2) for length in (512, 2048)]
    [0.66, 0.26]
    """
    spread = sigma * math.sqrt(length if mode.startswith("sequence") else 1)
    normal = statistics.NormalDist()
    inside = normal.cdf(math.log(bound) / spread - spread / 2)
    outside = 1 - normal.cdf(math.log(bound) / spread + spread / 2)
    return inside + (bound * outside if mode.endswith("truncate") else 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=64, help="Generation batches of 64 rows per cell.")
    batches = parser.parse_args().batches
    print(f"mean weight of a row, measured (lognormal model); {16 * batches} rows of each length")
    print_head("sigma", "mode", *(f"{length} tokens" for length in LENGTHS))
    for sigma in SIGMAS:
        with tempfile.TemporaryDirectory() as folder:
            trainer = Mismatched(folder, rows=64, lengths=LENGTHS, sigma=sigma)
            for mode in SAMPLING_CORRECTIONS:
                seen = [trainer.weights(mode, seed) for seed in range(batches)]
                cells = [
                    f"{statistics.fmean(each[name] for each in seen):.2f} ({modeled(mode, length, sigma):.2f})"
                    for name, length in zip(QUARTERS, LENGTHS, strict=True)
                ]
                print_row(f"{sigma}", f"`{mode}`", *cells)


if __name__ == "__main__":
    main()
