"""The composition fuzz: random cases of everything at once, compared with float64 on one process.

`cases`      what a case is: frozen values, printable as a sentence
`drawing`    draws them from seeds
`mistakes`   what has to be refused on every rank, with the reason
`gradients`  weights and gradients that are exact in every dtype, and the same in every process
`oracle`     what a case must come to, in plain torch; imports nothing of the project
`configs`    a case as the project's configurations
`rank`       what one rank does with the project, and what it sees
`laid_out`   models of DTensors: FSDP2, HSDP, tensor-parallel plans
`saving`     a run through opt_checkpoint
`training`   a case from its first step to its last, on one rank
`threads`, `processes`  ranks, and their groups
`running`    compares; reports the case, what is wrong, and the command that runs it again

Run one case again, with fields changed to find the smallest one that fails (from integration_tests):

    PYTHONPATH=support:testing python -m fuzz 17 --set setup.wrapped=False --set "skips=()"
"""
