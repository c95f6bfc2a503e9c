"""Checks of what one engine or one generation of NPU asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kimi_k3_npu.plan.finding import Finding
from kimi_k3_npu.plan.subject import Subject


def aiv(subject: Subject) -> Iterator[Finding]:
    """A2 cannot expand collectives on the vector cores."""
    if subject.device.soc == "a2" and subject.launch.variable("HCCL_OP_EXPANSION_MODE") == "AIV":
        yield Finding("error", "aiv", "HCCL_OP_EXPANSION_MODE=AIV must not be set on A2", "leave it out")


def verification(subject: Subject) -> Iterator[Finding]:
    """Drafts are verified by kernels that the NPU has."""
    launch = subject.launch
    if subject.engine != "sglang" or subject.device.soc == "cpu" or not launch.flag("--speculative-algorithm"):
        return
    if launch.flag("--linear-attn-verify-backend") != "triton":
        words = "SGLang verifies drafts of K3 with NVIDIA's kernels unless told otherwise"
        yield Finding("error", "verify-backend", words, "use --linear-attn-verify-backend triton")


def transfer(subject: Subject) -> Iterator[Finding]:
    """Prefill and decode agree on what travels between them."""
    launch, config = subject.launch, subject.launch.flag("--kv-transfer-config")
    if not isinstance(config, dict):
        return
    for connector in config.get("kv_connector_extra_config", {}).get("connectors", [config]):
        port = connector.get("kv_port", "")
        lowest = 20000 + 1000 * launch.recipe.hardware.dies_per_node
        if not isinstance(port, str) or not port.isdecimal():
            yield Finding("error", "transfer", f"kv_port is {port!r}, must be a number in quotes", 'such as "36000"')
        elif int(port) < lowest:
            words = f"kv_port {port}: direct transport takes the ports up to {lowest}"
            yield Finding("error", "transfer", words, f"use {lowest} or higher")
        yield from _sizes(subject, connector.get("kv_connector_extra_config", {}))
    others = [role for role in launch.recipe.serving_roles if role.name != launch.role.name]
    for flag in ("--mamba-cache-mode", "--speculative-config", "--tensor-parallel-size"):
        for other in others:
            theirs = other.flags[flag].value if flag in other.flags else None
            ours = launch.role.flags[flag].value if flag in launch.role.flags else None
            if theirs != ours:
                words = f"{flag} is {ours} here and {theirs} in {other.name}"
                yield Finding("error", "transfer", words, "make them equal")


def _sizes(subject: Subject, stated: dict[str, Any]) -> Iterator[Finding]:
    for role in subject.launch.recipe.serving_roles:
        sizes = {"dp_size": "--data-parallel-size", "tp_size": "--tensor-parallel-size"}
        real = {name: role.flags[flag].value if flag in role.flags else 1 for name, flag in sizes.items()}
        if stated.get(role.name, real) != real:
            words = f"--kv-transfer-config says {role.name} has {stated[role.name]}, it has {real}"
            yield Finding("error", "transfer", words, "state the real sizes")
