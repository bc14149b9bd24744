"""The card states what was run, runs what it shows, and breaks at no name."""

import dataclasses
import re
import struct
from pathlib import Path

import pytest
import runs
import torch
import yaml
from datasets import Dataset, IterableDataset
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftConfig, get_peft_model
from runs import logged, short_run, step_reward
from tiny import tiny_model
from tiny_bases import nf4
from transformers import BitsAndBytesConfig
from walk import Walk, with_tools

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.common.hub_errors import is_hub_id
from trl_drgrpo.common.markdown import code, fenced, plain
from trl_drgrpo.common.secrets import is_secret, redacted, scrubbed
from trl_drgrpo.features.diagnostics.run_facts import objective_facts, run_facts
from trl_drgrpo.features.model_card import card as cards
from trl_drgrpo.features.model_card.card import card_text, curves, draw_curves, without_paths
from trl_drgrpo.features.model_card.objective import objective_of
from trl_drgrpo.process_rewards.steps import step_segmenter
from trl_drgrpo.single_gpu.memory.warning import setup_of
from trl_drgrpo.upstream.trl_overrides import HostTrainer, swapped


def with_card(trainer, **about):
    """A trainer, saved, and its card."""
    trainer.save_model()
    trainer.create_model_card(**about)
    return trainer, ModelCard.load(Path(trainer.args.output_dir) / "README.md")


@pytest.fixture
def run(train):
    return lambda *reward, **given: with_card(train(*reward, **given))


def row(card, name):
    """The cells of a table's row."""
    text = getattr(card, "text", card)
    found = re.search(rf"^\| (?:<code>)?{re.escape(name)}(?:</code>)? \| (.*) \|$", text, re.MULTILINE)
    assert found, name
    return found[1].split(" | ")


@pytest.fixture(scope="module")
def plain_card(prompts, tokenizer, reward, tmp_path_factory):
    """One run for several tests: three steps and no checkpoint."""
    settings = short_run(tmp_path_factory.mktemp("plain") / "run")
    return with_card(runs.train(DrGRPOTrainer, settings, prompts, tokenizer, reward))


def test_the_objective_of_a_plain_run(plain_card):
    _, card = plain_card
    formula = card.text.partition("## Objective")[2].partition("## Data")[0]
    assert "L = 12 tokens" in formula
    assert "l_it = -min(rho_it * A_i, clip(rho_it, 0.8, 1.2) * A_i)\n" in formula  # and no KL term behind it
    assert "A_i  = r_i - mean of its group's 4 rewards\n" in formula
    assert "So the ratio is 1 and clipping has no effect." in formula
    assert "No KL term (beta = 0)" in formula
    assert "trained on like the others" in formula
    assert "Process rewards" not in formula
    assert card.text.count("```bibtex") == 2
    assert "2503.20783" in card.text
    assert "2402.03300" not in card.text


def test_the_version_of_torch_is_that_of_its_build(plain_card, monkeypatch):
    trainer, _ = plain_card
    monkeypatch.setattr(
        "trl_drgrpo.features.model_card.card.installed_versions",
        lambda packages: {"torch": "of the package's metadata"},
    )
    trainer.create_model_card()
    card = ModelCard.load(Path(trainer.args.output_dir) / "README.md")
    assert row(card, "torch")[0].replace("\\", "") == torch.__version__


def test_the_facts_of_a_plain_run(plain_card):
    trainer, card = plain_card
    assert row(card, "training data") == ["local or generated data, not a dataset of the Hub"]
    assert row(card, "prompts") == ["16"]
    assert row(card, "columns") == ["prompt, answer"]
    assert row(card, "length&#95;reward") == ["function", "1"]
    assert row(card, "optimizer steps") == ["3 of 3"]
    assert row(card, "rows per optimizer step, B")[0].startswith("8 (4 per device x 2 accumulated x 1 process)")
    assert row(card, "prompt and completion tokens seen") == [f"{trainer.state.num_input_tokens_seen:,}"]
    assert row(card, "learning rate") == ["0.01, schedule linear"]
    results = card.text.partition("## Results")[2]
    rewards = logged(trainer, "reward")
    assert row(results, "reward") == [f"{rewards[0]:.4g}", f"{rewards[-1]:.4g}", "3"]
    assert "One run with seed 42" in card.text
    assert "No evaluation on held-out prompts" in card.text
    assert "In progress" not in card.text
    settings_shown = card.text.partition("```yaml")[2].partition("```")[0]
    assert "num_generations: 4" in settings_shown
    assert trainer.args.output_dir not in str(card)
    assert "None" not in card.text.replace("`None`", "")


