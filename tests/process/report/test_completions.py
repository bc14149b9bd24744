"""The browser of completions: what it opens on, filters and orders, groups, trees, keys."""

import chromium
import pytest

pytestmark = pytest.mark.needs_program(chromium.NEEDED, missing=not chromium.is_installed())


def test_an_enormous_completion_is_folded(opened):
    script = opened("hostile")
    script("select(4)")
    height = "return document.getElementById('completion-text').clientHeight"
    folded = script(height)
    assert folded < 400
    assert "characters of the middle are left out" in script("return document.getElementById('detail').textContent")
    script("document.querySelector('#detail button[aria-expanded]').click()")
    assert script(height) > 3 * folded


def test_the_keys(opened, texts, press):
    script = opened("one")
    item = "return document.querySelector('.item[aria-selected=true]').getAttribute('aria-posinset')"
    assert script(item) == "1"
    press("jjj")
    assert script(item) == "4"
    assert texts("#completion-title")[0].startswith("Completion 4 of 8")
    press("k")
    assert script(item) == "3"
    press("n")
    assert script(item) == "9"
    press("p")
    assert script(item) == "1"
    press("k")
    assert script(item) == "1"  # there is none before the first
    press("/")
    press("jt")  # typed into the search, not taken as keys
    assert script("return document.getElementById('search').value") == "jt"


def test_the_filters(opened):
    script = opened("one")
    count = "return document.getElementById('shown-count').textContent"
    assert script(count) == "64 of 64 completions"
    choose = "const f = fields[arguments[0]]; f.value = arguments[1]; f.dispatchEvent(new Event('input'))"
    rows = [row for group in script("return DATA.runs[0].groups") for row in group["rows"]]
    script(choose, "answers", "true")
    assert script(count) == f"{sum(row['right'] for row in rows)} of 64 completions"
    script(choose, "answers", "")
    script(choose, "from", "20")
    script(choose, "to", "30")
    assert script(count) == "32 of 64 completions"
    script(choose, "from", "")
    script(choose, "to", "")
    wanted = rows[5]["spans"][1]["text"].strip()
    matching = sum(wanted in "".join(span["text"] for span in row["spans"]) for row in rows)
    script(choose, "search", wanted.upper())
    assert script(count) == f"{matching} of 64 completions"
    assert 0 < matching < 64
    assert script("return CSS.highlights.get('found') !== undefined")
    script(choose, "search", "no completion says this")
    assert "No completion matches" in script("return document.getElementById('detail').textContent")


def test_the_group_view_shows_the_recorded_numbers(opened, texts):
    script = opened("one")
    group = script("return entries[0].group")
    shown = {name: texts(f"[data-is={name}]") for name in ("reward", "advantage", "zscore")}
    for row, reward, advantage, zscore in zip(group["rows"], *shown.values(), strict=True):
        assert float(reward) == pytest.approx(row["reward"], rel=1e-2)
        assert float(advantage.replace("−", "-")) == pytest.approx(row["advantage"], rel=1e-2)
        assert float(zscore.replace("−", "-")) == pytest.approx(row["zscore"], rel=1e-2)
    assert f"group mean {group['baseline']:.3g}" in texts(".group thead")[0]
    script("document.querySelectorAll('.group tbody tr')[5].click()")
    assert texts("#completion-title")[0].startswith("Completion 6 of 8")


def test_steps_are_marked_and_tokens_colored(opened, texts):
    script = opened("one")
    row = script("return entries[selected].row")
    marks = texts(".stepmark")
    assert len(marks) == len(row["spans"])
    assert marks[0] == f"1 · {row['spans'][0]['step_reward']:g}"
    signs = script("return [...document.querySelectorAll('.tok')].map(e => e.classList.contains('pos'))")
    assert signs == [span["advantage"] > 0 for span in row["spans"]]


def test_a_group_without_a_signal_has_no_scale(opened, texts):
    script = opened("one")
    assert len(texts(".detail .scale")) == 1
    script("entries[0].group.rows.forEach((row) => row.spans.forEach((span) => { span.advantage = 0; })); select(0)")
    assert texts(".detail .scale") == []


def test_a_forked_group_is_a_tree(browser, opened, texts):
    script = opened("forked")
    heads = texts(".tree > li > .chips, .tree ul > li > .chips")
    assert [head.split("length")[0] for head in heads[:5]] == [
        "Parent 1mean reward 0.75advantage +0.5",
        "Branch 1.1mean reward 0.5advantage −0.5",
        "Completion 1✓ correctreward 1advantage +1",
        "Completion 2✗ incorrectreward 0advantage −1",
        "Branch 1.2reward 1advantage +0.5",
    ]
    assert len(heads) == 12  # each stretch once, of 8 completions with 20
    assert "Completion 5✗ incorrectnot cut (× 2)reward 0advantage −0.5length 8 tokens" in heads
    assert script("return document.querySelectorAll('.tree > li > ul > li > ul > li').length") == 6
    boxes = texts(".tree .text-box")
    assert [boxes.count(text) for text in ("2+3=5\n", "so 5+4=9\n", "10")] == [1, 1, 2]
    signs = script("return [...document.querySelectorAll('.tree .tok')].slice(0, 4).map(e => e.className)")
    assert signs == ["tok pos", "tok neg", "tok pos", "tok neg"]
    assert texts(".tree button[aria-expanded]") == ["Show all of the stretch"]  # five thousand characters
    assert browser.get_log("browser") == []


