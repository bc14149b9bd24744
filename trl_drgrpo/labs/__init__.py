"""Proofs and evidence: `check`, `demo` and `study`. Nothing but the command line imports them."""