def test_the_metadata_of_a_local_model(plain_card):
    _, card = plain_card
    data = card.data.to_dict()
    assert "licence" not in data
    assert "base_model" not in data
    assert data["library_name"] == "transformers"
    assert data["pipeline_tag"] == "text-generation"
    assert {"trl", "grpo", "dr-grpo", "generated_from_trainer"} <= set(data["tags"])


def test_every_switch_that_changes_the_objective_is_stated(run, saved_model):
    fields = {
        "loss_normalizer": 20,
        "advantage_baseline": "leave_one_out",
        "scale_by_running_std": True,
        "beta": 0.04,
        "beta_warmup_steps": 5,
        "use_bias_correction_kl": True,
        "epsilon": 0.1,
        "epsilon_high": 0.28,
        "delta": 4.0,
        "num_iterations": 2,
        "mask_truncated_completions": True,
        "importance_sampling_level": "sequence",
        "entropy_coef": 0.01,
        "top_entropy_quantile": 0.5,
        "off_policy_mask_threshold": 0.7,
        "max_steps": 1,
    }
    trainer, card = run(model=saved_model, **fields)
    for text in (
        "that is divided by a count of tokens",
        "L = 20 tokens",
        "l_it = -min(min(rho_i, 4) * A_i, clip(rho_i, 0.9, 1.28) * A_i) + 0.04 * rho_i * k3_it",
        "A_i  = (r_i - mean of the other 3 rewards of its group) / sigma_run",
        "one ratio per completion",
        f"at the moment of this card {trainer.earlier.reward_scale.std:.4g}",
        "the reference is the starting weights, frozen",
        "rises linearly over the first 5 optimizer steps",
        "multiplied by the importance ratio",
        "Passes over each generation batch: 2",
        "So the ratio moves away from 1",
        "Completions cut off at the length limit stay in the group's mean and get no gradient",
        "Entropy bonus with coefficient 0.01",
        "Only the 50% of tokens",
        "off-policy beyond 0.7 are masked",
    ):
        assert text in card.text, text


