"""The ground floor, which every room may use. Nothing of the package stands below it.

`errors` in one wording, `lazy` names, `secrets`, `version`, `drawing`; checks of numbers (`ranges`) and of data
(`rows`); the `disk` and its folders; refusals of the Hub (`hub_errors`).
"""
