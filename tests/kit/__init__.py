"""Kit: what tests share. Fakes of time, waits for conditions, real servers on free ports."""
