"""The benchmark of linear attention: its rows, and bytes that do not depend on the length."""

import json
from pathlib import Path

from scripts.benchmarks.linear_attention import KINDS, main


def test_rows_are_written(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    sizes = ["--heads", "2", "--head-dim", "8", "--repeats", "1", "--json", str(file)]
    main(["--seq-len", "64", "128", "--degrees", "2", *sizes])
    written = json.loads(file.read_text())
    assert written["command"].startswith("python scripts/benchmarks/linear_attention.py --seq-len 64 128 ")
    assert {"commit", "torch", "python", "device"} <= written.keys()
    rows = {(row["kind"], row["seq_len"]): row for row in written["rows"]}
    assert rows.keys() == {(kind, seq_len) for kind in KINDS for seq_len in (64, 128)}
    for kind in KINDS:
        short, long = rows[kind, 64], rows[kind, 128]
        assert short["ratio"] > 0
        assert short["bytes_sent"] == long["bytes_sent"] > 0
        assert long["attention"] == 2 * short["attention"]
    # Rank 0 has the first and the last of three fragments: each rank gets one map, in each direction.
    assert rows["mamba2", 64]["bytes_sent"] == 2 * 2 * 2 * 8 * (8 + 1) * 4
