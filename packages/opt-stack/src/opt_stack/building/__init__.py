"""Memory and the stepper, from a design: gradient sources, main values and states, units. Decides nothing."""
