"""The drawing of example groups and its sliders, without a front end."""

import sys

import pytest

from trl_drgrpo.labs.study import group_figure
from trl_drgrpo.labs.study.group import ExampleGroup
from trl_drgrpo.labs.study.group_figure import draw_groups, group_widget, has_reader, show_group_widget

pytest.importorskip("matplotlib")


def test_the_drawing_shows_the_numbers():
    group = ExampleGroup(right=1, length_right=20, length_wrong=60)
    lengths, weights, pulls = draw_groups([group], ["grpo"]).axes
    assert [bar.get_height() for bar in lengths.patches] == group.lengths.tolist()
    assert weights.collections[1].get_offsets()[:, 1].tolist() == pytest.approx(group.token_weights("grpo").tolist())
    assert pulls.collections[1].get_offsets()[:, 1].tolist() == pytest.approx(group.pulls("grpo").tolist())


def test_the_picture_follows_the_sliders():
    pytest.importorskip("ipywidgets")
    controls, image = group_widget().children
    sliders, chosen = controls.children
    pictures = [bytes(image.value)]
    assert pictures[0].startswith(b"\x89PNG")
    for slider, value in zip(sliders.children, (3, 80, 300, 120), strict=True):
        slider.value = value
        pictures.append(bytes(image.value))
    chosen.value = ("grpo_without_std",)
    pictures.append(bytes(image.value))
    assert len(set(pictures)) == len(pictures)


class Shell:
    """What IPython's shell knows of the request that it executes."""

    def __init__(self, allow_stdin):
        self.request = {"content": {} if allow_stdin is None else {"allow_stdin": allow_stdin}}

    def get_parent(self):
        return self.request


@pytest.mark.parametrize(
    ("shell", "reader"), [(Shell(True), True), (Shell(False), False), (Shell(None), False), (None, False), (1, False)]
)
def test_the_widget_is_for_readers(monkeypatch, shell, reader):
    pytest.importorskip("ipywidgets")
    import IPython.core.getipython
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.core.getipython, "get_ipython", lambda: shell)
    monkeypatch.setattr(IPython.display, "display", shown.append)
    assert has_reader() is reader
    show_group_widget()
    assert len(shown) == reader


def test_without_ipywidgets_nothing_is_shown(monkeypatch):
    monkeypatch.setattr(group_figure, "has_reader", lambda: True)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    show_group_widget()
    with pytest.raises(ImportError):
        group_widget()


def test_a_real_kernel_shows_it_to_a_front_end_that_takes_input():
    pytest.importorskip("ipykernel")
    pytest.importorskip("ipywidgets")
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel()
    try:
        for reader in (True, False):
            messages = []
            client.execute_interactive(
                "from trl_drgrpo.labs.study.group_figure import show_group_widget; show_group_widget()",
                allow_stdin=reader,
                timeout=60,
                output_hook=messages.append,
            )
            shown = [message["content"]["data"] for message in messages if message["msg_type"] == "display_data"]
            assert ["application/vnd.jupyter.widget-view+json" in data for data in shown] == [True] * reader
            assert [message["content"] for message in messages if message["msg_type"] == "error"] == []
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
