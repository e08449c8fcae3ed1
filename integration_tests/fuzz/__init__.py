"""The composition fuzz: random cases of everything at once, compared with float64 on one process.

`cases`      what a case is: frozen values, printable as a sentence
`drawing`    draws them from seeds
`mistakes`   what has to be refused on every rank, with the reason
`gradients`  weights and gradients that are exact in every dtype, and the same in every process
`oracle`     what a case must come to, in plain torch; imports nothing of the project
`rank`       a case as configurations, what one rank does with the project, and what it sees
`saving`     a run through opt_checkpoint
`ranks`      ranks as threads and as processes, and their groups
`running`    runs a case, compares; reports the case, what is wrong, and the command that runs it again

`pytest integration_tests/fuzz --fuzz-seed 17` runs a case again, `--fuzz-cases 1000` the first thousand.
"""
