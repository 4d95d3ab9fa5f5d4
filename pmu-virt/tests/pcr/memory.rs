//! What the reservations of one vCPU cost in memory.
