"""Trains the model that a running cw-infer-server serves, from PyTorch, on the server's own weights.

The parameters of a transformers model are made views of the mapped tensors; every optimizer step is
one publish, so the server's next token comes from it. Nothing is copied or sent.

    python train_in_place.py --prompt "27+35=" --completion "99" --steps 30

Needs torch and transformers, and libcommonweight-bridge.so (--library where it is not installed).
bf16 weights are updated in bf16: fine for trying out, too coarse for small learning rates.
"""

import argparse
import ctypes
import http.client
import json
import socket

import torch
import transformers


class Tensor(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("device", ctypes.c_int32),
        ("n_dims", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
    ]


class Times(ctypes.Structure):
    _fields_ = [("wait_ms", ctypes.c_double), ("write_ms", ctypes.c_double), ("total_ms", ctypes.c_double)]


UPDATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Bridge:
    """The server's tensors as torch tensors, and the writer's side of the publish protocol."""

    def __init__(self, path=None, library="libcommonweight-bridge.so.0"):
        self.lib = ctypes.CDLL(library)
        for name in ("message", "error_words", "socket", "model"):
            getattr(self.lib, "cw_bridge_" + name).restype = ctypes.c_char_p
        self.lib.cw_bridge_version.restype = ctypes.c_uint64
        self.handle = ctypes.c_void_p()
        self.call("open", path.encode() if path else None, ctypes.byref(self.handle))

    def call(self, name, *arguments):
        code = getattr(self.lib, "cw_bridge_" + name)(*arguments)
        if code:
            words = self.lib.cw_bridge_error_words(code).decode()
            raise RuntimeError(f"{words}: {self.lib.cw_bridge_message().decode()}")

    def tensors(self, role="policy"):
        """name -> torch tensor over the shared memory."""
        found = {}
        for i in range(self.lib.cw_bridge_tensor_count(self.handle, role.encode())):
            t = Tensor()
            self.call("tensor_at", self.handle, role.encode(), i, ctypes.byref(t))
            found[t.name.decode()] = self.view(t)
        return found

    @staticmethod
    def view(t):
        dtype = getattr(torch, t.dtype.decode())
        if t.device < 0:
            flat = torch.frombuffer((ctypes.c_char * t.bytes).from_address(t.data), dtype=dtype)
        else:  # bytes, for the interface has no word for bf16

            class Memory:
                __cuda_array_interface__ = {
                    "shape": (t.bytes,), "typestr": "|u1", "data": (t.data, False), "version": 3,
                }

            flat = torch.as_tensor(Memory(), device=f"cuda:{t.device}").view(dtype)
        return flat.view(t.shape[: t.n_dims])

    def version(self):
        return self.lib.cw_bridge_version(self.handle)

    def socket(self):
        return self.lib.cw_bridge_socket(self.handle).decode()

    def model(self):
        return self.lib.cw_bridge_model(self.handle).decode()

    def take_lease(self):
        self.call("take_lease", self.handle)

    def publish(self, update, timeout_ms=30000):
        """Runs update() while the server stands still; its exception comes out of here."""
        raised = []

        def run(_):
            try:
                update()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()  # all is in memory before the version is even
                return 0
            except BaseException as e:
                raised.append(e)
                return 1

        times = Times()
        try:
            self.call("publish", self.handle, ctypes.c_int64(timeout_ms), UPDATE(run), None, ctypes.byref(times))
        except RuntimeError:
            if raised:
                raise raised[0]
            raise
        return times

    def close(self):
        self.lib.cw_bridge_close(self.handle)
        self.handle = ctypes.c_void_p()


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=60)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def ask(path, prompt, tokens):
    connection = UnixConnection(path)
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.load(connection.getresponse())
    connection.close()
    if "error" in answer:
        raise RuntimeError(answer["error"]["message"])
    return answer["choices"][0]["text"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bridge", help="bridge file (default: searched)")
    parser.add_argument("--library", default="libcommonweight-bridge.so.0")
    parser.add_argument("--prompt", default="27+35=")
    parser.add_argument("--completion", default="99")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    args = parser.parse_args()

    bridge = Bridge(args.bridge, args.library)
    shared = bridge.tensors()
    tokenizer = transformers.AutoTokenizer.from_pretrained(bridge.model())
    config = transformers.AutoConfig.from_pretrained(bridge.model())
    model = transformers.AutoModelForCausalLM.from_config(config)
    # assign: the parameters become the shared tensors
    missing, unexpected = model.load_state_dict(shared, strict=False, assign=True)
    model.tie_weights()
    theirs = {p.data_ptr() for p in shared.values()}
    left = [name for name, p in model.named_parameters() if p.data_ptr() not in theirs]
    if unexpected or left:
        raise RuntimeError(f"not in the model: {unexpected}; not among the server's tensors: {left}")
    device = next(iter(shared.values())).device
    model.to(device)  # the buffers; the parameters are there

    prompt = tokenizer(args.prompt, return_tensors="pt").input_ids
    completion = tokenizer(args.completion, return_tensors="pt", add_special_tokens=False).input_ids
    ids = torch.cat([prompt, completion], 1).to(device)
    labels = ids.clone()
    labels[:, : prompt.shape[1]] = -100
    n = completion.shape[1]

    print("before:", repr(ask(bridge.socket(), args.prompt, n)), "version", bridge.version())
    bridge.take_lease()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate)
    for step in range(args.steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        times = bridge.publish(optimizer.step)
        print(f"step {step} loss {loss.item():.4f} pause {times.total_ms:.2f} ms version {bridge.version()}")
    print("after:", repr(ask(bridge.socket(), args.prompt, n)), "version", bridge.version())
    bridge.close()


if __name__ == "__main__":
    main()
