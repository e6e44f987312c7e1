"""GGUF files beside transformers' reader of them.

gguf_transformers.py make DIR TOKENIZER.json: DIR/ARCH.gguf of each architecture that transformers
reads, small and random, every tensor of another type; DIR/ids.json, a prompt.
gguf_transformers.py check DIR: the log-probabilities of the prompt that a server of each file gave,
DIR/ARCH.json, are those of transformers; so are those of the folder that was saved of it, DIR/ARCH,
which transformers opens with its tokenizer.
"""
import json
import os
import pathlib
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
import gguf
import numpy as np

TYPES = ["Q4_1", "Q8_0", "F16", "Q5_0", "Q4_K", "Q4_0", "Q6_K", "BF16", "Q5_1", "Q5_K", "F32"]
SCALES = {"Q4_K": [(0, 6e-5), (2, 4e-4)], "Q5_K": [(0, 3e-5), (2, 4e-4)], "Q6_K": [(208, 1e-5)]}
IDS = [50, 53, 10, 51, 48, 28, 257, 100, 3, 271, 60, 61, 62, 200, 199, 8]


def tensor(rng, shape, name):
    kind = gguf.GGMLQuantizationType[name]
    if name not in SCALES:
        return gguf.quants.quantize(rng.normal(0, 0.05, shape).astype(np.float32), kind), kind
    values, size = gguf.GGML_QUANT_SIZES[kind]  # the package does not quantise these
    blocks = rng.integers(0, 256, (shape[0], shape[1] // values, size)).astype(np.uint8)
    for at, scale in SCALES[name]:
        blocks[..., at:at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks.reshape(shape[0], -1), kind


def make(root, arch, tokens, rng):
    gemma, hidden, layers, heads = arch.startswith("gemma"), 256, 2, 4
    dim = 256 if gemma else 128 if arch == "qwen3" else hidden // heads
    w = gguf.GGUFWriter(root / f"{arch}.gguf", arch)
    w.add_context_length(128)
    w.add_vocab_size(len(tokens))
    w.add_embedding_length(hidden)
    w.add_block_count(layers)
    w.add_feed_forward_length(512)
    w.add_head_count(heads)
    w.add_head_count_kv(2)
    w.add_rope_freq_base(5e5)
    w.add_layer_norm_rms_eps(1e-5)
    if dim != hidden // heads:
        w.add_key_length(dim)
        w.add_value_length(dim)
    else:
        w.add_rope_dimension_count(dim)
    if gemma:
        w.add_sliding_window(8)
    if arch == "gemma2":
        w.add_attn_logit_softcapping(50.0)
        w.add_final_logit_softcapping(30.0)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types([3 if t.startswith("<|") else 1 for t in tokens])
    w.add_token_merges(["1 2"])
    w.add_bos_token_id(257)
    w.add_eos_token_id(256)
    kinds = iter(TYPES * 5)

    def put(name, *shape, kind=None):
        if len(shape) == 1:
            data = rng.normal(1, 0.1, shape).astype(np.float32)
            w.add_tensor(name, data)
        else:
            data, kind = tensor(rng, shape, kind or next(kinds))
            w.add_tensor(name, data, raw_dtype=kind)

    put("token_embd.weight", len(tokens), hidden, kind="Q8_0")
    put("output_norm.weight", hidden)
    if not gemma:
        put("output.weight", len(tokens), hidden)
    for i in range(layers):
        for name in ["attn_norm", "ffn_norm"] + gemma * ["post_attention_norm", "post_ffw_norm"]:
            put(f"blk.{i}.{name}.weight", hidden)
        if arch in ("qwen3", "gemma3"):
            put(f"blk.{i}.attn_q_norm.weight", dim)
            put(f"blk.{i}.attn_k_norm.weight", dim)
        for name, rows in (("attn_q", heads * dim), ("attn_k", 2 * dim), ("attn_v", 2 * dim)):
            put(f"blk.{i}.{name}.weight", rows, hidden)
            if arch == "qwen2":
                put(f"blk.{i}.{name}.bias", rows)
        put(f"blk.{i}.attn_output.weight", hidden, heads * dim)
        put(f"blk.{i}.ffn_gate.weight", 512, hidden)
        put(f"blk.{i}.ffn_up.weight", 512, hidden)
        put(f"blk.{i}.ffn_down.weight", hidden, 512)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def logprobs(torch, model):
    with torch.no_grad():
        all_of = torch.log_softmax(model.eval()(torch.tensor([IDS])).logits[0], -1)
    return [all_of[i, IDS[i + 1]].item() for i in range(len(IDS) - 1)]


def check(root, arch):
    import torch
    import transformers

    served = json.loads((root / f"{arch}.json").read_text())["choices"][0]["prompt_logprobs"][1:]
    served = [next(iter(entry.values()))["logprob"] for entry in served]
    load = transformers.AutoModelForCausalLM.from_pretrained
    how = dict(dtype=torch.float32, attn_implementation="eager")
    most = {}
    for name, model in (("the file", load(root, gguf_file=f"{arch}.gguf", **how)),
                        ("the folder", load(root / arch, **how))):
        of = logprobs(torch, model)
        most[name] = max(abs(x - y) for x, y in zip(of, served))
    print(arch, most, flush=True)
    assert max(most.values()) < 1e-5, arch
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / arch)
    assert tokenizer.decode(tokenizer.encode("12+34=")) == "12+34=", arch
    assert tokenizer.eos_token == "<|endoftext|>", tokenizer.eos_token


archs = ["llama", "qwen2", "qwen3", "gemma2", "gemma3"]
folder = pathlib.Path(sys.argv[2])
if sys.argv[1] == "make":
    tokenizer = json.loads(pathlib.Path(sys.argv[3]).read_text())
    tokens = list(tokenizer["model"]["vocab"]) + [t["content"] for t in tokenizer["added_tokens"]] + ["12"]
    for seed, arch in enumerate(archs):
        make(folder, arch, tokens, np.random.default_rng(seed))
    (folder / "ids.json").write_text(json.dumps(IDS))
else:
    for arch in archs:
        check(folder, arch)
