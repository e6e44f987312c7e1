"""Commonweight from Python: its programs, and the weights that a running server shares.

    import commonweight
    with commonweight.serve(model="tools/demo-model", device="cpu") as server:
        with commonweight.Bridge(server.bridge) as bridge, bridge.lease():
            weights = bridge.tensors()                # name -> torch tensor over the server's memory
            with bridge.publish():                    # generation stands still in here
                weights["model.norm.weight"].mul_(1)
        commonweight.train(bridge=server.bridge, data="train.jsonl", reward="exact", max_steps=20)

docs/use/python.md is its page. The programs themselves need no Python.
"""

import contextlib
import ctypes
import glob
import http.client
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time

BIN = pathlib.Path(__file__).parent / "bin"  # in a wheel; elsewhere programs are looked for on the PATH


# ---- programs -----------------------------------------------------------------------------------


def program(name):
    """The path of cw-NAME."""
    path = shutil.which(name, path=os.pathsep.join([str(BIN), os.environ.get("PATH", "")]))
    if not path:
        raise FileNotFoundError(f"{name} is neither in {BIN} nor on the PATH")
    return path


def environment():
    """Libraries of CUDA that pip installed are found, behind those of LD_LIBRARY_PATH."""
    here = pathlib.Path(__file__).parents[1]
    folders = [os.environ.get("LD_LIBRARY_PATH", ""), *sorted(glob.glob(f"{here}/nvidia/*/lib"))]
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders))}


def options(values):
    """max_steps=5 is --max-steps 5, resume=True is --resume, None and False are left out."""
    words = []
    for name, value in values.items():
        if value is not None and value is not False:
            words += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    return words


