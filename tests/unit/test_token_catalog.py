"""Laws of the catalog of a data set in the cache: its name says its content."""

import logging
from pathlib import Path
from random import Random

import pytest

from tests.numbered import write_pair
from trainer.config.errors import ConfigError
from trainer.data.sources.registry import DataSettings
from trainer.data.token_files.catalog import catalog_of, open_documents
from trainer.data.token_files.format import Catalog


def test_a_damaged_catalog_in_the_cache_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_pair(tmp_path / "tokens", [3, 1, 4])
    settings = DataSettings("tokens", str(tmp_path / "tokens.idx"))
    file = Path(catalog_of(settings))
    whole, random = file.read_bytes(), Random(0)
    damaged = [whole[:-1], whole + b" ", b""]
    for place in (0, len(whole) - 1, *random.sample(range(len(whole)), 40)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << random.randrange(8)
        damaged.append(bytes(flipped))
    caplog.set_level(logging.INFO, "trainer")
    for content in damaged:
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="was damaged since this job began; start the job again"):
            Catalog.read(file)
        caplog.clear()
        assert catalog_of(settings) == str(file)
        assert caplog.text.count("was damaged, and is made again") == 1
        assert file.read_bytes() == whole
    caplog.clear()
    assert len(open_documents(settings)) == 1
    assert not caplog.text
