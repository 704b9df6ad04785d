"""Writes a model, and a draft if named, in the forms that OpenVINO reads; other engines take the folders as they are.

    python benchmarks/peers/convert.py OUT                        # the package's pair
    python benchmarks/peers/convert.py OUT --target T --weight-formats fp32 fp16 int8

Needs `optimum-intel[openvino]`, best in an environment of its own, as it pins an older transformers.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2] / "specdec" / "zoo" / "python_code"
FORMATS = ("fp32", "fp16", "int8", "int4")
GROUP = 32  # weights that share a scale in 4 bits: as many as in "int4-weight" and in GGUF files


def main() -> None:
    """One export per model and format, into OUT/FORMAT/target and OUT/FORMAT/draft; those that are there stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder that receives a folder for each format")
    parser.add_argument("--target", help="folder or hub id (default: the package's pair)")
    parser.add_argument("--draft")
    parser.add_argument("--weight-formats", nargs="+", choices=FORMATS, default=FORMATS)
    args = parser.parse_args()
    if args.target is None:
        args.target, args.draft = str(ROOT / "target"), str(ROOT / "draft")
    for kind in args.weight_formats:
        for role in ("target", "draft") if args.draft else ("target",):
            out = args.out / kind / role
            if (out / "openvino_model.bin").exists():
                continue
            export = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino"]
            export += ["--model", getattr(args, role), "--task", "text-generation-with-past", "--weight-format", kind]
            if kind == "int4":
                export += ["--group-size", str(GROUP)]
            subprocess.run([*export, str(out)], check=True)


if __name__ == "__main__":
    main()
