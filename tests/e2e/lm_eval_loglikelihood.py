"""Log-likelihoods by the client of lm-evaluation-harness: URL, model folder (for its tokenizer),
a file for [[log-likelihood, is_greedy], ...], and pairs of context and continuation."""
import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

url, folder, out, *texts = sys.argv[1:]
model = LocalCompletionsAPI(base_url=url, model=os.path.basename(folder), tokenizer=folder,
                            tokenizer_backend="huggingface", max_length=128, batch_size=4)
pairs = zip(texts[::2], texts[1::2])
requests = [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i)
            for i, pair in enumerate(pairs)]
with open(out, "w") as f:
    json.dump(model.loglikelihood(requests, disable_tqdm=True), f)
