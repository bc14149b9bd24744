"""`trl-drgrpo generate`: prompts from the call, from stdin and from a dialog, as the run was trained on them."""

import io
import json
import sys

import pytest
import yaml

from trl_drgrpo.cli.main import main
from trl_drgrpo.cli.run_keys import keep_recipe
from trl_drgrpo.evaluation import models, running
from trl_drgrpo.process_rewards.continuations import Continuation


@pytest.fixture
def asked(saved_model, tokenizer, monkeypatch):
    """Prompts as the model gets them; its answers are `7` and `8` in turn, the last one cut off."""
    prompts = []

    class Echo:
        def __init__(self, model, tokenizer, decoding, batch_size):
            self.decoding = decoding

        def __call__(self, requests):
            [request] = requests
            prompts.append(tokenizer.decode(request.prefix))
            ids = [tokenizer.encode(text, add_special_tokens=False) for text in ("7", "8")]
            ends = ["stop"] * (request.count - 1) + ["length"]
            return [[Continuation(tuple(ids[i % 2]), len(ids[i % 2]), end) for i, end in enumerate(ends)]]

    monkeypatch.setattr(models, "load_model", lambda name, loading: None)
    monkeypatch.setattr(running, "model_sampler", Echo)
    return prompts


def run_of(folder, saved_model, prompts, **recipe):
    """A run's folder that holds the model: its recipe, and the form of its prompts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(saved_model).save_pretrained(folder)
    AutoTokenizer.from_pretrained(saved_model).save_pretrained(folder)
    keep_recipe(folder, yaml.safe_dump({"model_name_or_path": saved_model, "reward_funcs": ["math_reward"], **recipe}))
    (folder / "_drgrpo" / "run.json").write_text(json.dumps({"prompts": prompts}))
    return str(folder)


def test_a_run_answers_as_it_was_trained(asked, saved_model, tmp_path, capsys):
    run = run_of(tmp_path / "first", saved_model, "texts", prompt_template="Q: {prompt} A:", max_completion_length=9)
    argv = ["generate", "--model", run, "--num_samples", "2"]
    assert main([*argv, "3+4"]) == 0
    assert asked == ["Q: 3+4 A:"]
    out = capsys.readouterr().out.splitlines()
    assert out == ["7", "[1 tokens]", "", "8", "[cut off at 9 tokens]"]
    assert main([*argv, "3+4", "--prompt_template", "{prompt}", "--temperature", "0.5"]) == 0  # flags win
    assert asked[1:] == ["3+4"]


def test_messages_where_the_run_had_messages(asked, saved_model, tmp_path, tokenizer):
    def rendered(*messages):
        return tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)

    user, system = {"role": "user", "content": "3+4"}, {"role": "system", "content": "Add."}
    chat = run_of(tmp_path / "chat", saved_model, "messages")
    with_system = run_of(tmp_path / "system", saved_model, "messages", system_prompt="Add.")
    plain = run_of(tmp_path / "plain", saved_model, "texts")
    calls = [(chat, rendered(user)), (with_system, rendered(system, user)), (plain, "3+4"), (saved_model, None)]
    for model, expected in calls:
        assert main(["generate", "--model", model, "3+4"]) == 0
        assert asked[-1] == (expected or rendered(user))
    template = tokenizer.chat_template
    tokenizer_file = tmp_path / "chat" / "chat_template.jinja"
    tokenizer_file.write_text("{{ mood }}: {{ messages[0].content }}")
    assert main(["generate", "--model", chat, "3+4", "--chat_template_kwargs", '{"mood": "calm"}']) == 0
    assert asked[-1] == "calm: 3+4"
    tokenizer_file.write_text(template)
    assert main(["generate", "--model", chat, "3+4", "--no-chat"]) == 0
    assert asked[-1] == "3+4"


def test_prompts_of_stdin_and_of_a_dialog(asked, saved_model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("1+1\n\n2+2\n"))
    assert main(["generate", "--model", saved_model, "--no-chat"]) == 0
    assert asked == ["1+1", "2+2"]

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("3+3\n\n4+4\n"))
    assert main(["generate", "--model", saved_model, "--no-chat"]) == 0
    assert asked[2:] == ["3+3"]  # an empty line ends
    assert "an empty line ends" in capsys.readouterr().err


def test_a_model_answers(saved_model, capsys):
    """The real sampler."""
    argv = ["generate", "--model", saved_model, "3+4", "--max_completion_length", "3", "--num_samples", "2"]
    assert main([*argv, "--seed", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("tokens]") == 2
    assert main([*argv, "--seed", "1"]) == 0
    assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "model_name_or_path: got none"),
        (["--model", "./nowhere"], "model_name_or_path: got ./nowhere, which does not exist"),
        (["--num_samples", "0"], "num_samples: got 0"),
        (["--prompt_template", "{prompt} {hint}"], "prompt_template: got the slot {hint}"),
    ],
)
def test_bad_input_is_one_line_before_a_model_loads(argv, message, saved_model, monkeypatch, capsys):
    monkeypatch.setattr(models, "load_model", lambda *args: pytest.fail("too late"))
    given = argv if not argv or "--model" in argv else ["--model", saved_model, *argv]
    assert main(["generate", "3+4", *given]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_prompt_beyond_the_context_is_refused(asked, saved_model, capsys):
    assert main(["generate", "--model", str(saved_model), "[1,2]" * 50_000]) == 2
    assert "expected fewer than the model's context of" in capsys.readouterr().err
    assert not asked
