"""A chat server on the loopback interface that answers as it is told to, well or badly."""

import json
import threading
import time

from loopback import Handler, Loopback


def chat(text, prompt_tokens=100, completion_tokens=10, finish_reason="stop"):
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    message = {"role": "assistant", "content": text}
    return json.dumps({"choices": [{"message": message, "finish_reason": finish_reason}], "usage": usage}).encode()


class _Handler(Handler):
    def do_POST(self):
        server, body = self.server.serving, json.loads(self.body())
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


class Server(Loopback):
    """Answers by `behave(number_of_request, body) -> (status, headers, body) | callable(handler)`."""

    handler = _Handler

    def __init__(self, behave=lambda number, body: (200, {}, chat("Score: 10"))):
        self.behave, self.requests, self.times = behave, [], []
        self.under_way = self.most_under_way = 0
        self.lock, self.released = threading.Lock(), threading.Event()
        super().__init__()
        self.url += "/v1"

    def close(self):
        self.released.set()
        super().close()
