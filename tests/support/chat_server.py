"""A chat server on the loopback interface that answers as it is told to, well or badly."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def chat(text, prompt_tokens=100, completion_tokens=10, finish_reason="stop"):
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    message = {"role": "assistant", "content": text}
    return json.dumps({"choices": [{"message": message, "finish_reason": finish_reason}], "usage": usage}).encode()


class Server:
    """Answers by `behave(number_of_request, body) -> (status, headers, body) | callable(handler)`."""

    def __init__(self, behave=lambda number, body: (200, {}, chat("Score: 10"))):
        self.behave, self.requests, self.times = behave, [], []
        self.under_way = self.most_under_way = 0
        self.lock, self.released = threading.Lock(), threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    number = len(server.requests)
                    server.requests.append((self.path, dict(self.headers), body))
                    server.times.append(time.monotonic())
                    server.under_way += 1
                    server.most_under_way = max(server.most_under_way, server.under_way)
                try:
                    reply = server.behave(number, body)
                    if callable(reply):
                        self.close_connection = True
                        reply(self)
                    else:
                        self.say(*reply)
                except OSError:
                    self.close_connection = True  # the client has given up
                finally:
                    with server.lock:
                        server.under_way -= 1

            def say(self, status, headers, content):
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                pass

        class Threads(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False  # a handler that hangs is no reason to wait
            request_queue_size = 64

        self.http = Threads(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.released.set()
        self.http.shutdown()
        self.http.server_close()
