#!/usr/bin/env python3
# What transformers makes of every field of the configs of ../*: make_configs.py [FOLDER ...]
# Without a FOLDER that is configs.txt; of one, what stands there behind its first lines.
#
# First come lines "+ KEY=VALUE [KEY=VALUE]", changes that are made of every folder's config.json. Then each folder,
# "[NAME] SUMS", what it computes as it is; its own fields, "KEY VALUE:OUTCOME [VALUE:OUTCOME ...]", each value a change
# by itself; and "+ OUTCOME ...", of the changes above in their order.
#
# Dots of a KEY lead into objects. A VALUE is JSON without spaces, or "-" where the key is taken out. An OUTCOME is "=",
# the same logits as the folder's, "x", refused or made with weights that the folder does not hold, or SUMS: two sums of
# the logits with signs (generated.py, of "signs/logits"), divided by the norm of the folder's own logits.
import copy, json, os, sys, tempfile, warnings
import torch
import transformers

here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(here))
import generated

transformers.logging.set_verbosity(transformers.logging.CRITICAL)
transformers.logging.disable_progress_bar()
warnings.simplefilter("ignore")
torch.set_num_threads(1)
T = 24
FOLDERS = """llama3 llama-yarn mistral qwen2 qwen2-window qwen3 qwen2-moe qwen3-moe qwen3-moe-some qwen35 mixtral gemma
gemma2 gemma3 phi phi3 phi3-longrope olmo2 olmo3 smollm3 starcoder2 gpt-oss deepseek-v2-lite deepseek-v2 deepseek-v3
glm4-moe-lite seed-oss olmoe granite ministral3 exaone4 hunyuan-dense cohere2 glm4-moe minimax-m2 qwen3-next
qwen35-moe lfm2 lfm2-bias gemma4 gemma4-shared gemma4-moe nemotron-h nemotron-h-moe nemotron-h-latent""".split()

