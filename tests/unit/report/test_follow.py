"""The page of a run that goes on: its server, and the command."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from report_runs import append_lines, data_of, following, write_run_log

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.report.write import FollowServer


@pytest.fixture
def folder(tmp_path):
    return write_run_log(tmp_path / "run", steps=6, every=3, ended=None)


@pytest.fixture
def server(folder):
    with following(folder) as server:
        yield server


def get(server, path="/", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer.headers


def test_the_page_is_sent_again_only_when_a_file_has_changed(server, folder):
    status, page, headers = get(server)
    assert (status, data_of(page)["runs"][0]["last_step"]) == (200, 6)
    assert "connect-src 'self'" in page
    version = headers["ETag"]
    assert get(server, If_None_Match=version)[:2] == (304, "")
    line = {"step": 7, "time": None, "mode": "train", "logs": {"reward": 0.5}}
    append_lines(folder / "_drgrpo" / "metrics.jsonl", line)
    status, page, headers = get(server, If_None_Match=version)
    assert (status, data_of(page)["runs"][0]["last_step"]) == (200, 7)
    assert headers["ETag"] != version


def test_only_this_machine_and_only_the_page(server):
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, Host="evil.example:80")[0] == 403
    assert get(server, Host="localhost.evil.example")[0] == 403
    assert get(server, Host="localhost:9000")[0] == 200  # forwarded by ssh
    assert get(server, "/../run.json")[0] == 404
    assert get(server, "/_drgrpo/completions.jsonl")[0] == 404
    assert "Access-Control-Allow-Origin" not in get(server)[2]


def test_a_folder_that_is_gone(server, folder):
    folder.rename(folder.with_name("elsewhere"))
    status, text, _ = get(server)
    assert status == 503
    assert "got nothing there" in text


def test_a_browser_that_goes_away_is_nothing_to_tell(server, capfd):
    server.now = lambda: ('"1"', bytes(1 << 24))  # more than the buffers of a socket
    handled = threading.Event()
    server.shutdown_request = lambda request, close=server.shutdown_request: (close(request), handled.set())
    with socket.create_connection(("127.0.0.1", server.server_port)) as browser:
        browser.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        browser.recv(1)
    assert handled.wait(30)
    assert capfd.readouterr().err == ""
    try:
        raise KeyError("a fault of ours")
    except KeyError:
        server.handle_error(None, ("127.0.0.1", 1))
    assert "a fault of ours" in capfd.readouterr().err


def test_bad_input(folder, server, ran):
    with pytest.raises(InputError, match="port: got .*expected a free port"):
        FollowServer([folder], port=server.server_port)
    for arguments, message in (
        (["--port", "99999", "--follow"], "port: got 99999"),
        (["--port", "0"], "--port: got 0; expected --follow with it"),
        (["--follow", "--output", "x.html"], "--output: got 'x.html'; expected nothing with --follow"),
        (["--follow", "--format", "md"], "--format: got 'md'"),
    ):
        assert message in ran(["report", str(folder), *arguments], 2).err


def test_the_command_ends_with_ctrl_c(folder):
    command = [sys.executable, "-m", "trl_drgrpo", "report", "--follow", str(folder)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    ) as process:
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:")
            process.send_signal(signal.SIGINT)
            _, log = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert log.strip() == "interrupted"
