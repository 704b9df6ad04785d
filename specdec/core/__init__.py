"""Values and protocols: whoever writes a plugin reads these.

Words: a *node* is one candidate token, a *sequence* one sequence; `p` is the target's distribution, `q` the draft's.

| file | what it holds |
| --- | --- |
| `tree.py` | trees of candidate tokens, what the target says of their nodes, and the steps that come of it |
| `rounds.py` | sequences, their part of a target pass, and what a round came to |
| `sequence.py` | what runs in the engine: a text, or a search with many live branches |
| `strategies.py` | what every way of decoding says about itself, and how it is asked for the next step |
| `drafts.py` | what a draft is asked, what it answers, and what it is told |
| `draft_schedules/` | how much to draft next |
| `stats.py` | what a call came to, in numbers |
"""
