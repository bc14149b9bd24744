"""The ground floor, which every room may use. Nothing of the package stands below it.

`errors`, `lazy` names, `extras` (optional packages), `secrets`, `version`, `drawing`;
checks of values (`ranges`), data (`rows`) and folders (`folders`); refusals of the Hub (`hub_errors`) and the `disk`.
"""
