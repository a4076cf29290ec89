"""Runs llama.cpp's convert_hf_to_gguf.py, and names the pre-tokenizer where it does not know the tokenizer.

    python worklogs/peers/convert_gguf.py FOLDER_OF_LLAMA_CPP --no-mtp --outtype bf16 --outfile OUT.gguf CHECKPOINT

The converter knows pre-tokenizers by what they make of one text, which depends on the vocabulary, too. Ours has other
vocabularies behind the pattern of Qwen3.5's.
"""
import runpy
import sys
from pathlib import Path

OURS = "qwen35"


def main() -> None:
    """Exits as the converter does."""
    source = Path(sys.argv[1]).resolve()
    program = source / "convert_hf_to_gguf.py"
    if not program.exists():
        sys.exit(f"convert_gguf: {source} has no convert_hf_to_gguf.py; run worklogs/peers/setup.sh llama")
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    from conversion import base
    known = base.TextModel.get_vocab_base_pre

    def named(self, tokenizer):
        try:
            return known(self, tokenizer)
        except NotImplementedError:
            return OURS

    base.TextModel.get_vocab_base_pre = named
    sys.argv = [str(program), *sys.argv[2:]]
    runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    main()