STEPS = {"step_reward_funcs": step_reward}
TO_GO = "A_it(process) = Q_ik - mean of Q_jk over the other rows j; Q_ik = "
FORKS = {"forks": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
FORKED = "A_c  = R_c - mean of R over the siblings of node c"
FORKED_STEPS = "A_it = 1 * A_c + 1 * A_ck of the node c and step k of token t"


@pytest.mark.parametrize(
    ("fields", "arguments", "said"),
    [
        ({"step_credit": "return_to_go"}, STEPS, [TO_GO + "sum over steps l >= k of s_il, 0 once row i has ended"]),
        (
            {"step_credit": "immediate", "process_weight": 0.5},
            STEPS,
            [TO_GO + "s_ik, 0", "A_it = 1 * A_i + 0.5 * A_it"],
        ),
        ({"step_credit": "min_increments"}, STEPS, [TO_GO + "sum over steps l >= k of (m_il - m_i"]),
        ({"dynamic_sampling": True, "curriculum": True}, {}, ["(K - 1) / (M - 1)", "q >= 0.2", "1 / q"]),
        ({"dynamic_sampling": "dapo"}, {}, ["as in DAPO", "a factor that changes as the model learns"]),
        (
            {**FORKS, "fork_depth": 2, "num_generations": 8},
            {},
            [
                "2 completions are sampled per prompt; each is cut behind the first step in which a place drawn "
                "beforehand is reached and goes on in 2 branches, and the branches are cut again, 2 levels in all: 8 "
                "rows. Siblings are the branches of one cut, or the 2 parents of one prompt.",
                FORKED,
                "A_it = A_c of the node c that token t of row i is in",
            ],
        ),
        (
            {**FORKS, "fork_at": "entropy", "fork_threshold": 1.5},
            STEPS,
            ["the first step in which the mean entropy exceeds 1.5 nats per token and goes on in 2 branches: 4 rows."],
        ),
        (
            {**FORKS, "fork_at": "doubt", "fork_threshold": 0.5},
            STEPS,
            ["the first step in which 1 - score exceeds 0.5 and goes on", FORKED, FORKED_STEPS, "\nQ_ik = sum over"],
        ),
    ],
)
def test_credit_sampling_and_forks_are_stated(fields, arguments, said, build):
    if "dynamic_sampling" in fields:
        fields = {**fields, "max_sampling_rounds": 1}
    trainer = build(**fields, **arguments)  # it does not train: what it would optimize is known
    formula, notes = objective_of(trainer)
    text = "\n".join([*formula, *notes])
    assert [each for each in said if each not in text] == []
    assert any("A_i " in line for line in formula) == ("forks" not in fields)
    facts = objective_facts(trainer)  # a resumed run compares them
    assert facts["forks"] == fields.get("forks", 1)
    assert facts["step_separator"] == (["\n\n"] if arguments else None)
    assert facts["dynamic_sampling"] == ("dapo" if fields.get("dynamic_sampling") == "dapo" else None)


@pytest.mark.parametrize("passed_in", [False, True])
def test_the_reference_of_an_adapter(passed_in, build, tokenizer, saved_model):
    peft_config = LoraConfig(r=4, target_modules=["q_proj"])
    arguments = {"model": saved_model, "peft_config": peft_config}
    if passed_in:
        arguments = {"model": get_peft_model(tiny_model(tokenizer), peft_config)}
    notes = objective_of(build(beta=0.1, **arguments))[1]
    expected = "the starting adapter, frozen" if passed_in else "the base model without the adapter"
    assert any(f"the reference is {expected};" in note for note in notes)


def test_the_card_states_subclasses_and_engines_that_change_the_objective(build):
    class Other(DrGRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs)

    fields = {"deepseekmath_step_std": True, "step_baseline": "deepseekmath"}
    trainer = build(trainer_class=Other, **fields, step_reward_funcs=[step_reward, step_reward])
    trainer.args.use_vllm = True  # after the constructor, which would start the engine
    formula, notes = objective_of(trainer)
    notes = " ".join(notes)
    assert "vLLM importance ratios (token_truncate, -inf to 3) weigh the policy term." in notes
    assert "its own _compute_loss in the place of TRL's" in notes
    assert "own" not in (trainer.own_advantages or "")
    trainer.advantage_func = step_reward
    assert "Advantages are computed by the run's own advantage_func 'step_reward'" in " ".join(
        objective_of(trainer)[1]
    )
    assert "divided by the group's standard deviation, as in arXiv 2402.03300" in notes
    credit = "A_it(process) = (sum over steps k that end at or after t of (s_ik - b)) / group std"
    assert credit in formula
    assert "s_ik = 1 * step_reward + 1 * step_reward" in formula


@pytest.mark.slow
def test_fields_of_trl_that_are_none_break_no_description(plain_card, tmp_path):
    trainer, _ = plain_card
    filled_in = ("num_generations", "generation_batch_size", "steps_per_generation", "output_dir")  # never None there
    fields = [field.name for field in dataclasses.fields(trainer.args) if "None" in str(field.type)]
    for name in {*fields, "max_grad_norm"}.difference(filled_in):
        with swapped(trainer.args, **{name: None}):
            card_text(trainer, tmp_path)
            run_facts(trainer, None)
            setup_of(trainer.args, trainer.model)


def test_a_quantised_base_is_stated(model):
    model.config.quantization_config = nf4()
    expected = "quant_method bitsandbytes, load_in_4bit True, bnb_4bit_quant_type nf4, bnb_4bit_use_double_quant True"
    assert cards.adapter_rows(model) == [("base model quantized", expected)]


def executed(card, folder, monkeypatch, capsys):
    """What the card's snippet prints when it is run in the model's folder."""
    snippet = re.search(r"^(`{3,})python\n(.*?)^\1", card.text, re.MULTILINE | re.DOTALL)[2]
    monkeypatch.chdir(folder)
    capsys.readouterr()
    names = {}
    exec(compile(snippet, "README.md", "exec"), names)
    assert names["output"].shape[1] > names["inputs"]["input_ids"].shape[1]
    return names["model"], names["inputs"]["input_ids"][0].tolist()


def chats():
    return Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}+1="}]} for i in range(8)])


