"""`SharedVectorEnv`: gymnasium's vector environment, stepped by worker processes through shared memory."""
