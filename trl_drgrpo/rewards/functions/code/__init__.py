"""Code that is run: unit tests as a reward, in a sandbox that the tested code cannot talk its way out of.

[`CodeReward`] is the reward, [`Sandbox`] how untrusted code is run. `problems` reads the tests of the usual datasets,
`reward` conducts them; `candidate` and `examiner` are the programs inside two sandboxes, which share `wire`: how they
give up rights and what crosses between them; `prelude` holds what graders put
in front of a solution; `test_forms` finds the tests in a text, says what they ask of the completion and counts what
they check; `seccomp` says which system calls are refused.
"""
