"""commonweight.Bridge of a running server, by nothing but Python's own library: what it refuses, in words.
usage: bridge_module.py BRIDGE_FILE, with libcommonweight-bridge beside the cw-infer-server on the PATH."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "python"))
import commonweight


def refused(kind, words, of):
    try:
        of()
    except kind as error:
        assert words in str(error), error
        return
    raise AssertionError(f"not refused: {words}")


bridge = commonweight.Bridge(sys.argv[1])
assert bridge.roles() == ["policy"], bridge.roles()
assert "model.norm.weight" in bridge.tensors(view=lambda t: t.bytes)
refused(KeyError, "shares no 'draft', but policy", lambda: bridge.tensors("draft"))
assert bridge.version() == 2
with bridge.lease():
    with bridge.lease():
        pass
    with bridge.publish():  # the outer lease is there still
        pass
assert bridge.version() == 4
refused(RuntimeError, "lease", lambda: bridge.publish().__enter__())
bridge.close()
bridge.close()
for method in (bridge.roles, bridge.tensors, bridge.version, bridge.socket, bridge.model, bridge.check):
    refused(RuntimeError, "this bridge is closed", method)
print("bridge_module: PASS")
