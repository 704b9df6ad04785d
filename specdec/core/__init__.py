"""Values and protocols: the interface for plugins.

Words: a *node* is one candidate token, a *sequence* one text, or one search over branches of it; `p` is the target's
distribution, `q` the draft's.

| file | what it holds |
| --- | --- |
| `tree.py` | trees of candidate tokens, and the steps that the target's logits decide |
| `work.py` | one row's share of a pass, and its output |
| `sequence.py` | what the engine runs: a text, or a search over branches of one prompt |
| `outcome.py` | what a round brings one sequence, and the results of rounds |
| `strategies.py` | the interface of a strategy, and what it gets of the target's output |
| `budget.py` | how much a draft may guess in a round, and what its guesses cost |
| `drafts.py` | the interface of a draft, its instructions and its messages |
| `draft_schedules/` | how much to draft next |
| `stats.py` | a call's statistics |
"""
