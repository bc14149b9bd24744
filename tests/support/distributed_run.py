"""Trains the tiny model in several processes and saves its weights. Not a test by itself.

A job is `OUTPUT:PROCESSES:MODE`. Under `torchrun` jobs are arguments, and each process is a rank. By itself it imports
once, reads a job per line, forks its ranks, and answers with a line: 0 if all went well. What ranks say is in
`OUTPUT.log`.

The completions are fixed by the prompt and the row's place in its group, so that one process and two train on the same
rows: three groups of 6 per step, so that with 9 rows per rank the second group straddles the ranks.
"""

import os
import socket
import sys
from contextlib import contextmanager, nullcontext
from functools import partial

import kept
import torch
import vllm_stub
from accelerate import DistributedType, PartialState
from datasets import Dataset
from peft import LoraConfig
from runs import step_reward
from tiny import in_double_precision, tiny_model, tiny_tokenizer
from tiny_families import tiny
from trl.chat_template_utils import qwen3_chat_template
from vllm_server import Server
from walk import Scripted, Walk

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.host_proof.recording import DEFAULTS, use_plain_lm_head
from trl_drgrpo.report.run_folders import read_run

DEEPSPEED = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    "DS_ACCELERATOR": "cpu",
}
# As `accelerate launch` sets them for recipes/accelerate/fsdp2.yaml.
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
SAVED = {"save_strategy": "steps", "save_steps": 1}
# `half`: weights in bfloat16 under adapters in float32, as in the recipes.
RESUMES = {"resume": 2, "shards": 2, "lora": 1, "half": 1}  # `steps_per_generation` of runs that are resumed
MODES = {
    **{mode: {"steps_per_generation": steps, **SAVED} for mode, steps in RESUMES.items()},
    "sampling": {"dynamic_sampling": True, "curriculum": True, "max_sampling_rounds": 3},
    "baseline": {"process_role": "baseline"},
    "turns": {"max_completion_length": 512, "loss_normalizer": 12},
    "experts": {"router_aux_scope": "batch", "router_aux_loss_coef": 0.5},
    "forks": {"forks": 2, "num_generations": 4},  # three groups of two parents: the second one's lie on two ranks
}
BETA = {"reference": 0.1}
LOGGING = {"logging_strategy": "steps", "logging_steps": 1}


def fixed_rollouts(prompts, trainer):
    """Completions that depend on the prompt and on how often it was seen, counted over ranks in row order."""
    tokenizer = trainer.processing_class
    offset = trainer.accelerator.process_index * len(prompts)
    completions = []
    for row, prompt in enumerate(prompts):
        place = (offset + row) % trainer.num_generations
        number = int(prompt.split("+")[0])
        completions.append([40 + (7 * number + 3 * place + t) % 200 for t in range(2 + (number + place) % 7)])
    return {
        "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": completions,
        "logprobs": None,
    }


def uneven_reward(completion_ids, **kwargs):
    """Only the first group of a step carries a signal: all of it is on the first rank, or on the only one."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    first = int(os.environ.get("RANK", "0")) * (18 // world)
    return [float(sum(ids) % 3) if first + row < 6 else 1.0 for row, ids in enumerate(completion_ids)]


def half_dead_reward(prompts, completion_ids, **kwargs):
    """Every other prompt's completions are all wrong."""
    odd = [int(prompt.split("+")[0]) % 2 for prompt in prompts]
    return [float(sum(ids) % 2) * live for live, ids in zip(odd, completion_ids, strict=True)]


class Forking(DrGRPOTrainer):
    """Completions are fixed by what they continue, and those of prompts by their place; some are too short to cut."""

    asked: tuple = ()  # how many completions were, call by call

    def completing(self, prompt_ids, num_generations, generate):
        def fixed(prompt_ids, num_generations, limits=None):
            self.asked = (*self.asked, len(prompt_ids))
            first = 0 if limits else self.accelerator.process_index * len(prompt_ids)
            numbers = [sum(ids) + 5 * ((first + row) % num_generations) for row, ids in enumerate(prompt_ids)]
            return [[40 + (7 * n + 3 * t) % 50 for t in range(1 + n % 6)] for n in numbers], None

        return super().completing(prompt_ids, num_generations, fixed)


def reward(completion_ids, **kwargs):
    return [None if sum(ids) % 11 == 0 else float(sum(ids) % 3) for ids in completion_ids]


