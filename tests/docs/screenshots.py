"""Pictures of the report for the guides, from a run of the demo: `python tests/docs/screenshots.py [RUN_DIR]`.

`trl-drgrpo demo` writes the run (default: runs/demo). Without chromium and chromedriver nothing is written.
"""

import argparse
import io
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import chromium  # noqa: E402

from trl_drgrpo.report import write_report  # noqa: E402

IMAGES = ROOT / "recipes" / "guides" / "images"
SIZES = {"report_light": (1200, 800, False), "report_dark": (1200, 800, True)}
COLORS = 256  # of a palette: a page has few, and a picture in a repository should be small


def take(run_dir: Path, folder: Path) -> list[Path]:
    """Writes the pictures into a folder and returns their paths."""
    from PIL import Image

    written = []
    with tempfile.TemporaryDirectory() as temporary:
        page = write_report(run_dir, Path(temporary) / "report.html")
        browser = chromium.start(Path(temporary) / "profile")
        try:
            browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
            for name, (width, height, dark) in SIZES.items():
                chromium.resize(browser, width, height, dark=dark)
                chromium.open_report(browser, page.as_uri())
                picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
                written.append(folder / f"{name}.png")
                folder.mkdir(parents=True, exist_ok=True)
                picture.quantize(COLORS, dither=Image.Dither.NONE).save(written[-1], optimize=True)
        finally:
            browser.quit()
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", nargs="?", type=Path, default=Path("runs/demo"), help="output_dir of a run")
    args = parser.parse_args()
    if not chromium.is_installed():
        sys.stderr.write(f"skipped: needs {chromium.NEEDED}\n")
        return 0
    for path in take(args.run_dir, IMAGES):
        sys.stdout.write(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
