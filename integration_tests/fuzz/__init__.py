"""The composition fuzz: random cases of everything at once, compared with float64 on one process.

`cases`      what a case is: frozen values, printable as a sentence; weights and gradients exact in every dtype
`drawing`    draws them from seeds, some with a mistake that has to be refused on every rank
`oracle`     what a case must come to, in plain torch; imports nothing of the project
`training`   what one rank does with the project, and what it sees
`running`    runs a case, compares; reports the case, what is wrong, and the command that runs it again

`pytest integration_tests/fuzz --fuzz-seed 17` runs a case again, `--fuzz-cases 1000` the first thousand.
"""