def main():
    """The console scripts: each becomes the program of its name."""
    path = str(BIN / os.path.basename(sys.argv[0]))
    os.execve(path, [path, *sys.argv[1:]], environment())


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path, timeout=60):
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def request(path, endpoint, body=None, timeout=60):
    """What a server's socket answers, parsed: GET, or with a body POST. An error is raised."""
    connection = UnixConnection(path, timeout)
    with contextlib.closing(connection):
        words = json.dumps(body) if body is not None else None
        connection.request("POST" if words else "GET", endpoint, words, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
    if response.status != 200:
        raise RuntimeError(f"{endpoint}: {response.status} {answer}")
    return answer


class Server:
    """A running cw-infer-server: .socket, .bridge, .process; ends with the `with`, or close()."""

    def __init__(self, deadline_s, values):
        self.folder = tempfile.TemporaryDirectory(prefix="commonweight-")
        files = {"socket": f"{self.folder.name}/socket", "bridge": f"{self.folder.name}/bridge.json"}
        values = {**files, **values}
        self.socket, self.bridge = values["socket"], values["bridge"]
        self.process = subprocess.Popen([program("cw-infer-server"), *options(values)], env=environment())
        try:
            self.wait(time.monotonic() + deadline_s, deadline_s)
        except BaseException:
            self.close()
            raise

    def wait(self, end, deadline_s):
        while True:
            with contextlib.suppress(OSError, RuntimeError, http.client.HTTPException, ValueError):
                self.request("/health", timeout=5)
                return
            if self.process.poll() is not None:
                raise RuntimeError(f"cw-infer-server ended with status {self.process.returncode}; its log says why")
            if time.monotonic() > end:
                raise TimeoutError(f"cw-infer-server is not healthy after {deadline_s} s")
            time.sleep(0.05)

    def request(self, endpoint, body=None, timeout=60):
        return request(self.socket, endpoint, body, timeout)

    def close(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def serve(deadline_s=600, **values):
    """Starts cw-infer-server with these options (model="DIR", max_batch=64, ...) and waits until it is
    healthy. Its socket and bridge file lie in a temporary folder unless they are named."""
    return Server(deadline_s, values)


def train(deadline_s=None, **values):
    """Runs cw-trainer train with these options to its end; a failure is raised."""
    subprocess.run([program("cw-trainer"), "train", *options(values)], env=environment(), check=True, timeout=deadline_s)


# ---- the bridge ---------------------------------------------------------------------------------


class Tensor(ctypes.Structure):  # struct cw_bridge_tensor
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


class Times(ctypes.Structure):  # struct cw_bridge_times
    _fields_ = [("wait_ms", ctypes.c_double), ("write_ms", ctypes.c_double), ("total_ms", ctypes.c_double)]


UPDATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


def torch_view(t):
    """A tensor over the memory itself, of the server's device."""
    import torch

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


def numpy_view(t):
    """An array over the memory of a server on the CPU; bf16 as its bits."""
    import numpy

    if t.device >= 0:
        raise RuntimeError(f"{t.name.decode()} is on cuda:{t.device}, where numpy does not reach: torch_view")
    dtype = t.dtype.decode().replace("bfloat16", "uint16")
    return numpy.frombuffer((ctypes.c_char * t.bytes).from_address(t.data), dtype).reshape(t.shape[: t.n_dims])


class Bridge:
    """The server's tensors in this process, and the writer's side of the publish protocol.

    path: the bridge file, or None: searched as every client does. A bridge belongs to one thread at a
    time, and views of its tensors end with it."""

    def __init__(self, path=None, library=None):
        name = "libcommonweight-bridge.so.0"
        server = shutil.which("cw-infer-server")  # a built tree has the library beside it
        folders = [BIN, *([pathlib.Path(server).resolve().parent] if server else [])]
        beside = next((str(f / name) for f in folders if (f / name).exists()), name)
        self.lib = ctypes.CDLL(library or beside)
        for name in ("message", "error_words", "role_at", "socket", "model"):
            getattr(self.lib, "cw_bridge_" + name).restype = ctypes.c_char_p
        self.lib.cw_bridge_version.restype = ctypes.c_uint64
        self.opened, self.leases = ctypes.c_void_p(), 0
        self.call("open", os.fsencode(path) if path else None, ctypes.byref(self.opened))

    @property
    def handle(self):
        if not self.opened:
            raise RuntimeError("this bridge is closed: open another, commonweight.Bridge()")
        return self.opened

    def call(self, name, *arguments):
        code = getattr(self.lib, "cw_bridge_" + name)(*arguments)
        if code:
            words = self.lib.cw_bridge_error_words(code).decode()
            raise RuntimeError(f"{words}: {self.lib.cw_bridge_message().decode()}")

    def roles(self):
        """["policy", ...]"""
        names = []
        while name := self.lib.cw_bridge_role_at(self.handle, len(names)):
            names.append(name.decode())
        return names

    def tensors(self, role="policy", view=torch_view):
        """name -> a view of the shared memory."""
        if role not in self.roles():
            raise KeyError(f"the server shares no {role!r}, but {', '.join(self.roles())}")
        found = {}
        for i in range(self.lib.cw_bridge_tensor_count(self.handle, role.encode())):
            t = Tensor()
            self.call("tensor_at", self.handle, role.encode(), i, ctypes.byref(t))
            found[t.name.decode()] = view(t)
        return found

    def version(self):
        return self.lib.cw_bridge_version(self.handle)

    def socket(self):
        return self.lib.cw_bridge_socket(self.handle).decode()

    def model(self):
        return self.lib.cw_bridge_model(self.handle).decode()

    def check(self):
        """Raises unless the server lives and its weights are whole."""
        self.call("check", self.handle)

    @contextlib.contextmanager
    def lease(self):
        """This process is the writer meanwhile; one at a time. One lease inside another is the same: it
        is given back at the end of the outer one."""
        self.call("take_lease", self.handle)
        self.leases += 1
        try:
            yield self
        finally:
            self.leases -= 1
            if not self.leases:
                self.lib.cw_bridge_give_lease(self.handle)

    @contextlib.contextmanager
    def publish(self, timeout_ms=30000):
        """The server stands still inside, for at most two minutes; afterwards its next token comes from
        what was written. An exception inside means that weights are half written: the server
        restores the last whole ones. Gives the times of this publish, complete after the `with`."""
        times, refused, failed = Times(), [], []
        granted, written = threading.Event(), threading.Event()

        def update(_):
            granted.set()
            written.wait()
            return 1 if failed else 0

        def run():  # the library calls back for the update; here it is the caller's block instead
            try:
                self.call("publish", self.handle, ctypes.c_int64(timeout_ms), UPDATE(update), None, ctypes.byref(times))
            except RuntimeError as error:
                refused.append(error)
            granted.set()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            granted.wait()
            if not refused:
                yield times
                torch = sys.modules.get("torch")
                if torch and torch.cuda.is_initialized():
                    torch.cuda.synchronize()  # all is in memory before the version is even
        except BaseException:
            failed.append(True)
            raise
        finally:
            written.set()
            thread.join()
        if refused:
            raise refused[0]

    def close(self):
        self.lib.cw_bridge_close(self.opened)
        self.opened = ctypes.c_void_p()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def torch_model(bridge):
    """A transformers model whose parameters are the server's own memory: what an optimizer's step()
    writes inside bridge.publish() is served."""
    import transformers

    shared = bridge.tensors()
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(bridge.model()))
    unexpected = model.load_state_dict(shared, strict=False, assign=True).unexpected_keys
    model.tie_weights()
    theirs = {view.data_ptr() for view in shared.values()}
    left = [name for name, p in model.named_parameters() if p.data_ptr() not in theirs]
    if unexpected or left:
        raise RuntimeError(f"not in the model: {unexpected}; not among the server's tensors: {left}")
    return model.to(next(iter(shared.values())).device)  # the buffers; the parameters are there
