"""A random model of any configuration, small enough to train in seconds: widths and layers shrink, kinds stay.

Layers, attention, caches, experts and positions are of the same kinds as in the model; windows and sparse selections
are short enough to matter within a few tokens. No weights are loaded.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import check_local, hub_errors
from trl_drgrpo.common.reading import user_path

LAYERS = (2, 8)  # tried one after the other; and as many as there are kinds of them
WIDTH = 64
HEADS = 4
HEAD_WIDTH = 16
_WIDTHS = (
    (WIDTH, "hidden_size n_embd embed_dim d_model lru_width word_embed_proj_dim"),
    (2 * WIDTH, "intermediate_size ffn_dim ffn_hidden_size n_inner intermediate_size_mlp block_ff_dim"),
    (2 * WIDTH, "shared_intermediate_size mamba_d_ssm attention_hidden_size"),
    (WIDTH // 2, "moe_intermediate_size shared_expert_intermediate_size mamba_d_head mamba_head_dim mamba_headdim"),
    (WIDTH // 2, "attention_head_dim"),
    (HEADS, "num_attention_heads n_head n_heads num_heads linear_num_value_heads"),
    (HEADS, "mamba_n_heads mamba_num_heads n_mamba_heads index_n_heads mamba_dt_rank time_step_rank"),
    (HEADS // 2, "linear_num_key_heads"),
    (HEAD_WIDTH, "head_dim v_head_dim kv_lora_rank q_lora_rank linear_key_head_dim linear_value_head_dim"),
    (HEAD_WIDTH, "global_head_dim swa_head_dim index_head_dim hidden_size_per_layer_input"),
    (HEAD_WIDTH // 2, "qk_rope_head_dim qk_nope_head_dim state_size mamba_d_state ssm_state_size"),
    (1, "n_groups mamba_n_groups mamba_ngroups"),
)
_MOST = (
    (4, "num_experts n_routed_experts num_local_experts"),
    (2, "num_experts_per_tok"),
    (1, "n_group topk_group n_shared_experts first_k_dense_replace num_nextn_predict_layers"),
    # So few tokens that they matter within a completion.
    (16, "sliding_window attention_chunk_size attention_window_size"),
    (8, "index_topk"),
)


def _by_name(values: Iterable[tuple[int, str]]) -> dict[str, int]:
    by_name = {}
    for value, names in values:
        by_name |= dict.fromkeys(names.split(), value)
    return by_name


WIDTHS = _by_name(_WIDTHS)
MOST = _by_name(_MOST)
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_INDICES = ("attn_layer_indices", "full_attn_idxs")  # numbers of the layers of a kind
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_LONG_BUILDS = 400_000_000  # weights: with the widths of the model itself, no more than this


def read_config(model: str, trust_remote_code: bool = False) -> Any:
    """Return the configuration of a folder or a Hub id; `InputError` where there is none. Code that comes along with
    it runs only where `trust_remote_code` says so."""
    from transformers import AutoConfig

    check_local("--model", model)
    path = user_path(model)
    name = str(path) if path.is_dir() else model
    with hub_errors("--model", model, "a model that transformers knows"):
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)


def small_model(config: Any, tokenizer: Any, trust_remote_code: bool = False) -> Any:
    """Build a random model of a configuration, the same weights every time.

    Args:
        config ([`~transformers.PreTrainedConfig`]): Of a decoder, or of a model that has one. Left as it is.
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]): Decides the vocabulary and the special tokens.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Run the code that comes with the configuration.

    Returns:
        [`~transformers.PreTrainedModel`]: In float32, in which a byte in nine ends a completion.

    Raises:
        `InputError`: It cannot be built, and where only a part of the widths was made smaller it is too large.
    """
    problems = []
    for fields in _attempts(config, tokenizer):
        try:
            return _built(config, fields, tokenizer, trust_remote_code)
        except Exception as error:  # configurations contradict themselves in many ways once a number changes
            problems.append(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    expected = "a decoder that can be built with few and narrow layers"
    raise InputError("--model", config.model_type, expected, f"transformers says: {problems[0]}")


def _attempts(config: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yield ways to make it small: the whole model, its text part alone, with more layers, and in the model's own
    width."""
    parts = [config]
    text_config = config.get_text_config(decoder=True)
    if text_config is not config:
        parts.append(text_config)
    least, most = LAYERS
    # The model's own width comes last, as it may be slow to build.
    for widths, layers in ((True, least), (True, most), (False, least)):
        for part in parts:
            yield {"part": part, "widths": widths, "layers": layers}


