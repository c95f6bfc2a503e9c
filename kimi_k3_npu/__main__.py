"""`python -m kimi_k3_npu` is the command line."""

from kimi_k3_npu.cli import main

main()
