"""A plugin of pytest that adds the scheme's line to the registry, before tests over it are collected."""

from qrt.quant.weight import WEIGHT_SCHEMES

WEIGHT_SCHEMES._entries["w3a16"] = "w3a16.scheme:W3A16"
