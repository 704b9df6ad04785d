"""Writes a pair in the form that OpenVINO reads; the other engines take the folders as they are.

    python benchmarks/peers/convert.py OUT                        # the package's pair, float32
    python benchmarks/peers/convert.py OUT --target T --draft D --weight-format int8

Needs `optimum[openvino]`, best in an environment of its own, as it pins an older transformers.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2] / "specdec" / "zoo" / "python_code"


def main() -> None:
    """One export per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder that receives target/ and draft/")
    parser.add_argument("--target", default=str(ROOT / "target"))
    parser.add_argument("--draft", default=str(ROOT / "draft"))
    parser.add_argument("--weight-format", default="fp32", choices=("fp32", "fp16", "int8", "int4"))
    args = parser.parse_args()
    for role in ("target", "draft"):
        export = ["optimum-cli", "export", "openvino", "--model", getattr(args, role)]
        export += ["--task", "text-generation-with-past", "--weight-format", args.weight_format]
        subprocess.run([*export, str(args.out / role)], check=True)


if __name__ == "__main__":
    main()
