"""Stands for lm_eval: asks the server once, and leaves files as lm_eval 0.4.13 does."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

QUESTIONS = 200


def main() -> None:
    options = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=False))
    url = options["--model_args"].split(",")[0].removeprefix("base_url=")
    body = json.dumps({"questions": QUESTIONS}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=280) as response:
        right = int(json.loads(response.read())["right"])
    out = Path(options["--output_path"]) / "model"
    out.mkdir(parents=True)
    task, time = options["--tasks"], "2026-11-29T21-48-36.123456"
    results = {task: {"alias": task, "exact_match,strip": right / QUESTIONS}}
    (out / f"results_{time}.json").write_text(json.dumps({"results": results}))
    samples = [{"doc_id": i, "resps": [[" v1" if i < right else " v2"]]} for i in range(QUESTIONS)]
    (out / f"samples_{task}_{time}.jsonl").write_text("\n".join(map(json.dumps, samples)))


if __name__ == "__main__":
    main()
