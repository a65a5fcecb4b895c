"""Write the corpus manifest and train the tokenizer.

python -m integration.tiny_model.prepare [--corpus DIR]
"""

import argparse
import logging
from pathlib import Path

from integration.tiny_model.corpus import default_corpus, read_texts, scan, write_manifest
from integration.tiny_model.model import ModelShape
from integration.tiny_model.tokenizer import encode_documents, save_tokenizer, train_tokenizer

HERE = Path(__file__).parent
LOG = logging.getLogger("prepare")


def prepare(corpus: Path, python_version: str | None, manifest_path: Path, folder: Path) -> None:
    """Scan `corpus`, write the manifest, train the tokenizer on the training split."""
    shape = ModelShape()
    manifest = scan(corpus, python_version)
    write_manifest(manifest, manifest_path)
    texts = read_texts(corpus, manifest.of_split("train"))
    tokenizer = train_tokenizer(texts, shape.vocab_size)
    save_tokenizer(tokenizer, folder, shape.max_position_embeddings)
    for split in ("train", "held_out"):
        files = manifest.of_split(split)
        documents = encode_documents(tokenizer, read_texts(corpus, files))
        tokens = sum(map(len, documents))
        size = sum(file.size for file in files)
        LOG.info("%s: %d files, %d bytes, %d tokens", split, len(files), size, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=default_corpus())
    parser.add_argument("--python-version", help="the library's, if not this interpreter's")
    parser.add_argument("--manifest", type=Path, default=HERE / "manifest.json")
    parser.add_argument("--checkpoint", type=Path, default=HERE / "checkpoint")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    prepare(args.corpus, args.python_version, args.manifest, args.checkpoint)


if __name__ == "__main__":
    main()
