"""Container files without an engine: check_containers.py PACKAGING BIN. What they copy, mount and name must
be there, and options must be those of the programs in BIN. Prints what is wrong."""

import pathlib
import re
import subprocess
import sys

import yaml

packaging, programs = map(pathlib.Path, sys.argv[1:])
tree = pathlib.Path(__file__).parents[2]
wrong = []


def want(truth, sentence):
    if not truth:
        wrong.append(sentence)


def check_command(where, words):
    program = words[0]
    if program == "cp":
        return
    want((programs / program).exists(), f"{where}: no program {program}")
    commands = words[1:2] if words[1:] and not words[1].startswith("-") else []
    said = subprocess.run([programs / program, *commands, "--help-all"], check=True, capture_output=True, text=True)
    for word in words[1 + len(commands):]:
        option = word.split("=")[0]
        known = re.search(r"^  --(\[no-\])?" + option[2:] + r"\s", said.stdout + "  --help \n", re.M)
        want(known, f"{where}: {program} has no option {option}")


# ---- the Dockerfile -----------------------------------------------------------------------------
text = re.sub(r"\\\n", " ", (packaging / "Dockerfile").read_text())
stages, built = [], ""
for line in filter(None, map(str.strip, text.split("\n"))):
    word, _, rest = line.partition(" ")
    if word == "FROM":
        stages.append(rest.split(" AS ")[-1])
    elif word == "COPY" and rest.startswith("--from="):
        stage, source, _ = rest.removeprefix("--from=").split()
        want(stage in stages, f"Dockerfile: COPY from {stage}, which is no stage before it")
        want(source.startswith("/wheel/") and source.split("/")[2] in built, f"Dockerfile: nothing makes {source}")
    elif word == "COPY":
        want((tree / rest.split()[0]).exists(), f"Dockerfile: COPY of {rest}: not in the tree")
    elif word == "RUN":
        built += rest + (" commonweight" if "make wheel" in rest else "")
        for path in re.findall(r"\b(?:tools|packaging)/[\w-]+", rest):
            want((tree / path).exists(), f"Dockerfile: {path} is not in the tree")
        for target in re.findall(r"&& make (\w+)", rest):
            want(re.search(rf"^{target}:", (tree / "Makefile").read_text(), re.M), f"Dockerfile: no target {target}")
    elif word == "CMD":
        check_command("Dockerfile", yaml.safe_load(rest))
    else:
        want(word.startswith("#") or word in ("ARG", "ENV", "USER"), f"Dockerfile: {word} is not known")
arguments = set(re.findall(r"^ARG (\w+)=", text, re.M))

# ---- compose ------------------------------------------------------------------------------------
files = [yaml.safe_load((packaging / name).read_text()) for name in ("compose.yaml", "compose.cuda.yaml")]
base, cuda = files
services = base["services"]
want(set(cuda["services"]) <= set(services), "compose.cuda.yaml has a service that compose.yaml has not")
for file in files:
    for name, service in file["services"].items():
        build = service.get("build", {})
        if "dockerfile" in build:
            want((tree / build["dockerfile"]).exists(), f"{name}: no {build['dockerfile']}")
        want(set(build.get("args", {})) <= arguments, f"{name}: an argument that the Dockerfile has not")
for name, service in services.items():
    if "command" in service:
        check_command(name, service["command"])
    if "healthcheck" in service:
        check_command(name, service["healthcheck"]["test"][1:])
    for volume in service.get("volumes", []):
        source = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":")[0]
        want(source.startswith("./") or source in base["volumes"], f"{name}: no volume {source}")
    for secret in service.get("secrets", []):
        want(secret in base["secrets"], f"{name}: no secret {secret}")
    for config in service.get("configs", []):
        want(config["source"] in base["configs"], f"{name}: no config {config['source']}")
    for other in [*service.get("depends_on", {}), *re.findall(r"service:(\w+)", f"{service.get('ipc')} {service.get('pid')}")]:
        want(other in services, f"{name}: no service {other}")
configs = {name: yaml.safe_load(config["content"]) for name, config in base["configs"].items()}
target = configs["prometheus"]["scrape_configs"][0]["static_configs"][0]["targets"][0]
listen = [word for word in services["server"]["command"] if word.startswith("--listen=")][0]
want(target == "server:" + listen.split(":")[-1], f"Prometheus asks {target}, the server has {listen}")
want(configs["datasource"]["datasources"][0]["url"].split("//")[1].split(":")[0] in services, "no such datasource")
print("\n".join(wrong) or "container files: PASS")
sys.exit(bool(wrong))
