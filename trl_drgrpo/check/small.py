"""A random model of any configuration, small enough to train in seconds: widths and layers shrink, kinds stay.

Layers, attention, caches, experts and positions are of the same kinds as in the model; windows and sparse selections
are short enough to matter within a few tokens. No weights are loaded.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import check_local, hub_errors
from trl_drgrpo.common.reading import user_path

# At least so many layers, one of each kind included. A few models need eight: their kinds follow from the number.
FEW_LAYERS = 2
MORE_LAYERS = 8
WIDTH = 64
HEADS = 4
HEAD_WIDTH = 16
_WIDTHS = (
    (WIDTH, "hidden_size n_embd embed_dim d_model lru_width word_embed_proj_dim"),
    (2 * WIDTH, "intermediate_size ffn_dim ffn_hidden_size n_inner intermediate_size_mlp block_ff_dim"),
    (2 * WIDTH, "shared_intermediate_size shared_experts_intermediate_size mamba_d_ssm attention_hidden_size"),
    (WIDTH // 2, "moe_intermediate_size shared_expert_intermediate_size mamba_d_head mamba_head_dim mamba_headdim"),
    (WIDTH // 2, "attention_head_dim"),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads swa_num_attention_heads linear_num_value_heads linear_num_heads",
    ),
    (HEADS, "mamba_n_heads mamba_num_heads n_mamba_heads index_n_heads mamba_dt_rank time_step_rank"),
    (HEADS // 2, "linear_num_key_heads"),
    (HEAD_WIDTH, "head_dim v_head_dim kv_lora_rank q_lora_rank linear_key_head_dim linear_value_head_dim"),
    (HEAD_WIDTH, "swa_head_dim index_head_dim linear_head_dim hidden_size_per_layer_input"),
    (2 * HEAD_WIDTH, "global_head_dim"),
    (HEAD_WIDTH // 2, "qk_rope_head_dim qk_nope_head_dim state_size mamba_d_state ssm_state_size"),
    (1, "n_groups mamba_n_groups mamba_ngroups"),
)
_MOST = (
    (4, "num_experts n_routed_experts num_local_experts"),
    (2, "num_experts_per_tok num_experts_per_token top_k_experts moe_topk"),
    (1, "n_group num_expert_group topk_group n_shared_experts num_shared_experts num_nextn_predict_layers"),
    # So few tokens that they matter within a completion.
    (16, "sliding_window sliding_window_size attention_chunk_size attention_window_size chunk_size mamba_chunk_size"),
    (8, "index_topk"),
)
WIDTHS = {name: value for value, names in _WIDTHS for name in names.split()}  # set to this
MOST = {name: value for value, names in _MOST for name in names.split()}  # lowered to this, never raised
_DEPTH = ("num_hidden_layers", "n_layer", "num_layers")
_KINDS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types")
# Fields that name layers by number: lists of them, a mapping from them, how many are at the start and at the end.
_NUMBERS = ("attn_layer_indices", "full_attn_idxs", "hybrid_layer_ids", "mlp_only_layers")
_BY_NUMBER = "per_layer_config"
_AT_THE_START = "first_k_dense_replace"
_AT_THE_END = "num_kv_shared_layers"
_TEXT_PARTS = ("text_config", "llm_config", "thinker_config")
_KEY_VALUE_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "num_global_key_value_heads",
    "swa_num_key_value_heads",
)
Fields = dict[str, Any]  # of a configuration, by name
_MOST_WEIGHTS = 400_000_000  # of a model in its own width, whose weights take seconds to draw


def read_config(model: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Return the configuration of a folder or a Hub id; `InputError` where there is none. Code that comes along with
    it runs only where `trust_remote_code` says so."""
    from transformers import AutoConfig

    check_local("--model", model)
    path = user_path(model)
    name = str(path) if os.path.isdir(path) else model  # `Path.is_dir` fails for a name that is too long
    with hub_errors("--model", model, "a model that transformers knows"):
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)