ADAPTED = ("lora", "half", "adapters", "engines")
VLLM = ("vllm", "adapters", "engines")  # all weights to a server, adapters to one, adapters to an engine in each rank


def mode_of(name):
    """How weights are sharded where there are several processes, and the mode: `fsdp_resume`, `turns`."""
    sharding, _, mode = name.partition("_")
    return (sharding, mode) if sharding in ("fsdp", "zero2", "zero3") else ("", name)


def build(output, processes, mode, **address):
    """A trainer with fresh weights; see [`mode_of`]. `address`: of a server that generates."""
    sharding, mode = mode_of(mode)
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer).to(torch.bfloat16) if mode == "half" else in_double_precision(tiny_model(tokenizer))
    if mode == "experts":
        model = tiny("Qwen3Moe", tokenizer).double()
        model.set_experts_implementation("eager")  # the default knows no float64
    if mode in ("reference", "engines"):
        model.save_pretrained(f"{output}.base")
        model.config._name_or_path = model.name_or_path = f"{output}.base"
    per_step = dict(MODES.get(mode, {}))
    if sharding:
        per_step |= {"optim": "adamw_torch", "learning_rate": 1e-3, "max_grad_norm": 1.0, "beta": BETA.get(mode, 0.0)}
    if sharding == "fsdp" and processes > 1:
        shard_on_cpus({**FSDP, "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"} if mode == "shards" else FSDP)
    elif sharding.startswith("zero") and processes > 1:
        os.environ.update(DEEPSPEED, ACCELERATE_DEEPSPEED_ZERO_STAGE=sharding[-1])
        per_step |= {"use_cpu": False}  # or accelerate would leave DeepSpeed out
    accumulation = 3 if mode.startswith("uneven") else 1  # three micro-batches, of which few are needed
    data = Dataset.from_dict({"prompt": [f"{i}+{i * i}=" for i in range(9)]})
    generation: dict = {"rollout_func": fixed_rollouts}
    if mode == "turns":
        tokenizer.chat_template = qwen3_chat_template
        model.config.max_position_embeddings = 4096  # the tools' description comes with the prompt
        data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Walk {i}."}]} for i in range(9)])
        generation = {"environment_factory": Walk}
    if mode in ("forks", "generate", *VLLM):
        generation = {}
    trainer = {"turns": Scripted, "forks": Forking}.get(mode, DrGRPOTrainer)(
        model=model,
        reward_funcs={"uneven": uneven_reward, "sampling": half_dead_reward}.get(mode.partition("_")[0], reward),
        args=DrGRPOConfig(
            output_dir=output + ".run",
            **{**DEFAULTS, "num_generations": 6, "learning_rate": 0.05, **per_step, **LOGGING},
            per_device_train_batch_size=(12 if mode == "forks" else 18) // processes // accumulation,
            gradient_accumulation_steps=accumulation,
            micro_batching="upstream" if mode == "uneven_upstream" else "exact",
            max_steps=4,
            advantage_baseline="leave_one_out" if mode == "leave_one_out" else "group_mean",
            scale_by_running_std=True,
            step_separator=None if mode == "turns" else ["tokens:2"],
            correct_threshold=1.0,
            record_groups=2,
            **address,
        ),
        train_dataset=data,
        processing_class=tokenizer,
        **generation,
        peft_config=LoraConfig(r=4, target_modules="all-linear") if mode in ADAPTED else None,
        step_reward_funcs=step_reward if mode in ("process", "baseline", "forks") else None,
    )
    if trainer.accelerator.num_processes != processes:
        raise SystemExit(f"{trainer.accelerator.num_processes} processes, expected {processes}")
    if mode != "generate":
        use_plain_lm_head(model)
    if mode.endswith("unweighted"):
        trainer.fast_path.rows_per_nominal_row = lambda inputs: 1.0
    if mode == "blind" and trainer.accelerator.process_index == 1:
        trainer.diagnostics._look_at = trainer.fast_path._plan_metrics = fails
    return trainer


