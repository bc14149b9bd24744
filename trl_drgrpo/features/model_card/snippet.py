"""The snippet that loads what a run has saved and generates with it. A test runs each form."""

from typing import Any

_FULL = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model_id = {model_id!r}{where}
tokenizer = AutoTokenizer.from_pretrained(model_id)
model = AutoModelForCausalLM.from_pretrained(model_id, dtype="auto", device_map="auto")
"""
_ADAPTER = """\
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model_id = {model_id!r}{where}
tokenizer = AutoTokenizer.from_pretrained(model_id)
model = AutoPeftModelForCausalLM.from_pretrained(model_id, dtype="auto", device_map="auto")  # loads the base, too
"""
_CHAT = """\
messages = [{{"role": "user", "content": {prompt!r}}}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
"""
_TEXT = """\
inputs = tokenizer({prompt!r}, return_tensors="pt")
"""
_GENERATE = """\
inputs = inputs.to(model.device)
output = model.generate(**inputs, max_new_tokens={length}, do_sample=True, temperature={temperature:g})
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
"""


def usage_snippet(
    model_id: str | None, *, is_adapter: bool, is_chat: bool, length: int = 256, temperature: float = 1.0
) -> str:
    """Python that runs as it stands, from anywhere for a Hub id, else in the model's folder. `is_chat`: the run was
    trained on conversations, so the chat template is due. `length`: tokens to generate at most."""
    load = (_ADAPTER if is_adapter else _FULL).format(
        model_id=model_id or ".", where="" if model_id else "  # the folder of this file"
    )
    prompt = (_CHAT if is_chat else _TEXT).format(prompt="What is 3 + 4?")
    return load + prompt + _GENERATE.format(length=length, temperature=temperature)


def is_conversational(dataset: Any) -> bool:
    """Whether the prompts of a dataset are messages; `False` for a stream, which is not read for this."""
    if not hasattr(dataset, "__len__") or len(dataset) == 0:
        return False
    return isinstance(dataset[0].get("prompt"), list)