# What a config may say beside what a folder's says, older spellings and other families' fields among them.
ROPES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "linear"},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic"},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
    {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "longrope", "short_factor": [1.5] * 4, "long_factor": [2.5] * 4, "factor": 2.0,
     "original_max_position_embeddings": 128},
    {"rope_type": "su", "short_factor": [1.5] * 4, "long_factor": [2.5] * 4, "factor": 2.0},
    {"rope_type": "yarn", "short_factor": [1.5] * 4, "long_factor": [2.5] * 4},
    {"rope_type": "proportional", "factor": 2.0},
    {"rope_type": "mystery", "factor": 2.0},
]
EXTRA = {
    "rope_theta": [5000.0],
    "partial_rotary_factor": [0.5],
    "original_max_position_embeddings": [64],
    "sliding_window": [5, None],
    "use_sliding_window": [True],
    "max_window_layers": [0, 1],
    "sliding_window_pattern": [2],
    "_sliding_window_pattern": [2],
    "hidden_act": ["gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "swish", "relu", "quick_gelu"],
    "hidden_activation": ["gelu", "gelu_pytorch_tanh", "silu", "relu"],
    "attention_bias": [True],
    "qkv_bias": [False],
    "mlp_bias": [True],
    "use_bias": [False],
    "head_dim": [8, 16, 32],
    "is_causal": [False],
    "use_bidirectional_attention": [True],
    "attn_logit_softcapping": [2.0, None],
    "final_logit_softcapping": [2.0, None],
    "query_pre_attn_scalar": [7],
    "qk_layernorm": [True],
    "rms_norm_eps": [0.02],
    "layer_norm_eps": [0.02],
    "norm_epsilon": [0.02],
    "num_experts": [2, 16],
    "num_local_experts": [2, 16],
    "norm_topk_prob": [True, False],
    "attn_output_gate": [False],
    "rope_interleave": [False],
    "no_rope_layer_interval": [2],
    "no_rope_layers": [[0, 1, 0, 1, 0, 1]],
    "rope_local_base_freq": [500.0],
    "scoring_func": ["softmax", "sigmoid"],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "moe_layer_freq": [2],
    "swiglu_alpha": [1.2],
    "swiglu_limit": [0.2],
    "routed_scaling_factor": [2.0],
    "mlp_only_layers": [[0], [1], None],
    "layer_types": [["sliding_attention"] * n for n in (2, 3, 4)],
    "torch_dtype": ["bfloat16"],
    "num_nextn_predict_layers": [0, 1],
    "decoder_sparse_step": [2],
    "is_decoder": [True],
    "clip_qkv": [0.05],
    "residual_multiplier": [0.5],
    "logits_scaling": [2.0],
    "embedding_multiplier": [2.0],
    "attention_multiplier": [0.5],
    "scale_attn_by_inverse_layer_idx": [True],
}
# Fields that mean something together.
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
TOGETHER = [
    WINDOW,
    WINDOW | {"max_window_layers": 1},
    WINDOW | {"max_window_layers": 1, "layer_types": None},
    WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    WINDOW | {"layer_types": None, "sliding_window_pattern": 2},
    {"hidden_act": "-", "hidden_activation": "-"},
    {"rope_parameters": "-", "rope_theta": 5000.0},
    {"rope_parameters": "-", "rope_theta": 5000.0, "rope_local_base_freq": 500.0},
    {"rope_parameters": "-", "rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": "-", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
    {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}},
    {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
    {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
]
# Fields of every config that say nothing of the logits and whose wrong values say nothing of a model.
SKIPPED = {"transformers_version", "quantization_config", "use_cache", "initializer_range", "output_router_logits",
           "pretraining_tp", "pad_token_id", "chunk_size"}
WORDS = {"hidden_act": [], "hidden_activation": [], "model_type": ["llama", "qwen3"], "architectures": [["OtherModel"]],
         "rope_type": ["linear", "default"], "dtype": ["bfloat16"]}


def extras():
    ret = [{key: x} for key, values in EXTRA.items() for x in values]
    for rope in ROPES:
        older = {"type" if k == "rope_type" else k: v for k, v in rope.items()}
        ret += [{"rope_parameters": rope}, {"rope_scaling": rope}, {"rope_parameters": "-", "rope_scaling": older}]
    return ret + [{"rope_scaling": None}, {"rope_scaling": {}}] + TOGETHER


# Other values of a field that has this one.
def others(key, value, n_layers):
    if key in WORDS:
        return WORDS[key]
    if key == "layer_types":
        return [value[::-1], value[:-1], ["full_attention"] * n_layers, ["sliding_attention"] * n_layers,
                ["chunked_attention"] * n_layers]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        if key.endswith("token_id"):
            return [value + 1]
        return sorted({value + 1, value * 2, max(value // 2, 1), 0} - {value})
    if isinstance(value, float):
        return [0.02] if "eps" in key else [value * 2, value / 2 if value else 0.5]
    if isinstance(value, list):
        return [value[::-1], value[:-1]] if len(value) > 1 else [[0]]
    return []


# Of every field, those within objects too: (name, its other values).
def fields(config, n_layers, path=""):
    for key, value in config.items():
        if key in SKIPPED:
            continue
        yield path + key, ["-", None] + others(key, value, n_layers)
        if isinstance(value, dict):
            yield from fields(value, n_layers, path + key + ".")


def text_of(value):
    return "-" if value == "-" else json.dumps(value, separators=(",", ":"))


def changed(config, change):
    config = copy.deepcopy(config)
    for key, value in change.items():
        *path, last = key.split(".")
        at = config
        for name in path:
            at = at[name]
        if value == "-":
            at.pop(last, None)
        else:
            at[last] = value
    return config


def logits(folder, config):
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f)
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
        if info["missing_keys"] or info["mismatched_keys"]:
            return None
        ids = [[(i * i * 29 + i * 7 + 3) % model.config.get_text_config().vocab_size for i in range(T)]]
        with torch.no_grad():
            out = model(torch.tensor(ids), use_cache=False).logits[0].double().numpy()
        return out if (out == out).all() else None
    except Exception as e:
        if os.environ.get("WHY"):
            print(type(e).__name__, str(e)[:300].replace("\n", " "), file=sys.stderr)
        return None


def one_folder(name):
    source = os.path.join(os.path.dirname(here), name)
    with tempfile.TemporaryDirectory() as folder:
        made = None
        if os.path.exists(os.path.join(source, "weights.txt")):
            made = generated.model_folder(source)
        for file in os.listdir(made.name if made else source):
            if file.endswith(".safetensors") and not file.startswith("golden"):
                os.symlink(os.path.join(made.name if made else source, file), os.path.join(folder, file))
        with open(os.path.join(source, "config.json")) as f:
            config = json.load(f)
        base = logits(folder, config)
        norm = (base**2).sum() ** 0.5

        def numbers(x):
            return "%.6f,%.6f" % tuple(generated.projected("logits", x)[:2] / norm)

        def outcome(change):
            have = logits(folder, changed(config, change))
            if have is None or have.shape != base.shape:
                return "x"
            if (have == base).all():
                return "="
            if ((have - base) ** 2).sum() ** 0.5 < 1e-4 * norm:
                print(name, change, "changes too little to be seen", file=sys.stderr)
            return numbers(have)

        print(f"[{name}] {numbers(base)}")
        for key, values in fields(config, config.get("num_hidden_layers") or len(config["layers_block_type"])):
            print(key, *[f"{text_of(value)}:{outcome({key: value})}" for value in values])
        print("+", *[outcome(change) for change in extras()], flush=True)


for change in extras():
    print("+", *[f"{key}={text_of(value)}" for key, value in change.items()])
for name in sys.argv[1:] or FOLDERS:
    one_folder(name)
