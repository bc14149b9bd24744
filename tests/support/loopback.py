"""What the servers of the tests have in common: HTTP on the loopback interface, a thread per connection, no log."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Reads a request's body and writes an answer; `self.server.serving` is the `Loopback` that it answers for."""

    protocol_version = "HTTP/1.1"

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def say(self, status, headers, content):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args):
        """Nothing on stderr."""


class _Threads(ThreadingHTTPServer):
    request_queue_size = 64


class Loopback:
    """Serves by `handler` from its construction until `close`, or until its `with` block ends."""

    handler = Handler

    def __init__(self):
        self.http = _Threads(("127.0.0.1", 0), self.handler)
        self.http.serving = self  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()
