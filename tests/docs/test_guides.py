"""The README and the guides: their Python blocks run as they stand, and what they name exists."""

import re
from pathlib import Path

import pytest
from reference_page import flags, own_fields
from registries import restored

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "recipes" / "guides"
STUDIES = ROOT / "recipes" / "studies"
FILES = [ROOT / "README.md", *sorted(GUIDES.glob("*.md"))]
FILES += [*sorted(STUDIES.glob("*.md")), ROOT / "tests/benchmarks/README.md", ROOT / "CONTRIBUTING.md"]
PLACES = {path.name if path.parent in (ROOT, GUIDES) else str(path.relative_to(ROOT)): path for path in FILES}
PAGES = {name: path.read_text(encoding="utf-8") for name, path in PLACES.items()}
MIGRATING = PAGES["migrating.md"]


def fenced(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)


BLOCKS = [(page, block) for page in PAGES if page != "README.md" for block in fenced(page, "python")]


def test_there_are_blocks():
    assert {"quickstart.md", "process_rewards.md", "lora.md", "rewards.md"} <= {page for page, _ in BLOCKS}
    assert len(fenced("migrating.md", "python")) >= 2


@pytest.mark.parametrize(
    ("page", "block"), BLOCKS, ids=lambda text: text if text in PAGES else text.strip().splitlines()[-1][:30]
)
def test_block_runs(page, block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with restored():
        exec(compile(block, page, "exec"), {"__name__": "guide"})


def test_the_readme_shows_the_quickstart_script_and_is_short():
    """The script needs a network; `test_starts.py` runs it on tiny stand-ins."""
    (block,) = fenced("README.md", "python")
    assert block in (ROOT / "recipes" / "quickstart.py").read_text(encoding="utf-8")
    assert len([line for line in block.splitlines() if line]) <= 16
    assert len(PAGES["README.md"].split()) <= 800


def test_results_in_the_readme_are_those_of_the_evidence():
    (table,) = re.findall(r"^## Results\n(.*?)^## ", PAGES["README.md"], re.MULTILINE | re.DOTALL)
    numbers = re.findall(r"\d+(?:\.\d+)?(?: ± \d+\.\d+|e-\d+|%| s\b)", table)
    assert len(numbers) >= 10
    assert [each for each in numbers if each not in PAGES["evidence.md"]] == []


def test_the_table_of_what_a_resumed_run_keeps_is_the_one_that_it_goes_by():
    from trl_drgrpo.features.resume.settings import ON_RESUME

    rows = re.findall(r"^\| (kept|refused|generated again)[^|]* \| (.*) \|$", PAGES["resume.md"], re.MULTILINE)
    told = {
        how: set(re.findall(r"`(\w+)`", settings)) - {"adamw_torch", "adamw_torch_fused"} for how, settings in rows
    }
    assert told == {how: set(settings) for how, settings in ON_RESUME.items() if how != "unsaid"}


@pytest.mark.parametrize("page", PAGES)
def test_targets_commands_and_files_exist(page):
    from trl_drgrpo.cli.main import SUBCOMMANDS

    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|^ *)make ([\w-]+)", PAGES[page], re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for command in re.findall(r"(?:`|^ *)trl-drgrpo ([a-z][\w-]*)", PAGES[page], re.MULTILINE):
        assert command in SUBCOMMANDS, command
    for path in re.findall(r"\b(?:recipes|notebooks|tests)/[\w./-]+\.[a-z]+\b", PAGES[page]):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", [page for page in PAGES if fenced(page, "bash")])
def test_flags_in_shell_blocks_exist(page):
    for block in fenced(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            for command, rest in re.findall(r"^(?:\S+=\S+ )*trl-drgrpo ([\w-]+)([^#]*)", line):
                known = {name for action in flags(command) for name in action.option_strings}
                assert set(re.findall(r"(?<!\S)--[a-z][\w-]*", rest)) <= known, line


def test_every_new_field_is_in_the_guides():
    new = [field.name for field in own_fields() if "Former" not in field.metadata["help"]]
    assert [name for name in new if f"`{name}`" not in PAGES["configuration.md"]] == []


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"loss_type": "dapo", "scale_rewards": "group", "use_bias_correction_kl": True},
        {"loss_type": "dr_grpo", "scale_rewards": True},
        {"loss_type": "dr_grpo", "scale_rewards": False},
    ],
)
def test_the_migrating_page_on_plain_configurations(fields):
    from trl import GRPOConfig

    from trl_drgrpo import DrGRPOConfig

    plain = GRPOConfig(use_cpu=True, bf16=False, report_to="none", **fields)
    read = DrGRPOConfig.from_grpo_config(plain)
    assert (read.loss_type, read.scale_rewards, read.use_bias_correction_kl) == ("dr_grpo", "none", False)
    for name in fields:
        assert f"`{name}" in MIGRATING


def anchors(page):
    """The anchors of a page's headings, as a forge makes them."""
    headings = re.findall(r"^#+ (.*)$", PAGES[page], re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", each.replace("`", "").lower()).strip().replace(" ", "-") for each in headings]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere_in_the_repository(page):
    folder = PLACES[page].parent
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if link.startswith("https://"):
            continue
        name, _, heading = link.partition("#")
        target = (folder / name).resolve() if name else PLACES[page]
        assert target.is_file(), link
        assert target.is_relative_to(ROOT), link
        if heading:
            assert heading in anchors(next(page for page, path in PLACES.items() if path == target)), link
