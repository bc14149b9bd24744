"""The ground floor: errors, lazy names, optional packages, secrets, the version. Imports nothing of the package."""
