"""The table of TRL internals that this package relies on, and its check.

`trl_overrides.py` and `vllm_adapters.py` override or call these methods; nothing else does. A newer TRL in which the
signature of one has changed is refused by name, before a model loads, instead of training something else. A source
text that has vanished may have been rewritten to the same effect: a proof on a tiny model decides (`host_proof/`).
Names of transformers' cache and generation have a table of their own (`kv_cache.py`): their absence ends no run.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any

from trl_drgrpo.common.errors import UpstreamError
from trl_drgrpo.upstream.versions import TESTED, require_supported_trl, say_untested

require_supported_trl()

from trl import GRPOTrainer  # noqa: E402  # the version is judged before anything heavy loads

_VLLM = "trl.generation.vllm_generation"  # the module of the classes that are named in the table
# Private methods of `GRPOTrainer` and its vLLM backend that this package overrides or calls: the parameters of each
# behind `self`, in order, then source text that should still stand in TRL's body for the override to mean what it
# means: a number read from an attribute, a key of the dict that comes back.
SEAMS = {
    "__init__": (
        "model, reward_funcs, args, train_dataset, eval_dataset, processing_class, "
        "reward_processing_classes, callbacks, optimizers, quantization_config, peft_config, tools, "
        "rollout_func, environment_factory",
        "self._step = 0",
        "self._buffered_inputs = None",
        '"advantages": deque(',
        "model = get_peft_model(model, peft_config",
        "self._env_tools[name] = tools + methods",
        "self._environment_pool[name] = [instance]",
        "self.vllm_generation = VLLMGeneration(",
    ),
    "_calculate_rewards": ("inputs, prompts, completions, completion_ids_list", "gather("),
    "_generate_and_score_completions": (
        "inputs",
        '"advantages": advantages',
        '_logs["advantages"].extend',
        "self._sync_tool_dicts.append(sync_tool_dict)",
        "self._async_tool_dicts.append(async_tool_dict)",
        "self.environments.append(pool[index])",
        "in enumerate(zip(prompts, self.environments, inputs",
        "= environment.reset(**reset_kwargs)",
    ),
    "_prepare_inputs": ("generation_batch", "self._step % generate_every", "self._buffered_inputs["),
    "_get_per_token_logps_and_entropies": (
        "model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy",
        "model(**model_inputs, labels=labels, fused_lm_head=True)",
        "outputs.log_probs[:, -logits_to_keep:]",
    ),
    "_compute_loss": ("model, inputs", "size(0) * self.max_completion_length", "self.beta * per_token_kl"),
    "_tokenize_prompts": ("prompts", "self._batch_environments", "return prompt_ids, images,"),
    "_generate": ("prompts", "self.rollout_func(prompts, self)"),
    "_generate_single_turn": ("prompt_ids, images, multimodal_fields, num_generations", "unwrapped_model.generate("),
    "_tool_call_loop": (
        "prompts, prompt_ids, completion_ids, completions",
        "completions[idx_with_tool].append(tool_message)",
        "del completions[idx_with_tool][completions_len_before[idx] :]",
        "self._generate_single_turn(",
    ),
    "_get_grad_norm": ("model, grad_norm", "grad_norm is None"),
    "_get_train_sampler": ("dataset", "RepeatSampler("),
    "log": (
        "logs, start_time",
        'self._logs["extra"]',
        "super().log(logs, start_time)\n        self._metrics[mode].clear()",
    ),
    "_save_checkpoint": ("model, trial",),
    "_save": ("output_dir, state_dict", "torch.save(self.args,"),
    "_push_from_checkpoint": ("checkpoint_folder", "torch.save(self.args,", "self.push_in_progress"),
    "_finish_current_push": ("", "self.push_in_progress.wait_until_done()"),
    "_load_from_checkpoint": (
        "resume_from_checkpoint, model",
        "load_result = model.load_state_dict(state_dict, False)",
        "self._issue_warnings_after_load(load_result)",
    ),
    "_load_best_model": ("", "self._issue_warnings_after_load(load_result)"),
    "_issue_warnings_after_load": ("load_result", "load_result.missing_keys"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "VLLMGeneration._init_vllm": ("", "self.llm = LLM(", "= VLLMClient(", "client.init_communicator("),
    "VLLMGeneration._iter_named_params": ("", "model.merge_adapter()", "model.named_parameters()"),
    "VLLMGeneration.sync_weights": (
        "",
        'self.llm.wake_up(tags=["weights"])',
        "self.vllm_client.update_named_params(self._weight_metadata, self._iter_named_params())",
        "for name, param in self._iter_named_params():",
        "self.llm.reset_prefix_cache()",
    ),
    "VLLMClient.init_communicator": ("device",),
    "VLLMClient.update_named_params": ("metadata, named_params",),
}


def check_upstream(trainer_class: type = GRPOTrainer) -> dict[str, str]:
    """Compare the seams this package relies on with the installed TRL.

    Args:
        trainer_class (`type`, *optional*): The class to look at; the installed `trl.GRPOTrainer` by default.

    Returns:
        `dict[str, str]`: By the name of each seam, in the order of `SEAMS`, what has moved; empty where nothing has.
    """
    problems = {}
    for name in SEAMS:
        problem = _changed_signature(name, trainer_class) or in_words(_vanished_texts(name, trainer_class))
        patch = patched_by(name, trainer_class)
        if problem and patch:  # TRL has not moved: another package has put its own method there
            problem = f"replaced by the module {patch}; it {problem}"
        problems[name] = problem
    return problems


def vanished_texts() -> dict[str, list[str]]:
    """Return the source texts that TRL no longer contains, by the name of their seam. A method of another package
    counts as moved instead: the proof runs without that package."""
    vanished = {name: _vanished_texts(name, GRPOTrainer) for name in SEAMS if not patched_by(name)}
    return {name: texts for name, texts in vanished.items() if texts}


def require_seams() -> dict[str, list[str]]:
    """Refuse to build a trainer on a TRL in which a seam has moved; name each and what it looks like now.

    Returns:
        `dict[str, list[str]]`: [`vanished_texts`], for a proof to judge.
    """
    say_untested()
    vanished = vanished_texts()
    moved = {name: problem for name, problem in check_upstream().items() if problem and name not in vanished}
    if moved:
        raise moved_seams(moved)
    return vanished


def moved_seams(moved: Mapping[str, str]) -> UpstreamError:
    """Return the error that names seams which have moved, and what to do."""
    remedy = (
        f"This version of trl-drgrpo was tested with trl {', '.join(TESTED['trl'])}: install that one, or look for a "
        "newer trl-drgrpo."
    )
    patches = set(map(patched_by, moved)) - {""}
    if patches:
        remedy = f"Do not import or call what patches TRL ({', '.join(sorted(patches))}), or keep trl.GRPOTrainer."
    problems = "; ".join(f"{name}: {problem}" for name, problem in moved.items())
    return UpstreamError(f"trl {version('trl')}: {problems}. {remedy}")


def in_words(texts: list[str]) -> str:
    """Return that these texts have vanished; empty without any."""
    return f"no longer contains {', '.join(map(repr, texts))}" if texts else ""


def patched_by(name: str, trainer_class: type = GRPOTrainer) -> str:
    """Return the module that another package's method of this name comes from; empty for one of TRL or
    transformers."""
    method = getattr(trainer_class, name, None)
    # The globals first: `functools.wraps` copies `__module__`, so a wrapper would pass for TRL's own. Decorators of
    # TRL's own methods live in torch (`no_grad`) and contextlib.
    module = getattr(method, "__globals__", {}).get("__name__") or getattr(method, "__module__", None) or ""
    package = module.partition(".")[0]
    return "" if package in ("", "trl", "transformers", "torch", "contextlib") else module


def _method(name: str, trainer_class: type) -> Any:
    """Return the method of a seam; `None` where it, its class or its module is gone."""
    class_name, _, attribute = name.rpartition(".")
    owner: Any = trainer_class
    if class_name:
        try:
            owner = getattr(import_module(_VLLM), class_name, None)
        except ImportError:
            return None
    return getattr(owner, attribute, None)


def _changed_signature(name: str, trainer_class: type) -> str:
    method = _method(name, trainer_class)
    if method is None:
        owner = "" if "." in name else "GRPOTrainer."
        return f"{owner}{name} is gone"
    expected = SEAMS[name][0]
    parameters = list(inspect.signature(method).parameters)[1:]
    # New parameters behind those that the table names are passed on by the overrides.
    leading = ", ".join(parameters[: len(expected.split(", "))])
    if expected and leading != expected:
        return f"takes ({', '.join(parameters)}); expected ({expected})"
    return ""


def _vanished_texts(name: str, trainer_class: type) -> list[str]:
    """Return the source texts that a seam no longer contains; none where its signature has changed."""
    if _changed_signature(name, trainer_class):
        return []
    # In the text of the method alone: the same words elsewhere in TRL's file would hide that they are gone here.
    source = _source(_method(name, trainer_class))
    return [text for text in SEAMS[name][1:] if text not in source]


@cache  # Python tokenizes a method to find its end: 0.1 s for all of them, and every trainer asks
def _source(method: Callable) -> str:
    try:
        return inspect.getsource(method)
    except OSError:  # made by a program: another package's
        return ""