def shard_on_cpus(environment):
    """On CPUs accelerate keeps whole copies, whatever is asked for: it has to believe that these are GPUs."""
    os.environ.update(environment)
    as_it_is = PartialState.__init__

    def pretend(self, *args, **kwargs):
        as_it_is(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = pretend


def whole_weights(model):
    """Parameters by name; those that ranks hold in parts are put together."""
    whole = {}
    for name, p in model.named_parameters():
        with gathered([p]) if hasattr(p, "ds_id") else nullcontext():
            whole[name] = (p.full_tensor() if hasattr(p, "full_tensor") else p.data).detach().clone()
    return whole


def gathered(parameters):
    """Inside, parameters that ZeRO-3 has distributed are whole."""
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


def fails(*arguments):
    raise RuntimeError("broken on purpose")


def refusals(trainer, checkpoint):
    """What this rank is told of a folder in use, and of a checkpoint that only the main process reads."""
    said = []
    for resume in (None, checkpoint):
        if resume and trainer.accelerator.is_main_process:
            with open(f"{resume}/optimizer.pt", "r+b") as file:
                file.seek(100)
                file.write(bytes(64))
        try:
            trainer.train(resume_from_checkpoint=resume)
        except InputError as error:
            said.append(str(error))
    return said


@contextmanager
def serving(mode):
    """A server in the first rank, or an engine in each, and what a configuration is told of it."""
    if mode not in VLLM:
        yield None, {}
        return
    if mode == "engines":
        with vllm_stub.installed():
            yield None, {"use_vllm": True, "vllm_max_model_length": 64}
        return
    first = PartialState(cpu=True).is_main_process
    engine = vllm_stub.Engine(in_double_precision(tiny_model(tiny_tokenizer(), seed=7)), distortion=0.6)
    takes = {"max_lora_rank": 8, "transfers": False} if mode == "adapters" else {}
    if takes:  # the base is never sent
        engine = vllm_stub.Engine(in_double_precision(tiny_model(tiny_tokenizer())))
    with vllm_stub.installed(), Server(engine, **takes) if first else nullcontext() as server:
        # The others are told nothing but that there is a server: an address where nobody listens would fail them.
        yield server, server.settings if server else {"use_vllm": True, "vllm_mode": "server"}


def main(output, processes, mode):
    with serving(mode) as (server, address):
        trained(output, processes, mode, server, address)


def trained(output, processes, mode, server, address):
    trainer = build(output, processes, mode, **address)
    start = whole_weights(trainer.model)
    trainer.train()
    logged = [entry.metrics for entry in read_run(f"{output}.run").logged]  # of the main process, which saves it
    result = {
        "log": [logs for logs in logged if "drgrpo/micro_batches" in logs],
        "start": start,
        "weights": whole_weights(trainer.model),
        "scale": trainer.earlier.reward_scale.state_dict(),
        "failures": trainer.describing.failures,
        "asked": trainer.gathered([getattr(trainer, "asked", ())]),
        "kind": str(trainer.accelerator.distributed_type),
    }
    if mode_of(mode)[1] in RESUMES:  # once more, from the middle of a generation batch
        resumed = build(output, processes, mode)
        resumed.train(resume_from_checkpoint=f"{output}.run/checkpoint-1")
        result["resumed"] = whole_weights(resumed.model)
        result["run_ids"] = resumed.gathered([trainer.run_id, resumed.run_id])
    if mode == "resume":
        result["refused"] = resumed.gathered(refusals(build(output, processes, mode), f"{output}.run/checkpoint-1"))
    if server is not None:
        result |= {"routes": server.routes, "prompts": [body["prompt"] for body in server.completions]}
    if trainer.accelerator.is_main_process:
        torch.save(result, output)


def fork_ranks(line):
    """0 if all ranks of a job ended well, else 1."""
    output, processes, mode = job_of(line)
    with socket.create_server(("127.0.0.1", 0)) as free:
        ranks = {"WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}

    def run(rank):
        if processes > 1:
            own = ranks | {"RANK": rank, "LOCAL_RANK": rank}
            os.environ.update({name: str(value) for name, value in own.items()})
        main(output, processes, mode)

    children = [kept.forked(f"{output}.log", partial(run, rank)) for rank in range(processes)]
    codes = [os.waitpid(child, 0)[1] for child in children]  # all of them end before the next job
    return int(any(codes))


def job_of(text):
    output, processes, mode = text.strip().split(":")
    return output, int(processes), mode


if __name__ == "__main__":
    if "RANK" in os.environ:
        for job in sys.argv[1:]:
            main(*job_of(job))
    else:
        kept.answer(fork_ranks)
