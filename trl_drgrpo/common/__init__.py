"""The ground floor, which every room may use. Nothing of the package stands below it.

`errors` in one wording, `lazy` names, `secrets`, `drawing`; checks of numbers (`ranges`) and of data
(`rows`); the `disk` and its folders; refusals of the Hub (`hub_errors`).
"""

__version__ = "0.2.0"  # every other place reads it from here
