"""Strict reading: what a recipe or a flag may say, and the one line that everything else gets."""

import ast
import re

import pytest
from case_tables import cases

from trl_drgrpo.cli.flags import read_flags
from trl_drgrpo.cli.main import main
from trl_drgrpo.cli.recipe import coerce, read_recipe
from trl_drgrpo.common.errors import InputError


@pytest.fixture
def recipe(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "recipe.yaml").write_text(text)
        return str(tmp_path / "recipe.yaml")

    return write


@pytest.mark.parametrize(("_", "text", "key", "value"), cases("cli.tsv", "values"))
def test_a_recipe_value_has_the_type_of_its_field(recipe, _, text, key, value):
    result, due = read_recipe(recipe(text)).values[key], ast.literal_eval(value)
    assert result == due
    assert type(result) is type(due)


@pytest.mark.parametrize(("_", "text", "message"), cases("cli.tsv", "recipes"))
def test_a_bad_recipe_is_one_error(recipe, _, text, message, capsys):
    assert main(["train", "--config", recipe(text)]) == 2
    assert re.search(message, capsys.readouterr().err.rstrip())


def test_a_flag_that_wins_over_the_recipe_is_not_looked_for_in_it(recipe, capsys):
    path = recipe("num_generations: 8\n")
    assert main(["train", "--config", path, "--num_generations", "x"]) == 2
    assert "Its default is 8.\n" in capsys.readouterr().err


def test_env_and_missing_files(recipe, tmp_path):
    read = read_recipe(recipe("env: {SOME_NUMBER: 1, SOME_TEXT: a}\nbeta: 0.1"))
    assert (read.env, read.values) == ({"SOME_NUMBER": "1", "SOME_TEXT": "a"}, {"beta": 0.1})
    for path, problem in ((tmp_path / "no.yaml", "which does not exist"), (tmp_path, "a directory")):
        with pytest.raises(InputError, match=f"--config: got .*{problem}"):
            read_recipe(str(path))


@pytest.mark.parametrize(("_", "name", "text", "value"), cases("cli.tsv", "after flags"))
def test_text_after_a_flag(_, name, text, value):
    assert coerce(read_flags()[name], ast.literal_eval(text)) == ast.literal_eval(value)
