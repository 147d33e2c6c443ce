"""How models are measured, whatever the metric: reading texts, statistics, and results as values and files.

| Files | |
|---|---|
| `settings`, `measurement` | how a model is measured; a model with its tokens and its cache of results |
| `readers`, `streaming`, `shared_prefixes`, `recorded_scans` | reading texts with any model |
| `statistics`, `formatting` | bins of positions and intervals; numbers in text |
| `results`, `json_schema`, `files` | typed values, their JSON, their files |
| `provenance`, `result_cache` | what a result depends on, and its cache |

The metrics themselves are in `hf_recurrent_lengthgen.metrics`.
"""
