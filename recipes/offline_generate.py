"""Answer a file of prompts with one of the engines; the same as `kimi-k3-npu batch`.

    python recipes/offline_generate.py --model DIR --prompts prompts.jsonl --out answers.jsonl
    python recipes/offline_generate.py --model DIR --prompts prompts.txt --out answers.jsonl --engine sglang \
        --engine-arg tp_size=16 --engine-arg attention_backend=ascend

Kill it whenever you like and start it again: it goes on where it was.
"""

import sys

from kimi_k3_npu.cli import main

# Engines start processes that import this file again.
if __name__ == "__main__":
    main(["batch", *sys.argv[1:]])
