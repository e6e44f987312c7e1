# Tensors that transformers' Trainer, and so TRL, does not decay, for tests/unit/test_schedule.c:
# python3 make_decayed.py > not_decayed.txt. Needs torch and transformers (5).
import pathlib
from transformers import AutoConfig, AutoModelForCausalLM, Trainer

print("# Made by make_decayed.py: a golden model, and its tensors without weight decay")
for folder in sorted(pathlib.Path(__file__).parent.parent.glob("*/config.json")):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder.parent))
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    names = [name for name, _ in model.named_parameters() if name not in decayed]
    print(folder.parent.name, *sorted(names))
