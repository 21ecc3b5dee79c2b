from accordion_bench.processes.environment import sleep_while_waiting

sleep_while_waiting()