@pytest.mark.parametrize("conversational", [False, True])
def test_the_snippet_of_a_full_model_runs(conversational, plain_card, run, monkeypatch, capsys):
    trainer, card = plain_card
    if conversational:
        trainer, card = run(max_steps=1, data=chats())
    assert ("apply_chat_template" in card.text) == conversational
    model, _ = executed(card, trainer.args.output_dir, monkeypatch, capsys)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, trainer.model.get_parameter(name)), name


def messages(*texts, system=None):
    roles = ["user", "assistant"] * len(texts)
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return [*([{"role": "system", "content": system}] if system else []), *turns]


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


TALK = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATE = TALK + "{% if thinks is false %}short {% endif %}{% if add_generation_prompt %}assistant: {% endif %}"


@pytest.fixture
def asked(monkeypatch):
    """The prompts that trainers generate from, as tokens."""
    asked = []
    generate = HostTrainer._generate_single_turn

    def noted(self, prompt_ids, *arguments):
        asked.extend(prompt_ids)
        return generate(self, prompt_ids, *arguments)

    monkeypatch.setattr(HostTrainer, "_generate_single_turn", noted)
    return asked


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ('Question: 1+1?\nAnswer in \\boxed{}, "quoted" and ```fenced```: é \U0001f600', {}),
        ("word " * 40, {}),  # over several lines
        (messages("1+1="), {}),
        (messages("1+1=", system="Think step by step.\nPut the answer last."), {}),
        (messages("1+1=", "2", "And 2+2?", system="Be brief."), {}),
        (messages("1+1="), {"chat_template_kwargs": {"thinks": False}}),
    ],
    ids=["text", "long text", "message", "system prompt", "turns", "template options"],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_the_snippet_asks_what_the_run_asked(streamed, prompt, fields, asked, run, tokenizer, monkeypatch, capsys):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    data = Dataset.from_list([{"prompt": prompt}] * 8)
    if streamed:
        data = IterableDataset.from_generator(lambda: iter([{"prompt": prompt}] * 8))
    trainer, card = run(max_steps=1, data=data, **fields)
    assert executed(card, trainer.args.output_dir, monkeypatch, capsys)[1] == asked[0]


class Told(Walk):
    """An environment that adds to the prompt."""

    def reset(self, **kwargs):
        super().reset(**kwargs)
        return " You are at the door."


@pytest.mark.parametrize("arguments", [{"tools": [add]}, {"environment_factory": Told}], ids=["tools", "environment"])
def test_the_snippet_tells_the_model_about_its_tools(arguments, asked, reward, tmp_path, monkeypatch, capsys):
    model, tokenizer = with_tools()
    data = Dataset.from_list([{"prompt": messages("1+1=")}] * 8)
    fields = {"max_steps": 1, "max_completion_length": 24, "chat_template_kwargs": {"enable_thinking": False}}
    settings = {**short_run(tmp_path / "run"), **fields}
    trainer, card = with_card(runs.train(DrGRPOTrainer, settings, data, tokenizer, reward, model, **arguments))
    assert executed(card, trainer.args.output_dir, monkeypatch, capsys)[1] == asked[0]


def test_the_snippet_samples_as_the_run_did(run, monkeypatch, capsys):
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1, "max_completion_length": 7}
    trainer, card = run(max_steps=1, **sampling, generation_kwargs={"min_new_tokens": 2})
    call = re.search(r"model\.generate\((.*)\)", card.text)[1]
    stated = {"temperature=0.7", "top_p=0.9", "top_k=5", "repetition_penalty=1.1", "max_new_tokens=7"}
    assert stated | {"do_sample=True", "min_new_tokens=2"} <= set(call.split(", "))
    executed(card, trainer.args.output_dir, monkeypatch, capsys)


def test_the_snippet_of_code_that_must_be_trusted_says_so(plain_card):
    trainer, _ = plain_card
    with swapped(trainer.args, model_init_kwargs={"trust_remote_code": True}):
        text = card_text(trainer, Path(trainer.args.output_dir))
    assert text.count("trust_remote_code=True") >= 2
    assert "trust_remote_code=True" not in plain_card[1].text


