"""The life of a checkpoint: what it is and says of itself, from where it comes, where it goes.

- What it is: `loading` (models of all families), `adapters` (adapters of PEFT and learned states), `tensor_files`.
- What it says of itself: `records` (lineage and verification), `methods` and `papers`, `cards` and their `card_mark`.
- From where it comes: `sources` (folders, files, the Hub; the lineage that a new checkpoint continues), `conversion`.
- Where it goes: `verification`, `hub`, and `private_text`, which finds what must not leave a machine.
"""
