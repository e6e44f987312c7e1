"""Reads /metrics with Prometheus' own parser for Python. parse_metrics.py BASE_URL"""
import sys
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

text = urllib.request.urlopen(sys.argv[1] + "/metrics").read().decode()
families = list(text_string_to_metric_families(text))
assert len({f.name for f in families}) == len(families) > 30
for family in families:
    assert family.type != "unknown" and family.documentation and family.samples, family
    assert all("model_name" in s.labels for s in family.samples), family
    if family.type != "histogram":
        continue
    buckets = [s for s in family.samples if s.name.endswith("_bucket")]
    count = next(s.value for s in family.samples if s.name.endswith("_count"))
    bounds = [float(s.labels["le"]) for s in buckets]
    counts = [s.value for s in buckets]
    assert bounds == sorted(set(bounds)) and bounds[-1] == float("inf"), family
    assert counts == sorted(counts) and counts[-1] == count, family
print("ok", len(families))