def test_an_adapter_names_the_revision_of_its_base(train, saved_model, monkeypatch):
    # A local folder stands for a base of the Hub: transformers takes any revision of it.
    peft_config = LoraConfig(r=4, target_modules=["q_proj"])
    trainer = train(
        model=saved_model,
        peft_config=peft_config,
        max_steps=1,
        model_init_kwargs={"revision": "v2", "dtype": "float32"},
    )
    trainer.save_model()
    assert PeftConfig.from_pretrained(trainer.args.output_dir).revision == "v2"
    monkeypatch.setattr(cards, "base_model_of", lambda model: "Qwen/Qwen3-0.6B")
    text = card_text(trainer, Path(trainer.args.output_dir))
    assert "[Qwen/Qwen3-0.6B](https://huggingface.co/Qwen/Qwen3-0.6B), revision v2." in text


def test_an_adapter_of_a_quantized_base_loads_it_quantized(adapter_run):
    trainer, _ = adapter_run
    with swapped(trainer.model.config, quantization_config=nf4()):
        loading = cards.example_of(trainer, trainer.model)["loading"]
    assert eval(loading["quantization_config"], {"BitsAndBytesConfig": BitsAndBytesConfig}).load_in_4bit


@pytest.fixture(scope="module")
def adapter_run(prompts, tokenizer, reward, saved_model, tmp_path_factory):
    """One run for several tests: two steps, each with a checkpoint."""
    settings = short_run(tmp_path_factory.mktemp("adapter") / "run")
    settings |= {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    peft_config = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    arguments = {"model": saved_model, "peft_config": peft_config}
    return with_card(runs.train(DrGRPOTrainer, settings, prompts, tokenizer, reward, **arguments))


def test_the_snippet_of_an_adapter_runs(adapter_run, monkeypatch, capsys):
    trainer, card = adapter_run
    model, _ = executed(card, trainer.args.output_dir, monkeypatch, capsys)
    ids = torch.arange(40, 60).unsqueeze(0)
    torch.testing.assert_close(model(ids).logits, trainer.model.eval()(ids).logits, rtol=0, atol=1e-5)


def test_the_card_of_an_adapter(adapter_run, saved_model):
    trainer, card = adapter_run
    output = Path(trainer.args.output_dir)
    assert card.data.library_name == "peft"
    assert {"lora", "transformers", "trl", "dr-grpo"} <= set(card.data.tags)
    assert [row(card, name)[0] for name in ("adapter", "rank", "alpha")] == ["LORA", "4", "12"]
    assert row(card, "target modules")[0].replace("\\", "") == "q_proj, v_proj"
    for folder in ("", "checkpoint-1", "checkpoint-2"):  # PEFT names the base by its path
        text = (output / folder / "README.md").read_text()
        assert saved_model not in text
        assert "## Objective" in text
    first = (output / "checkpoint-1" / "README.md").read_text()
    assert "> **In progress**: written at optimizer step 1 of 2" in first
    assert "curves.png" not in first


def test_an_adapter_of_a_hub_model_is_shown_as_one(run, tokenizer):
    model = tiny_model(tokenizer)
    model.config._name_or_path = "Qwen/Qwen2.5-0.5B-Instruct"
    peft_config = LoraConfig(r=4, target_modules=["q_proj"])
    _, card = run(max_steps=1, model=model, peft_config=peft_config)
    assert card.data.base_model == "Qwen/Qwen2.5-0.5B-Instruct"
    assert "base_model:adapter:Qwen/Qwen2.5-0.5B-Instruct" in card.data.tags
    assert "[Qwen/Qwen2.5-0.5B-Instruct](https://huggingface.co/Qwen/Qwen2.5-0.5B-Instruct)" in card.text


class Quantized:
    def to_dict(self):
        return {"load_in_4bit": True, "dtype": torch.bfloat16}


def test_options_of_any_type_are_stated_and_end_no_run(tmp_path):
    # a card is written with every checkpoint: what YAML cannot hold would end the run there
    options = {"dtype": torch.float32, "cache_dir": tmp_path, "config": Quantized(), "max_memory": {0: "2GiB"}}
    generation = {"sequence_bias": {(10,): -1.0}, "suppress_tokens": (3,)}
    args = DrGRPOConfig("out", report_to="none", model_init_kwargs=options, generation_kwargs=generation)
    shown = yaml.safe_load(yaml.safe_dump(cards.changed_settings(args)))
    config = {"config": {"load_in_4bit": True, "dtype": "torch.bfloat16"}, "max_memory": {0: "2GiB"}}
    assert shown["model_init_kwargs"] == {"dtype": "torch.float32", "cache_dir": "(local path)", **config}
    assert shown["generation_kwargs"] == {"sequence_bias": {"(10,)": -1.0}, "suppress_tokens": [3]}


def test_the_settings_are_those_that_somebody_has_set():
    args = DrGRPOConfig(
        "out", report_to="none", num_generations=4, per_device_train_batch_size=8, step_separator="\n", bf16=False
    )
    args.learning_rate = 3e-6
    changed = {"learning_rate": 3e-6, "num_generations": 4, "step_separator": ["\n"], "bf16": False}
    shown = cards.changed_settings(args)
    assert {name: value for name, value in shown.items() if name != "per_device_train_batch_size"} == changed


def test_the_card_states_objects_given_instead_of_settings(train, prompts, tokenizer, reward):
    def other(completion_ids, **kwargs):
        return [0.1 * len(ids) for ids in completion_ids]

    model = tiny_model(tokenizer)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.25)
    schedule = torch.optim.lr_scheduler.ConstantLR(sgd, factor=0.5)
    fields = {"max_steps": 1, "reward_weights": [0.5, 2.0], "step_separator": ["###"]}
    fields |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    trainer = train(
        [reward, other],
        **fields,
        model=model,
        optimizers=(sgd, schedule),
        step_reward_funcs=step_reward,
        step_segmenter=step_segmenter("tokens:3"),
        eval_dataset={"easy": prompts.select(range(4)), "hard": prompts.select(range(4, 8))},
    )
    _, card = with_card(trainer, dataset_name="/home/me/data/train.jsonl")
    assert row(card, "optimizer") == ["SGD, given to the trainer"]
    assert row(card, "learning rate") == ["0.5, schedule ConstantLR, given to the trainer"]
    assert row(card, "weight decay") == ["0.25"]
    assert "| warm-up |" not in card.text
    assert "steps are cut by 'tokens:3'" in card.text
    assert objective_facts(trainer)["step_separator"] == "'tokens:3'"
    assert "r_i  = 0.5 * length_reward + 2 * other\n" in card.text
    assert "s_ik =" not in card.text
    assert "2402.03300" in card.text
    assert row(card, "step&#95;reward") == ["step reward", "1"]
    assert "/home/me" not in card.text
    rewards = logged(trainer, "eval_reward")
    for split, value in zip(("easy", "hard"), rewards, strict=True):
        assert row(card, f"eval&#95;reward ({split})") == ["", f"{value:.4g}", "1"]
    assert "No evaluation on held-out prompts" not in card.text