def _built(config: Any, attempt: dict[str, Any], tokenizer: Any, trust_remote_code: bool) -> Any:
    import transformers
    from transformers import AutoModelForCausalLM

    part = attempt["part"]
    small = type(part).from_dict(_smaller(part.to_dict(), tokenizer, attempt["widths"], attempt["layers"]))
    name = (getattr(config, "architectures", None) or [""])[0]
    model_class = getattr(transformers, name, None)

    def build() -> Any:
        if part is config and model_class is not None and model_class.config_class is type(config):
            return model_class(small)
        return AutoModelForCausalLM.from_config(small, trust_remote_code=trust_remote_code)

    if not attempt["widths"]:
        with torch.device("meta"):
            weights = sum(parameter.numel() for parameter in build().parameters())
        if weights > _LONG_BUILDS:
            raise ValueError(f"{weights:,} weights with {LAYERS[0]} layers")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build().float()
    stops = [tokenizer.eos_token_id, *range(len(tokenizer) // 9)]
    model.generation_config = transformers.GenerationConfig(eos_token_id=stops, pad_token_id=tokenizer.pad_token_id)
    ids = torch.tensor([[65, 66, 67]])
    with torch.no_grad():
        model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids))
    return model.train()


def _smaller(fields: dict[str, Any], tokenizer: Any, widths: bool, least: int) -> dict[str, Any]:
    """Fields of a smaller configuration of the same kind."""
    depth = 0
    for name in reversed(_LAYERS):
        if isinstance(fields.get(name), int):
            depth = fields[name]
    layers = _kept_layers(fields, depth, least)
    small = {}
    for name, value in fields.items():
        if isinstance(value, dict) and name in ("text_config", "llm_config", "thinker_config"):
            value = _smaller(value, tokenizer, widths, least)
        elif isinstance(value, dict) and name == "vision_config":
            value = _shallow(value, fields.get("text_config") or fields, widths)
        elif name in _INDICES and isinstance(value, list):
            value = [place for place, number in enumerate(layers) if number in value]
        elif isinstance(value, list) and depth and len(value) == depth:
            value = [value[number] for number in layers]  # one entry for each layer
        elif name in _LAYERS and isinstance(value, int):
            value = len(layers)
        elif widths and value:
            value = _narrow(name, value, fields)
        small[name] = value
    return small | _vocabulary(fields, tokenizer)


def _kept_layers(fields: dict[str, Any], depth: int, least: int) -> list[int]:
    """Numbers of layers, ascending: the first one of each kind, and more up to the number asked for."""
    layers: set[int] = set()
    for name in ("layer_types", "layers_block_type", "block_types", "mlp_layer_types"):
        kinds = fields.get(name)
        if isinstance(kinds, list) and len(kinds) == depth:
            layers.update(map(kinds.index, kinds))
    for name in _INDICES:
        layers.update((fields.get(name) or [])[:1])
    for number in range(depth):
        if len(layers) < least:
            layers.add(number)
    return sorted(layers)


def _narrow(name: str, value: Any, fields: dict[str, Any]) -> Any:
    if name in _KEY_VALUE_HEADS and isinstance(value, int):
        heads = fields.get("num_attention_heads") or fields.get("n_head") or value
        if heads // value <= 1:  # not shared
            return HEADS
        return min(value, 2)  # one for all heads stays one
    if name == "head_dim" and value == fields.get("qk_rope_head_dim"):  # latent attention
        return WIDTHS["qk_rope_head_dim"]
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        return _narrow_rope(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return WIDTHS.get(name) or min(value, MOST.get(name, value))
    if isinstance(value, float) and ("dropout" in name or "pdrop" in name):
        return 0.0  # two runs are compared
    if name == "initializer_range":  # so that sampling is not uniform, and attention matters
        return 0.2
    return value


def _narrow_rope(rope: dict[str, Any]) -> dict[str, Any]:
    angles = HEAD_WIDTH // 2
    small = dict(rope)
    for name, value in rope.items():
        if isinstance(value, dict):  # of each kind of layer
            small[name] = _narrow_rope(value)
        elif name == "mrope_section":
            small[name] = [angles - 2 * (angles // 3), angles // 3, angles // 3]
        elif name in ("short_factor", "long_factor"):
            small[name] = value[:angles]
    return small


def _shallow(vision: dict[str, Any], text: dict[str, Any], widths: bool) -> dict[str, Any]:
    """One layer of a vision tower, which gives vectors of the text model's width."""
    width = WIDTH if widths else text.get("hidden_size")
    small = {}
    for name, value in vision.items():
        if name in (*_LAYERS, "depth") and isinstance(value, int):
            value = 1
        elif name == "out_hidden_size" or (name == "hidden_size" and "embed_dim" in vision):
            value = width
        elif name in ("deepstack_visual_indexes", "fullatt_block_indexes"):
            value = [0]
        elif widths and value:
            value = _narrow(name, value, vision)
        small[name] = value
    return small


def _vocabulary(fields: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Special tokens, within the tokenizer's vocabulary."""
    size = len(tokenizer)
    known_values = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), size)
    known_values |= {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    # Tokens of images and the like, which no text has, go where the byte-level tokens are that end nothing.
    place = size - 20
    small = {}
    for name, value in fields.items():
        if name in known_values:
            small[name] = known_values[name]
        elif name.endswith(("_token_id", "_token_index")):
            if value is not None:
                small[name] = place
            place -= 1
    return small
