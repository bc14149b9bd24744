"""YAML of recipes: numbers that mean one thing, JSON's types, bounded size; whatever fails says so in one line."""

import pytest
import yaml

from trl_drgrpo.cli import strict_yaml
from trl_drgrpo.cli.flags import read_flags
from trl_drgrpo.cli.main import main
from trl_drgrpo.cli.recipe import coerce, read_recipe
from trl_drgrpo.common.errors import InputError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1_000", 1000),
        ("0x1F", 31),
        ("-12", -12),
        ("1e-6", 1e-6),
        (".5", 0.5),
        ("+.inf", float("inf")),
        ("yes", True),
        ("~", None),
        ("2024-02-30", "2024-02-30"),
        ("2024-01-01", "2024-01-01"),
        ("=", "="),
        ("1:60:99", "1:60:99"),
        ("'0100'", "0100"),
    ],
)
def test_scalars_are_read_with_their_types(text, value):
    read = strict_yaml.load(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "forms"),
    [("0100", "64 or 100"), ("-0100", "-64 or -100"), ("1:30", "90"), ("190:20:30", "685230"), ("0o17", "15")],
)
def test_numbers_that_versions_of_yaml_disagree_on(text, forms, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"run_name: {text}")
    assert read_recipe(str(recipe)).values == {"run_name": text}  # a text field gets it as written
    for line in (f"seed: {text}", f"generation_kwargs: {{a: [{text}]}}"):
        recipe.write_text(line)
        with pytest.raises(InputError, match=f"write {forms}, or put a text in quotes"):
            read_recipe(str(recipe))
    with pytest.raises(InputError, match=f"write {forms}"):
        coerce(read_flags()["seed"], text)


BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 9))


@pytest.mark.parametrize(
    "value",
    [
        *("!!int x", "!!int ''", "!!float x", "!!bool x", "!!map [a]", "!!seq {a: 1}", "!!timestamp 2024-01-01"),
        *("!!binary aGk=", "!!set {a}", "!!omap [a: 1]", "!foo bar", "!!python/object/apply:os.system ['true']"),
        *("0x_", "0b_", "9" * 5000, '"\\U00110000"', "{[a]: b}", "&a [*a]", "*nothing"),
        *("[" * 400 + "]" * 400, "{a: " * 60 + "1" + "}" * 60, "[" * 3000 + "]" * 3000),
        *(f"\n  {BOMB}".replace("\n", "\n  "), f"\n  {MERGES}".replace("\n", "\n  ")),
    ],
    ids=lambda value: value.strip()[:30],
)
@pytest.mark.parametrize("key", ["run_name", "generation_kwargs", "env"])
def test_an_impossible_value_is_one_error_line(key, value, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{key}: {value}\n")
    assert main(["train", "--config", str(recipe)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(("error: --config: got ", f"error: {key}: got ", "error: env: got "))
    assert err.count("\n") == 1
    assert len(err) < 1000


def test_json_after_a_flag_is_bounded_too():
    flag = read_flags()["generation_kwargs"]
    assert coerce(flag, '{"a": "\\ud83d\\ude00"}') == {"a": "😀"}
    for text in ('{"a":' * 3000 + "1" + "}" * 3000, '{"a":' * 60 + "1" + "}" * 60, '{"a": ' + "9" * 5000 + "}"):
        with pytest.raises(InputError, match="generation_kwargs: got .*YAML error"):
            coerce(flag, text)


@pytest.mark.parametrize("variable", ["'A=B': x", "'': x", 'A: "a\\0b"', "A: [1]", 'A: "\\ud800"'])
def test_variables_that_no_environment_can_hold(variable, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"env: {{{variable}}}\n")
    with pytest.raises(InputError, match="^env: got "):
        read_recipe(str(recipe))


def test_variables_are_texts_as_written(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("env: {A: yes, B: 0100, C: null, D: , E: 1.50}\n")
    assert read_recipe(str(recipe)).env == {"A": "yes", "B": "0100", "C": "null", "D": "", "E": "1.50"}


def test_an_anchor_may_be_used_again(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("generation_kwargs: &a {top_k: 5}\nchat_template_kwargs: *a\n")
    values = read_recipe(str(recipe)).values
    assert values["chat_template_kwargs"] == values["generation_kwargs"] == {"top_k": 5}


@pytest.mark.parametrize(("key", "value"), [("learning_rate", "9" * 400), ("output_dir", '"a\\0b"')])
def test_numbers_and_texts_that_nothing_can_take(key, value, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{key}: {value}\n")
    with pytest.raises(InputError, match=f"^{key}: got "):
        read_recipe(str(recipe))


def test_the_loader_leaves_that_of_others_alone():
    assert yaml.safe_load("a: 0100") == {"a": 64}
