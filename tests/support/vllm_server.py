"""vLLM's HTTP API on the loopback, as far as TRL speaks it, in front of a real model.

Routes, methods, bodies and answers are those of `vllm serve` 0.31 with `VLLM_SERVER_DEV_MODE=1`. Requests out of order
are answered with 400, as TRL must not make them.
"""

import json
from pathlib import Path
from urllib.parse import urlparse

import vllm_stub
from loopback import Handler, Loopback

MODEL_ID = "tiny"


class Refused(Exception):
    """A request that vLLM would not take."""


class _Handler(Handler):
    wbufsize = 2**16  # an answer in one packet: two would wait 40 ms for the acknowledgement of the first
    disable_nagle_algorithm = True

    def _answer(self, method):
        serving = self.server.serving
        route = urlparse(self.path).path
        serving.routes.append(route)
        body = json.loads(self.body() or "null")
        action = getattr(serving, method + route.replace("/", "_"), None)
        if "lora" in route and not serving.updates:
            action = None
        status, answer = 404, {"detail": "Not Found"}
        if action is not None:
            try:
                status, answer = 200, action(body)
            except FileNotFoundError as error:
                status, answer = 404, {"error": {"message": str(error), "code": 404}}
            except Exception as error:  # 400, not 500: TRL would try that again
                status, answer = 400, {"error": {"message": repr(error), "code": 400}}
        data = b"" if answer is None else json.dumps(answer).encode()
        self.say(status, {"Content-Type": "application/json"}, data)

    def do_GET(self):
        self._answer("get")

    def do_POST(self):
        self._answer("post")


class Server(Loopback):
    """Serves until the `with` block ends.

    Args:
        engine ([`~vllm_stub.Engine`]): The model behind the routes.
        logprobs_mode: As `vllm serve` was started with.
        transfers: Whether with `--weight-transfer-config`.
        max_lora_rank: The flag, with `--enable-lora`; `None`: without.
        updates: Whether with VLLM_ALLOW_RUNTIME_LORA_UPDATING.
        sees: Whether it sees the trainer's folders.
        serves: Path of the base model.
    """

    handler = _Handler

    def __init__(
        self,
        engine,
        logprobs_mode="processed_logprobs",
        transfers=True,
        max_lora_rank=None,
        updates=True,
        sees=True,
        serves=MODEL_ID,
    ):
        self.engine = engine
        self.transfers, self.max_lora_rank, self.updates, self.sees = transfers, max_lora_rank, updates, sees
        self.serves, self.adapters = serves, {}  # paths by name
        self.logprobs_mode = logprobs_mode
        self.routes = []  # what was asked for, in order
        self.completions = []  # bodies of /v1/completions
        self.link = None
        self.updating = False
        super().__init__()

    @property
    def settings(self):
        """Fields of a configuration that trains against this server."""
        # The port of the weight-transfer group is a name here: nothing listens on it.
        address = {"vllm_server_base_url": self.url, "vllm_group_port": self.http.server_address[1]}
        return {"use_vllm": True, "vllm_mode": "server", **address}

    # Routes

    def get_health(self, body):
        return None  # 200 with an empty body

    def get_v1_models(self, body):
        names = [MODEL_ID, *self.adapters]
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "vllm"} for name in names]}

    def get_server_info(self, body):
        config = {
            "weight_transfer_config": {"backend": "nccl"} if self.transfers else None,
            "model_config": {"logprobs_mode": self.logprobs_mode, "model": self.serves},
            "lora_config": self.max_lora_rank and {"max_lora_rank": self.max_lora_rank},
        }
        return {"vllm_config": config, "vllm_env": {}, "system_env": {}}

    def get_get_world_size(self, body):
        return {"world_size": 1}

    def post_init_weight_transfer_engine(self, body):
        info = body["init_info"]
        if not (info["world_size"] == 2 and info["rank_offset"] == 1 and info["packed"] is True):
            raise Refused(f"init_info {info}")
        self.link = vllm_stub.LINKS.setdefault(info["master_port"], vllm_stub.Link())
        if not self.link.joined.wait(10):  # the rendezvous: the trainer must join while this request is open
            raise Refused("the trainer did not join")
        return {"message": "Weight transfer initialized"}

    def post_start_weight_update(self, body):
        if self.link is None or self.updating:
            raise Refused("no group, or an update is under way")
        self.updating = True
        return {"message": "Weight update started"}

    def post_update_weights(self, body):
        if not self.updating:
            raise Refused("start_weight_update comes first")
        self.engine.load_weights(vllm_stub.unpacked(self.link.buffers, body["update_info"]))
        return {"message": "Weights updated"}

    def post_finish_weight_update(self, body):
        if not self.updating:
            raise Refused("start_weight_update comes first")
        self.updating = False
        return {"message": "Weight update finished"}

    def post_reset_prefix_cache(self, body):
        self.engine.prefixes.clear()
        return {"success": True}

    def post_v1_load_lora_adapter(self, body):
        name, path = body["lora_name"], Path(body["lora_path"])
        if not (self.sees and (path / "adapter_config.json").is_file()):
            raise FileNotFoundError(f"Loading lora {name} failed: No adapter found for {path}")
        rank = json.loads((path / "adapter_config.json").read_text())["r"]
        if self.max_lora_rank is None or rank > self.max_lora_rank:
            raise Refused(f"LoRA rank {rank} is greater than max_lora_rank {self.max_lora_rank}.")
        if name in self.adapters and not body.get("load_inplace"):
            raise Refused(f"The lora adapter '{name}' has already been loaded.")
        self.adapters[name] = str(path)
        self.engine.use_adapter(path)

    def post_v1_unload_lora_adapter(self, body):
        del self.adapters[body["lora_name"]]

    def post_v1_completions(self, body):
        self.completions.append(dict(body))
        flags = ("return_token_ids", "return_tokens_as_token_ids")
        name = body.pop("model")
        if name not in {MODEL_ID, *self.adapters} or not all(body.pop(flag) for flag in flags) or self.updating:
            raise Refused("/v1/completions")
        prompts = body.pop("prompt")
        if name == MODEL_ID:
            self.engine.use_adapter(None)
        rows = self.engine.generate(prompts, adapter=(name, self.adapters.get(name)), **body)
        pairs = [(prompt, *row) for prompt, completions in zip(prompts, rows, strict=True) for row in completions]
        choices = [_choice(index, *pair) for index, pair in enumerate(pairs)]
        return {"id": "cmpl-0", "object": "text_completion", "model": MODEL_ID, "choices": choices}


def _choice(index, prompt, ids, log_probs):
    names = [f"token_id:{token}" for token in ids]
    return {
        "index": index,
        "text": "",
        "logprobs": {
            "text_offset": [0] * len(ids),
            "token_logprobs": log_probs,
            "tokens": names,
            "top_logprobs": [{name: value} for name, value in zip(names, log_probs, strict=True)],
        },
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": ids,
        "prompt_token_ids": prompt,
        "prompt_logprobs": None,
    }