def test_names_that_mean_something_to_markdown(run, tmp_path):
    def odd(completion_ids, **kwargs):
        return [float(sum(ids) % 3) for ids in completion_ids]

    odd.__name__ = "a|b`c`<img src=x onerror=alert(1)>"
    data = Dataset.from_dict({"prompt": [str(i) for i in range(8)], "col|umn<i>": list(range(8))})
    _, card = run(odd, data=data, max_steps=1, output_dir=str(tmp_path / "run_<b>|`x`"))
    assert "<img" not in card.text
    assert "<i>" not in card.text
    assert card.text.strip().startswith("# run\\_&lt;b&gt;\\|\\`x\\`")
    tables = [line for line in card.text.splitlines() if "a&#124;b" in line]
    assert len(tables) >= 2
    assert all(len(re.findall(r"(?<!\\)\|", line)) in (4, 5) for line in tables)


def test_the_card_of_a_run_without_logs_or_steps(build, output):
    build().create_model_card()
    assert "Nothing was logged yet." in ModelCard.load(output / "README.md").text
    assert not (output / "card").exists()


def test_a_card_is_finished_by_the_end_of_training(train, output):
    train(save_strategy="steps", save_steps=3)  # nothing saved by hand
    assert "In progress" not in (output / "README.md").read_text()
    picture = (output / "card" / "curves.png").read_bytes()
    width, height = struct.unpack(">II", picture[16:24])
    assert width > height > 100


# The parts


def test_curves_are_what_was_logged(tmp_path):
    history = [{"step": 1, "reward": 0.0}, {"step": 2, "reward": 1.0, "completions/mean_length": 5.0}]
    assert curves(history) == {"mean reward": {"reward": [(1, 0.0), (2, 1.0)]}}
    assert draw_curves(history, tmp_path / "a" / "b.png")
    assert (tmp_path / "a" / "b.png").read_bytes().startswith(b"\x89PNG")
    assert not draw_curves(history[:1], tmp_path / "c.png")


