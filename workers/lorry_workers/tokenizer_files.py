"""A model's tokenizer as one archive, which the worker publishes so that clients need no hub.

`lorry.tokenizers.unpack_tokenizer` is the other end.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# The first moment that a zip entry can state.
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


def pack_tokenizer(tokenizer: Any, config: Any) -> bytes:
    """A zip of the tokenizer's files and the model's config.json; the same input gives the same bytes.

    config.json goes along because `AutoTokenizer` looks there for the model type.
    """
    with TemporaryDirectory(prefix="lorry-tokenizer-") as temporary:
        folder = Path(temporary)
        tokenizer.save_pretrained(folder)
        config.save_pretrained(folder)
        return _zip_folder(folder)


def _zip_folder(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            # Times and modes of the files would make the archive, and so its digest, differ each time.
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix(), date_time=_ZIP_EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, path.read_bytes(), compresslevel=9)
    return buffer.getvalue()
