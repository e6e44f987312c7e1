# Numbers that NumPy and C make alike (tests/support/generated.c): weights, so that folders of reference values need
# not keep them, and the signs of projections, which stand for whole gradients. See README.md.
import json, os, tempfile
import numpy as np
import safetensors.numpy

SIGNS = 8  # projections of a tensor
WHOLE = {"olmo2", "deepseek-v2", "qwen35", "olmo2-r2", "deepseek-v2-r3"}  # folders that keep every gradient and parameter


# 64 bits for each of 0..n-1: splitmix64 from a state that is FNV-1a of the text.
def bits(text, n):
    state = 0xCBF29CE484222325
    for byte in text.encode():
        state = (state ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    with np.errstate(over="ignore"):
        z = np.uint64(state) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


# Four 16-bit numbers added up are near enough to a normal distribution, and exact in a double.
def normal(text, n, mean, deviation):
    z = bits(text, n)
    parts = [(z >> np.uint64(16 * i) & np.uint64(0xFFFF)).astype(np.int64) for i in range(4)]
    scale = np.float32(deviation / 37837.2268)
    return (mean + (sum(parts) - 131070).astype(np.float64) * np.float64(scale)).astype(np.float32)


def octets(text, n, low, high):
    return (low + ((bits(text, n) >> np.uint64(32)) * np.uint64(high - low + 1) >> np.uint64(32))).astype(np.uint8)


# NumPy has no such type: a tensor of torch.
def e4m3(text, n, mean, deviation):
    import torch
    return torch.from_numpy(normal(text, n, mean, deviation)).to(torch.float8_e4m3fn)


# What a list of (name, kind, a, b, shape, text) describes: "f32", normal with mean a and deviation b, "e4m3", the same
# rounded to it, or "u8", from a to b. Text is what the bits are of: seed/name, unless the tensor is another model's.
def entry(seed, name, kind, a, b, shape, text=None):
    return name, kind, a, b, list(shape), text or f"{seed}/{name}"


def tensors(recipe):
    make = {"f32": normal, "e4m3": e4m3, "u8": octets}
    return {n: make[kind](text, int(np.prod(shape)), a, b).reshape(shape) for n, kind, a, b, shape, text in recipe}


# weights.txt: the file to be made and its seed, and a tensor a line.
def write_recipe(folder, file, seed, recipe):
    with open(os.path.join(folder, "weights.txt"), "w") as f:
        print(file, seed, file=f)
        for name, kind, a, b, shape, text in recipe:
            print(name, kind, a, b, *shape, *([] if text == f"{seed}/{name}" else ["=" + text]), file=f)


def read_recipe(folder):
    with open(os.path.join(folder, "weights.txt")) as f:
        file, seed = f.readline().split()
        lines = [line.split("=") for line in f]
    number, ret = {"f32": float, "e4m3": float, "u8": int}, []
    for line, *text in lines:
        name, kind, a, b, *shape = line.split()
        ret.append(entry(seed, name, kind, number[kind](a), number[kind](b), map(int, shape), *map(str.strip, text)))
    return file, ret


# The folder with its weights made, for programs that read models: a temporary one with a name to use.
def model_folder(folder):
    made = tempfile.TemporaryDirectory()
    for name in os.listdir(folder):
        if name.endswith(".json"):
            os.symlink(os.path.abspath(os.path.join(folder, name)), os.path.join(made.name, name))
    file, recipe = read_recipe(folder)
    write_tensors(tensors(recipe), os.path.join(made.name, file))
    return made


def write_tensors(made, path):
    if all(isinstance(x, np.ndarray) for x in made.values()):
        return safetensors.numpy.save_file(made, path, metadata={"format": "pt"})
    import torch
    from safetensors.torch import save_file
    save_file({n: torch.as_tensor(x) for n, x in made.items()}, path, metadata={"format": "pt"})


# The tensor's sums with eight lists of signs, one a bit, and its norm.
def projected(name, x):
    x = np.asarray(x, dtype=np.float64).ravel()
    z = bits("signs/" + name, x.size)
    sums = [np.where(z >> np.uint64(j) & np.uint64(1), -x, x).sum() for j in range(SIGNS)]
    return np.array([*sums, np.sqrt((x * x).sum())], dtype=np.float32)


# What golden.safetensors keeps of gradients and of parameters after three steps (name: array), and the largest
# entry of all gradients, which tolerances are relative to.
def kept(folder, grads, after3):
    if os.path.basename(folder) in WHOLE:
        return {"grad." + n: x for n, x in grads.items()} | {"after3." + n: x for n, x in after3.items()}
    both = {"projected." + n: np.stack([projected(n, grads.get(n, 0 * x)), projected(n, x)]) for n, x in after3.items()}
    return both | {"grad_largest": np.array([max(np.abs(x).max() for x in grads.values())], dtype=np.float32)}