def test_curves_of_each_split():
    history = [
        {"step": step, "eval_reward": float(step + i), f"eval_{split}_runtime": 1.0}
        for step in (1, 2)
        for i, split in enumerate(("a", "a_b"))
    ]
    labeled = cards.history_by_split(history, {"a": None, "a_b": None})
    lines = {"eval_reward (a)": [(1, 1.0), (2, 2.0)], "eval_reward (a_b)": [(1, 2.0), (2, 3.0)]}
    assert curves(labeled) == {"mean reward": lines}
    assert cards.history_by_split(history, None) == history


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert not draw_curves([{"step": s, "reward": 1.0} for s in (1, 2)], tmp_path / "c.png")


def test_the_card_tells_hub_ids_and_origins_of_datasets(prompts):
    others = ("/tmp/model", "./x", "~/x", "tests", "a/b/c", "", None, "C:\\models\\x")
    assert [name for name in ("org/name", "gpt2", *others) if is_hub_id(name)] == ["org/name", "gpt2"]
    assert cards.dataset_id(prompts) is None
    copied = Dataset.from_dict({"prompt": ["a"]})
    copied.info.download_checksums = {"hf://datasets/openai/gsm8k@0123abc/main/train.parquet": {}}
    assert cards.dataset_id(copied) == "openai/gsm8k"


def test_metrics_first_and_last():
    history = [{"step": 1, "reward": 1.0, "step_time": 3}, {"step": 2, "reward": 2.0}, {"step": 2, "eval_reward": 5.0}]
    assert cards.metric_rows(history) == [("eval_reward", "", "5", "2"), ("reward", "1", "2", "2")]


@settings(max_examples=50)
@given(st.text(min_size=1))
def test_text_in_a_table_stays_in_its_cell(text):
    for cell in (plain(text), code(text)):
        assert "\n" not in cell
        assert "<" not in cell.replace("<code>", "").replace("</code>", "")
        assert not re.search(r"(?<!\\)(\\\\)*\|", cell)


@given(st.text())
def test_a_fence_is_longer_than_any_in_the_text(text):
    block = fenced(text, "yaml").splitlines()
    assert block[-1] == block[0].removesuffix("yaml")
    assert block[-1] not in text or "```" not in text


def test_secrets_by_name():
    kept = {"eos_token": "</s>", "max_tokens": 3, "hub_token": None}
    nested = {"token": "t", "deep": [{"api_key": "k", "n": 1}], **kept}
    assert scrubbed(nested) == {"token": None, "deep": [{"api_key": None, "n": 1}], **kept}
    assert nested["token"] == "t"
    names = ("JUDGE_API_KEY", "AWS_SECRET_ACCESS_KEY", "tokenizer")
    assert [is_secret(name) for name in names] == [True, True, False]


def test_known_secrets_are_taken_out_of_a_text(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-0123456789")
    text = redacted("a sk-0123456789 b hf_abcdefgh c", {"model_init_kwargs": {"token": "hf_abcdefgh"}})
    assert text == "a <secret> b <secret> c"


def test_a_secret_in_a_name_is_taken_out_before_markdown_escapes_it(run, output, reward, monkeypatch):
    secret = "gw_planted_key_777"
    monkeypatch.setenv("GATEWAY_TOKEN", secret)

    def named(completion_ids, **kwargs):
        return reward(completion_ids)

    named.__name__ = f"judge {secret}"
    _, card = run(named, max_steps=1, output_dir=f"{output}-{secret}")
    assert "planted" not in card.content  # nor in the metadata, which hold the name of the folder
    assert row(card, "judge &lt;secret&gt;") == ["function", "1"]


def test_paths_of_the_machine():
    values = {"a": "/home/me/x", "b": ["~/x", "org/name", 1], "c": {"d": "C:\\x"}}
    shown = {"a": "(local path)", "b": ["(local path)", "org/name", 1], "c": {"d": "(local path)"}}
    assert without_paths(values) == shown


def test_trackers_get_no_nested_token():
    args = DrGRPOConfig("out", report_to="none", model_init_kwargs={"token": "hf_secret_value"}, hub_token="hf_other")
    assert "hf_secret_value" not in args.to_json_string()
    assert "hf_other" not in args.to_json_string()
    assert args.model_init_kwargs == {"token": "hf_secret_value"}
