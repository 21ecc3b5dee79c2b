from accordion_bench.processes.machine import sleep_while_waiting

sleep_while_waiting()
