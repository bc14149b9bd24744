"""Token advantages on the tokens."""

import numpy as np
import pytest

from trl_drgrpo.labs.study.token_credit_figure import draw_token_credit

pytest.importorskip("matplotlib")


def test_it_shows_each_token_on_its_advantage():
    advantages = np.array([[0.5, -1.0], [0.25, 0.0]])
    [axes] = draw_token_credit([["a", "\n"], ["<|im_end|>"]], {"outcome": advantages}).axes
    assert [(text.get_position(), text.get_text()) for text in axes.texts] == [
        ((0, 0), "a"),
        ((1, 0), "↵"),
        ((0, 1), "■"),
    ]
    [image] = axes.get_images()
    assert image.get_array().tolist() == advantages.tolist()
    assert image.get_clim() == (-1, 1)  # white is 0


def test_advantages_of_zero_are_drawn():
    [axes] = draw_token_credit([["$a"]], {"no signal": np.zeros((1, 1))}).axes
    axes.figure.canvas.draw()
    assert axes.texts[0].get_text() == r"\$a"
