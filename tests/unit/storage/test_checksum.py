from __future__ import annotations

import importlib

import pytest

from storage.checksum import crc32c

CHECK = b"123456789"  # and its crc32c, the check value of the algorithm's catalogue entry
CHECK_CRC32C = 0xE3069283


def test_it_is_crc32c_over_all_and_in_pieces() -> None:
    assert crc32c(CHECK) == CHECK_CRC32C
    assert crc32c(CHECK[5:], crc32c(CHECK[:5])) == CHECK_CRC32C
    assert crc32c(b"") == 0
    assert crc32c(memoryview(bytearray(CHECK))) == CHECK_CRC32C


@pytest.mark.parametrize("module", ["awscrt.checksums", "crc32c"])
@pytest.mark.parametrize("size", [0, 1, 7, 4096, 499_712, 1_048_577])
def test_both_libraries_agree(module: str, size: int) -> None:
    library = pytest.importorskip(module) if module != "crc32c" else importlib.import_module(module)
    data = bytes(range(256)) * (size // 256 + 1)
    view = memoryview(data)[:size]
    assert library.crc32c(view, 17) == crc32c(view, 17)