def small_model(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build a random model of a configuration, the same weights every time.

    Args:
        config ([`~transformers.PreTrainedConfig`]): Of a decoder, or of a model that has one. Left as it is.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Decides the vocabulary and the special tokens.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Run the code that comes with the configuration.

    Returns:
        [`~transformers.PreTrainedModel`]: In float32, in which a byte in nine ends a completion.

    Raises:
        `InputError`: It cannot be built, and where only a part of the widths was made smaller it is too large.
    """
    parts = [config]
    text = config.get_text_config(decoder=True)
    if text is not config:
        parts.append(text)
    problems = []
    # From the best way on: narrow before its own width, and the whole model before its text part alone.
    sizes = ((True, FEW_LAYERS), (True, MORE_LAYERS), (False, FEW_LAYERS))
    for (is_narrow, layers), part in product(sizes, parts):
        attempt = _Attempt(part, is_narrow, layers)
        try:
            return _build(config, attempt, tokenizer, trust_remote_code)
        except Exception as error:  # configurations contradict themselves in many ways once a number changes
            message = " ".join(str(error).split())[:300]
            problems.append(f"{type(error).__name__}: {message}")
    expected = "a decoder that can be built with few and narrow layers"
    # The first problem is told: later attempts differ more from the model.
    raise InputError("--model", config.model_type, expected, f"transformers says: {problems[0]}")


@dataclass(frozen=True)
class _Attempt:
    """A way to make a model small: the configuration to build, narrow or in its own width, and its least depth."""

    part: PreTrainedConfig
    is_narrow: bool
    layers: int


def _build(
    config: PreTrainedConfig,
    attempt: _Attempt,
    tokenizer: PreTrainedTokenizerBase,
    trust_remote_code: bool,
) -> PreTrainedModel:
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    part = attempt.part
    small = type(part).from_dict(_shrink(part, attempt, tokenizer))
    # The class that the configuration names, where it is one of transformers; else the one that goes with its type.
    architectures = getattr(config, "architectures", None) or [""]
    build: Any = getattr(transformers, architectures[0], None)
    if part is not config or build is None or build.config_class is not type(config):
        auto_class: Any = AutoModelForCausalLM
        is_language_model = type(small) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        if not is_language_model and type(small) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            auto_class = AutoModelForImageTextToText
        build = partial(auto_class.from_config, trust_remote_code=trust_remote_code)
    if not attempt.is_narrow:
        # A few layers in their own width may be large: count before drawing weights.
        with torch.device("meta"):
            weights = build(small).num_parameters()
        if weights > _MOST_WEIGHTS:
            raise ValueError(f"{weights:,} weights with {attempt.layers} layers")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(small).float()
    # A random model almost never emits one particular token, so a byte in nine ends a completion too: lengths vary.
    stops = [tokenizer.eos_token_id, *range(len(tokenizer) // 9)]
    model.generation_config = transformers.GenerationConfig(eos_token_id=stops, pad_token_id=tokenizer.pad_token_id)
    # Some contradictions only show when the model runs.
    ids = torch.tensor([[65, 66, 67]])
    with torch.no_grad():
        model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids))
    return model.train()


def _shrink(
    config: PreTrainedConfig,
    attempt: _Attempt,
    tokenizer: PreTrainedTokenizerBase,
) -> Fields:
    """Return the fields of a smaller configuration of the same kind."""
    fields = config.to_dict()
    depth = _depth(config, fields)
    parts = _consecutive_parts(fields, depth)
    layers = _choose_layers(config, fields, depth, attempt.layers)
    small = {}
    for name, value in fields.items():
        # By name before by form: a list of layers' numbers may happen to be as long as the model is deep.
        if isinstance(value, dict) and name in _TEXT_PARTS:
            value = _shrink(getattr(config, name), attempt, tokenizer)
        elif isinstance(value, dict) and name == "vision_config":
            value = _one_layer(value, config.get_text_config(decoder=True), attempt)
        elif name in _NUMBERS and isinstance(value, list):
            # Layers 0, 7, 8 of a model become 0, 1, 2.
            value = [place for place, number in enumerate(layers) if number in value]
        elif name == _BY_NUMBER and isinstance(value, dict):
            value = _renumber(value, layers, fields, attempt)
        elif name in parts:
            value = sum(number in parts[name] for number in layers)
        elif name == _AT_THE_START and isinstance(value, int) and layers:
            value = sum(number < value for number in layers)
        elif name == _AT_THE_END and isinstance(value, int) and layers:
            value = sum(number >= depth - value for number in layers)
        elif isinstance(value, list) and depth and len(value) == depth:
            value = [value[number] for number in layers]  # one entry for each layer
        elif name in _DEPTH and isinstance(value, int):
            value = len(layers)
        elif attempt.is_narrow and value:
            value = _narrow(name, value, fields)
        small[name] = value
    return small | _vocabulary(fields, tokenizer)


def _choose_layers(
    config: PreTrainedConfig,
    fields: Fields,
    depth: int,
    least: int,
) -> list[int]:
    """Return the numbers of the layers that stay, ascending: the first of each kind, and more up to `least`.

    A kind is everything that a configuration says of a layer by its number.
    """
    # Lists with an entry for each layer, and groups of layers that are named by their numbers.
    lists = []
    for name in _KINDS:
        kinds = getattr(config, name, None)
        if isinstance(kinds, list) and len(kinds) == depth:
            lists.append(kinds)
    groups: list[Collection[int]] = [fields.get(name) or () for name in _NUMBERS]
    groups += _consecutive_parts(fields, depth).values()
    groups.append(range(fields.get(_AT_THE_START) or 0))
    groups.append(range(depth - (fields.get(_AT_THE_END) or 0)))
    overrides = {}
    by_number = fields.get(_BY_NUMBER) or {}
    for number, value in by_number.items():
        overrides[int(number)] = repr(value)  # JSON's keys are texts
    firsts = {}
    for number in range(depth):
        entries = [kinds[number] for kinds in lists]
        memberships = [number in group for group in groups]
        kind = (*entries, *memberships, overrides.get(number))
        firsts.setdefault(kind, number)
    values = [fields.get(name) for name in (*_KINDS, *_NUMBERS)]
    if lists and not any(value and isinstance(value, list) for value in values):
        # Kinds follow from a layer's number (every eighth is attention): only the first layers keep theirs.
        last = max(least, *firsts.values())
        return list(range(depth))[: last + 1]
    chosen = set(firsts.values())
    for number in range(depth):
        if len(chosen) < least:
            chosen.add(number)
    return sorted(chosen)


def _depth(config: PreTrainedConfig, fields: Fields) -> int:
    """Return the number of layers; 0 where a configuration does not say it."""
    for name in _DEPTH:
        # A property may count the layers of the cache instead, of which a loop over layers has more.
        depth = fields.get(name, getattr(config, name, None))
        if isinstance(depth, int):
            return depth
    return 0


def _consecutive_parts(fields: Fields, depth: int) -> dict[str, range]:
    """Return the layers of each part of a model that a configuration cuts into consecutive parts, by the fields that
    count them; empty for a model in one part."""
    parts = {}
    start = 0
    for name, count in fields.items():
        is_count = name.endswith("_layers") and type(count) is int  # no `bool`
        if is_count and name not in _DEPTH:
            parts[name] = range(start, start + count)
            start += count
    if start != depth:
        return {}  # the counts are of something else
    return parts


def _renumber(
    by_number: dict[Any, Any],
    layers: list[int],
    fields: Fields,
    attempt: _Attempt,
) -> Fields:
    """Return what a configuration says of single layers, for those that stay, by their new numbers."""
    small = {}
    for key, overrides in by_number.items():
        if int(key) not in layers:
            continue
        new_number = layers.index(int(key))
        new_overrides = dict(overrides)
        if attempt.is_narrow:
            for name, value in overrides.items():
                new_overrides[name] = _narrow(name, value, fields | overrides)
            if new_overrides.get("head_dim") == HEAD_WIDTH:
                new_overrides["head_dim"] = 2 * HEAD_WIDTH  # wider than in other layers, as in the model
        small[str(new_number)] = new_overrides
    return small


def _narrow(name: str, value: Any, fields: Fields) -> Any:
    """Return a smaller value of a field, or the same where it is none of a width."""
    if name in _KEY_VALUE_HEADS and isinstance(value, int):
        # One head, fewer than the queries', or as many: the kind of attention stays.
        heads = value
        for queries in ("n_head", "num_attention_heads", name.replace("key_value", "attention")):
            heads = fields.get(queries) or heads
        if value >= heads:
            return HEADS
        return min(value, HEADS // 2)
    if name == "head_dim" and value == fields.get("qk_rope_head_dim"):  # latent attention
        return WIDTHS["qk_rope_head_dim"]
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        return _narrow_rope(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return WIDTHS.get(name) or min(value, MOST.get(name, value))
    if isinstance(value, float) and ("dropout" in name or "pdrop" in name):
        return 0.0  # two runs are compared
    if name == "initializer_range":
        return 0.2  # so wide that sampling is not uniform, and attention matters
    return value


def _narrow_rope(rope: Fields) -> Fields:
    """Return rotary positions for heads of `HEAD_WIDTH`."""
    angles = HEAD_WIDTH // 2
    small = dict(rope)
    for name, value in rope.items():
        if isinstance(value, dict):  # of each kind of layer
            small[name] = _narrow_rope(value)
        elif name == "mrope_section":  # the angles of time, height and width: 4, 2 and 2 of 8
            third = angles // 3
            small[name] = [angles - 2 * third, third, third]
        elif name in ("short_factor", "long_factor"):
            small[name] = value[:angles]
    return small


def _one_layer(
    vision: Fields,
    text: PreTrainedConfig,
    attempt: _Attempt,
) -> Fields:
    """Return the fields of a vision tower of one layer, which gives vectors of the text model's width."""
    small = dict(vision)
    width = getattr(text, "hidden_size", None)
    if attempt.is_narrow:
        width = WIDTH
        for name, value in vision.items():
            if value:
                small[name] = _narrow(name, value, vision)
    replaced: Fields = dict.fromkeys((*_DEPTH, "depth"), 1)
    # Layers by number: the one that is left.
    replaced |= {"deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]}
    replaced["out_hidden_size"] = width
    if "embed_dim" in vision:  # the tower's own width; its hidden size is then the text model's
        replaced["hidden_size"] = width
    for name, value in replaced.items():
        if vision.get(name) is not None:
            small[name] = value
    return small


def _vocabulary(fields: Fields, tokenizer: PreTrainedTokenizerBase) -> Fields:
    """Return the special tokens, within the tokenizer's vocabulary."""
    size = len(tokenizer)
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    small = {}
    # Tokens of images and the like, which no text has, go far behind the bytes that end a completion.
    next_id = size - 20
    for name, value in fields.items():
        if name in special:
            small[name] = special[name]
        elif name.endswith("vocab_size") or name == "vocab_size_per_layer_input":
            small[name] = size
        elif name.endswith(("_token_id", "_token_index")):
            if value is not None:
                small[name] = next_id
            next_id -= 1
    return small