def test_a_completion_of_the_tree_is_chosen_with_the_keyboard(opened, texts, press):
    from selenium.webdriver.common.keys import Keys

    script = opened("forked")
    current = "return [...document.querySelectorAll('.tree [aria-current=true]')].map(e => e.ariaLabel)"
    assert script(current) == ["completion 1 of 8"]
    press("jj")
    assert script(current) == ["completion 3 of 8"]
    press("jjj")
    assert script(current) == ["completion 5 of 8"]  # the sixth is the same
    script("document.querySelectorAll('.tree button')[1].focus()")
    press(Keys.ENTER)
    assert script(current) == ["completion 2 of 8"]
    assert script("return document.activeElement.ariaLabel") == "completion 2 of 8"
    assert texts(".tree li.current > .chips > b:first-child") == ["Parent 1", "Branch 1.1"]
    assert script("return document.querySelector('.tree').ariaLabel") == "Completions as a tree"


def test_a_forked_group_is_flat_after_one_click(opened, texts, press):
    script = opened("forked")
    pressed = "return [...document.querySelectorAll('.views button')].map(e => [e.textContent, e.ariaPressed])"
    assert script(pressed) == [["Tree", "true"], ["Table", "false"]]
    script("const b = document.querySelectorAll('.views button')[1]; b.focus(); b.click()")
    assert script(pressed) == [["Tree", "false"], ["Table", "true"]]
    assert script("return document.activeElement.textContent") == "Table"
    assert texts("#completion-text") == ["2+3=5\nso 5+4=9\n9"]
    assert script("return document.querySelectorAll('.group tbody tr').length") == 8
    press("n")  # the group before does not fork
    assert not texts(".views, .tree")
    press("p")
    assert script(pressed)[1] == ["Table", "true"]


def with_dead_groups(script):
    """The newest group and the one before it get equal rewards, as if the page had been made from such a run."""
    script(
        """RUNS[0].groups.slice(-2).forEach((group) => group.rows.forEach((row) => {
            Object.assign(row, { reward: 1, advantage: 0 }); row.spans.forEach((span) => { span.advantage = 0; }); }));
        drawCompletions();"""
    )


CHOOSE = "const f = fields[arguments[0]]; f.value = arguments[1]; f.dispatchEvent(new Event('input'))"
ROWS = "return shownEntries.map(({ row, group, i }) => [row.advantage, row.length, group.step, group.index, i])"


def test_it_opens_on_the_newest_live_group(opened, texts):
    script = opened("one")
    with_dead_groups(script)
    assert script("return shownEntries[0].group.step") == 40
    assert script("const e = shownEntries[selected]; return [e.group.step, e.group.index, e.i]") == [30, 0, 0]
    assert texts("#detail h2")[0].startswith("Step 30, group 1")
    script(CHOOSE, "groups", "live")
    assert texts("#shown-count") == ["48 of 64 completions"]
    assert script("return shownEntries[0].group.step") == 30
    script(CHOOSE, "groups", "dead")
    assert texts("#shown-count") == ["16 of 64 completions"]
    assert "dead" in texts("#detail h2")[0]


@pytest.mark.parametrize(
    ("order", "key", "reverse"),
    [("advantage", 0, True), ("-advantage", 0, False), ("length", 1, True), ("-length", 1, False)],
)
def test_the_orders(opened, order, key, reverse):
    script = opened("one")
    script(CHOOSE, "sort", order)
    values = [row[key] for row in script(ROWS)]
    assert values == sorted(values, reverse=reverse)
    assert script("return selected") == 0
    script(CHOOSE, "sort", "newest")
    steps = [row[2:] for row in script(ROWS)]
    assert steps == sorted(steps, key=lambda row: (-row[0], row[1], row[2]))


def test_the_link_keeps_filters_and_the_completion(opened, press, texts):
    script = opened("one")
    assert script("return location.hash") == ""  # nothing was chosen
    script(CHOOSE, "answers", "false")
    script(CHOOSE, "search", "a & b=c#")
    script(CHOOSE, "search", "")
    script(CHOOSE, "sort", "length")
    press("jj")
    link, title = script("return location.hash"), texts("#completion-title")
    assert link.startswith("#answers=false&sort=length&shown=0.train.")
    script = opened("one", link)
    assert texts("#completion-title") == title
    assert script("return [selected, fields.answers.value, fields.sort.value]") == [2, "false", "length"]
    script("location.hash = '#search=carry'")
    script = opened("one", "#search=carry")
    assert script("return fields.search.value") == "carry"
    assert script("return shownEntries.length") < 64
    assert opened("one", "#x=nonsense&smooth=x&sort=nonsense&shown=9.9&hide=7&%E0%A4%A")(
        "return [state.x, state.smooth, charts.length > 9]"
    ) == ["steps", "3", True]
