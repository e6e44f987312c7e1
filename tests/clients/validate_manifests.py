"""Every document of a file of Kubernetes manifests against the API's own schema, strictly:
validate_manifests.py FILE VERSION. Prints what is wrong; the exit status says whether anything is."""

import sys

import kubernetes_validate
import yaml

path, version = sys.argv[1:]
wrong = 0
with open(path) as file:
    for document in yaml.safe_load_all(file):
        name = "%s %s" % (document["kind"], document["metadata"]["name"])
        try:
            kubernetes_validate.validate(document, version, strict=True)
            print("%s: valid in Kubernetes %s" % (name, version))
        except kubernetes_validate.ValidationError as error:
            print("%s: %s at %s" % (name, error.message, error.path))
            wrong += 1
sys.exit(wrong != 0)
