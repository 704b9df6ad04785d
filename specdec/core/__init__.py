"""Values and protocols: the interface for plugins.

Words: a *node* is one candidate token, a *sequence* one text, or one search over branches of it; `p` is the target's
distribution, `q` the draft's.

| file | what it holds |
| --- | --- |
| `tree.py` | trees of candidate tokens, the target's logits at their nodes, and the steps that these decide |
| `rounds.py` | what cached keys depend on, a sequence's part of a target pass, and the results of a round |
| `sequence.py` | what the engine runs: a text, or a search with many live branches |
| `traces.py` | hidden states and attentions of a step |
| `strategies.py` | the interface of a strategy |
| `drafts.py` | the interface of a draft, its instructions and its messages |
| `draft_schedules/` | how much to draft next |
| `stats.py` | a call's statistics |
"""
