"""The front door: prompts and options in, a `Generation` out.

`generator` reads options, prompts and drafts; `checks` refuses what they contradict; `build_request` makes the engine's
request; `job` runs it and makes a `Generation` of its rounds.
"""
