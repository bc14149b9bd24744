"""Run by `torchrun --nproc_per_node N`: trains against a server that lives in the first rank. Not a test by itself."""

import sys
from contextlib import nullcontext

import torch
import vllm_stub
from accelerate import PartialState
from datasets import Dataset
from runs import build, length_reward
from tiny import in_double_precision, tiny_model, tiny_tokenizer
from vllm_server import Server

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.check.parity import DEFAULTS, use_plain_lm_head


def main(output, processes):
    tokenizer = tiny_tokenizer()
    model = in_double_precision(tiny_model(tokenizer))
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    first = PartialState(cpu=True).is_main_process
    engine = vllm_stub.Engine(in_double_precision(tiny_model(tokenizer, seed=7)), distortion=0.6)
    with vllm_stub.installed(), Server(engine) if first else nullcontext() as server:
        # The others are told nothing but that there is a server: an address where nobody listens would fail them.
        address = server.settings if first else {"use_vllm": True, "vllm_mode": "server"}
        settings = {**DEFAULTS, "num_generations": 6, "learning_rate": 0.05, "max_steps": 3, **address}
        settings |= {"per_device_train_batch_size": 6 // processes, "gradient_accumulation_steps": 3}
        settings["output_dir"] = output + ".run"
        prompts = Dataset.from_dict({"prompt": [f"{i}+{i * i}=" for i in range(9)]})
        trainer = build(DrGRPOTrainer, settings, prompts, tokenizer, length_reward, model)
        if trainer.accelerator.num_processes != processes:
            raise SystemExit(f"{trainer.accelerator.num_processes} processes, expected {processes}")
        use_plain_lm_head(model)
        trainer.train()
        if first:
            prompts = [body["prompt"] for body in server.completions]
            now = {name: p.detach() for name, p in model.named_parameters()}
            torch.save({"routes": server.routes, "prompts": prompts, "start": start, "weights": now}, output)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
