"""Settings of generation under which completions are not drawn from the policy as it is: one table for all sources.

Three places set them: fields of the configuration, `generation_kwargs`, and the `generation_config` that a model
brings along, from which transformers fills in whatever the first two leave out. A trainer computes log-probabilities
of the policy as it is, at the configuration's temperature. So what the user sets is refused or said
(`config/rules.py`), and what a model brings along is switched off while it samples ([`without_own_settings`]).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trl_drgrpo.common.errors import InputError, shortened

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of its max_lora_rank

# Each with the value that does nothing. `None` is another one.
AS_IT_IS: dict[str, Any] = {
    **dict.fromkeys(("top_p", "repetition_penalty", "encoder_repetition_penalty", "typical_p", "guidance_scale"), 1.0),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "epsilon_cutoff", "eta_cutoff"), 0.0),
    **dict.fromkeys(("top_k", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("min_length", "min_new_tokens", "min_tokens"), 0),
    **dict.fromkeys(("top_h", "exponential_decay_length_penalty", "sequence_bias", "logit_bias", "bad_words")),
    **dict.fromkeys(("bad_words_ids", "allowed_token_ids", "suppress_tokens", "begin_suppress_tokens")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "watermarking_config", "cache_implementation")),
}
# Other ways to decode, ends and forms of results, which a model may bring along.
_OTHER_WAYS: dict[str, Any] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("penalty_alpha", "diversity_penalty"), 0.0),
    **dict.fromkeys(("token_healing", "return_dict_in_generate", "is_assistant", "use_mtp"), False),
    **dict.fromkeys(("dola_layers", "constraints", "force_words_ids", "stop_strings", "max_time", "max_new_tokens")),
    **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_early_exit", "speculation_type")),
}


def that_do_something(
    settings: Mapping[str, Any], off_values: Mapping[str, Any] = AS_IT_IS
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the settings that are on: name, value, and the value that switches it off."""
    for name, off_value in off_values.items():
        value = settings.get(name)
        # vLLM writes -1 for no `top_k`, transformers 0.
        is_off = value in (None, off_value, [], {}) or (name == "top_k" and value == -1)
        if name == "cache_implementation":  # every other one holds what the model computes
            is_off = value != "quantized"
        if not is_off:
            yield name, value, off_value


def own_settings(model: object) -> dict[str, Any]:
    """Return the settings of a model's `generation_config` under which it would not sample from the policy."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return {}
    settings = that_do_something(vars(config), {**AS_IT_IS, **_OTHER_WAYS})
    return {name: value for name, value, _ in settings}


@contextmanager
def without_own_settings(model: object) -> Iterator[None]:
    """Keep the model's `generation_config` from changing what is sampled inside the block.

    Arguments of a call of `generate` stay. The configuration, which is saved with the model, is left as it was.
    """
    # `None`: for such a field, transformers takes its own default, which does nothing.
    config = getattr(model, "generation_config", None)
    settings = own_settings(model)
    for name in settings:
        setattr(config, name, None)
    try:
        yield
    finally:
        for name, value in settings.items():
            setattr(config, name, value)


def refuse_bad_ends(field: str, name: str, model: object) -> None:
    """Refuse a model whose `generation_config` names something else than ids for the end of a completion."""
    end = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = end if isinstance(end, list) else [end]
    if not all(isinstance(token, int | None) for token in ids):
        got = f"{name}, whose generation_config.json has the eos_token_id {shortened(end)}"
        raise InputError(field, got, "an id, or a list of ids", "Correct that file.")


def end_tokens(*values: Any) -> list[int]:
    """Return the ids that end a completion: all of several values, each an id, a list of ids, or `None`."""
    ids: dict[int, None] = {}  # in order, without repetitions
    for value in values:
        tokens = value if isinstance(value, list | tuple) else [value]
        for token in tokens:
            if token is not None:
                ids[int(token)] = None
    return list(ids)
