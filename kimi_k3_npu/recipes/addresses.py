"""Addresses of nodes, as a user gives them and as they are written before a port."""

from __future__ import annotations

import ipaddress
import re

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
#: An IPv4 address has this form too, and is none when a number is above 255.
_NUMBERS = re.compile(r"[0-9.]+")

MOST_PORT = 65535


def read_address(text: str) -> str:
    """An IP address or a host name; an IPv6 address may stand in brackets, which are taken off.

    Raises:
        ValueError: It is neither; the message says what it looks like instead.
    """
    bare = text[1:-1] if text[:1] == "[" and text[-1:] == "]" and ":" in text else text
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        pass
    else:
        return bare
    if "://" in text or "/" in text:
        raise ValueError(f"{text!r} is a URL; give the address alone")
    if ":" in text:
        raise ValueError(f"{text!r} has a port, or is no IPv6 address; give the address alone")
    if _NUMBERS.fullmatch(text) or not _NAME.fullmatch(text):
        raise ValueError(f"{text!r} is neither an IP address nor a host name")
    return text


def read_endpoint(text: str) -> str:
    """ADDRESS:PORT, with an IPv6 address in brackets. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and host[:1] != "["):
        raise ValueError(f"{text!r} is not ADDRESS:PORT (an IPv6 address in brackets)")
    read_address(host)
    if not port.isascii() or not port.isdecimal() or not 1 <= int(port[:6]) <= MOST_PORT:
        raise ValueError(f"{text!r} ends in {port!r}, which is no port from 1 to {MOST_PORT}")
    return text


def before_port(address: str) -> str:
    """The address as it is written before a colon and a port, or in a URL."""
    return f"[{address}]" if ":" in address else address
