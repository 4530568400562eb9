"""Law: what the documentation says of other tensors is what was measured."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_the_numbers_of_the_file() -> None:
    content = json.loads((ROOT / "docs" / "measurements" / "shard_tensor_cpu.json").read_text())
    runs = {name: rows for name, rows in content.items() if isinstance(rows, list)}
    page = " ".join((ROOT / "docs" / "domain_parallelism.md").read_text().split())
    for rows, words in zip(runs.values(), ("uneven shards", "even ones"), strict=True):
        assert all(row["ours"] == "exact" for row in rows)
        (theirs,) = (key for key in rows[0] if key not in ("case", "ours"))
        exact = sum(row[theirs] == "exact" for row in rows)
        assert f"{exact} of {len(rows)} with {words}" in page
        assert f"{theirs} under torch {content['torch'].partition('+')[0][:4]}" in page
    names = [name.removeprefix("shards of ").removesuffix(" rows") for name in runs]
    assert f"in shards of {names[0]} rows and of {names[1]}" in page
