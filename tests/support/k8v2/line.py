"""A plugin of pytest that adds the format's line to the registry, before tests over it are collected."""

from qrt.quant.kv import KV_FORMATS

KV_FORMATS._entries["k8v2"] = "k8v2.format:K8V2"
