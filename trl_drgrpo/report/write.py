"""`write_report` turns folders of runs into one file; `--follow` serves the page of runs that are going on.

The followed page asks for itself again and again; the runs are read anew only if one of their files has changed.
The server has nothing but the page, and only for this machine: it listens on the loopback address and refuses requests
that name another host. A foreign page whose name was rebound to this address would send such requests.
"""

import json
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, cast, get_args

from trl_drgrpo.common.disk import check_file, is_stream, room_needed, write_whole
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.file_states import file_states
from trl_drgrpo.report.contents import report_contents
from trl_drgrpo.report.page import draw_figure, html_page, markdown_page
from trl_drgrpo.report.run_folders import LOG_FOLDER, read_runs

ReportFormat = Literal["html", "md", "json", "png"]
FORMATS: tuple[str, ...] = get_args(ReportFormat)


def write_report(
    run_dirs: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    format: ReportFormat = "html",
    max_groups: int | None = None,
) -> Path:
    """
    Write the logs of one or several runs as one file.

    Args:
        run_dirs (`str`, `Path` or a sequence of them):
            Output folders of runs of `DrGRPOTrainer` or of TRL's `GRPOTrainer`, also unfinished ones.
        output (`str` or `Path`, *optional*): The file. Defaults to `default_output(run_dirs, format)`.
        format (`str`, *optional*, defaults to `"html"`):
            `"html"` (one page that needs no network), `"md"` (tables, and the plots in a `.png` beside it), `"json"`
            (everything computed) or `"png"` (the plots). `md` and `png` need matplotlib (the extra `report`).
        max_groups (`int`, *optional*): Show at most so many groups of completions per run.

    Returns:
        `Path`: The file.

    Raises:
        [`InputError`]: A folder is no run, the format is unknown, or the file cannot be written.
    """
    if isinstance(run_dirs, (str, Path)):
        run_dirs = [run_dirs]
    folders = list(run_dirs)
    if format not in FORMATS:
        raise InputError("format", repr(format), f"one of {', '.join(FORMATS)}", "html is the default.")
    if max_groups is not None and max_groups < 0:
        raise InputError("max_groups", str(max_groups), "0 or larger", "Leave it out to show what fits.")
    if output is None:
        output = default_output(folders, format)
    path = Path(output)
    check_file("output", str(path))
    if format == "md" and not is_stream(path):
        check_file("output", str(path.with_suffix(".png")))
    contents = report_contents(read_runs(folders), max_groups, thin=format != "json")
    with room_needed(path.parent, lambda: "No report was written."):
        if format == "png":
            if draw_figure(contents, path) is None:
                remedy = 'Install it: pip install "trl-drgrpo[report]".'
                raise InputError("format", "png without matplotlib", "matplotlib", remedy)
            return path
        if format == "json":
            report = json.dumps(contents, ensure_ascii=True, allow_nan=False, indent=1) + "\n"
        elif format == "md":
            picture = None
            if not is_stream(path):
                picture = draw_figure(contents, path.with_suffix(".png"))
            report = markdown_page(contents, picture)
        else:
            report = html_page(contents)
        # Replaced whole, since the page may be open.
        write_whole(path, report)
    return path


def default_output(run_dirs: Sequence[str | Path], format: str) -> Path:
    """Return the default path of a report, which ends in `format`.

    One run's is in its `_drgrpo` folder, or in the run's folder if it has none; that of several runs is in the current
    folder.
    """
    name = f"report.{format}"
    if len(run_dirs) != 1:
        return Path(name)
    folder = Path(run_dirs[0])
    if (folder / LOG_FOLDER).is_dir():
        folder /= LOG_FOLDER
    return folder / name


HOST = "127.0.0.1"
# Files in the folder of a run that a report is made from.
_READ = (
    "*.json*",
    f"{LOG_FOLDER}/*.json*",
    f"{LOG_FOLDER}/evaluations/*.json",
    "checkpoint-*/trainer_state.json",
    "completions/*.parquet",
)


class FollowServer(ThreadingHTTPServer):
    """Serves the page over some runs as they are now, on the loopback address.

    Args:
        run_dirs (`Sequence[str | Path]`): Output folders of runs.
        max_groups (`int`, *optional*): Show at most so many groups of completions per run.
        port (`int`, *optional*, defaults to `0`): Of this machine; 0: a free one.

    Raises:
        [`InputError`]: A folder is no run, or the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, run_dirs: Sequence[str | Path], max_groups: int | None = None, port: int = 0):
        self._folders = list(map(Path, run_dirs))
        self._max_groups = max_groups
        self._lock = threading.Lock()
        self._version = ""
        self._page = b""
        self.now()
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            remedy = "Choose another one; 0 picks a free one."
            got = f"{port} ({getattr(error, 'strerror', None) or error})"
            raise InputError("port", got, "a free port, 0 to 65535", remedy) from error

    def now(self) -> tuple[str, bytes]:
        """Return version and page. Two versions are the same if no file of the runs has changed."""
        # Two open tabs must not read the runs twice at once.
        with self._lock:
            # States come before the contents: what is written while they are read makes another version next time.
            states = [tuple(file_states(folder, _READ)) for folder in self._folders]
            version = f'"{hash(tuple(states)):x}"'
            if version != self._version:
                contents = report_contents(read_runs(self._folders), self._max_groups)
                page = html_page(contents, version)
                self._version = version
                self._page = page.encode("utf-8", errors="backslashreplace")
            return self._version, self._page

    def handle_error(self, request: Any, client_address: object) -> None:
        """Report errors of a request, except that the browser went away."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{HOST}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = cast(FollowServer, self.server)
        # Any port will do: `ssh -L` forwards from another one.
        host = self.headers.get("Host", "").rsplit(":", 1)[0]
        if host not in (HOST, "localhost"):
            self._answer(403, b"Only this machine is served.")
        elif self.path.split("?")[0] != "/":
            self._answer(404, b"There is only one page, /.")
        else:
            # The folder may have been deleted or replaced meanwhile.
            try:
                version, page = server.now()
            except InputError as error:
                self._answer(503, str(error).encode("utf-8", errors="backslashreplace"))
                return
            if self.headers.get("If-None-Match") == version:
                self._answer(304, b"", version)
            else:
                self._answer(200, page, version)

    def _answer(self, status: int, body: bytes, version: str | None = None) -> None:
        kind = "html" if status == 200 else "plain"
        self.send_response(status)
        self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
        # 304, "not modified", has no body, and would claim the page to be empty.
        if status != 304:
            self.send_header("Content-Length", str(len(body)))
        # Completions stay out of the browser's disk cache.
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if version is not None:
            self.send_header("ETag", version)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, as a page that asks every few seconds would fill the terminal."""
