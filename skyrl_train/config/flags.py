"""Hydra's flags on a command line, as its documentation lists them: it has no public parser of its own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import hydra

INFORMATION = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def flag_parser() -> argparse.ArgumentParser:
    """The parser of a command line of flags and overrides (`key=value`)."""
    parser = argparse.ArgumentParser(add_help=False, description="Hydra")
    parser.add_argument("overrides", nargs="*", help="key=value")
    for flags in (
        ("--help", "-h"),
        ("--hydra-help",),
        ("--resolve",),
        ("--run", "-r"),
        ("--multirun", "-m"),
        ("--shell-completion", "-sc"),
    ):
        parser.add_argument(*flags, action="store_true")
    for flags in (
        ("--package", "-p"),
        ("--config-path", "-cp"),
        ("--config-name", "-cn"),
        ("--config-dir", "-cd"),
        ("--experimental-rerun",),
    ):
        parser.add_argument(*flags)
    parser.add_argument("--version", action="version", version=f"Hydra {hydra.__version__}")
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parser.add_argument("--info", "-i", nargs="?", const="all", choices=INFORMATION)
    return parser


def parse_flags(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The flags by name, and the overrides. Exits with 2 on an unknown flag, as argparse does."""
    flags = vars(flag_parser().parse_intermixed_args(list(argv)))
    return flags, flags.pop("overrides")
