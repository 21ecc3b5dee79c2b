from accordion_bench.processes.threads import sleep_while_waiting

sleep_while_waiting()
