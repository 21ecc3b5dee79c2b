# The command with its extras; runs are written to /runs.
#   docker build -t accordion-bench .
#   docker build -t accordion-bench:cuda --build-arg TORCH=auto .     # TORCH: uv's names of builds of torch
#   docker run --rm -v "$PWD:/runs" accordion-bench demo
FROM python:3.12-slim
ARG TORCH=cpu
COPY . /source
RUN pip install --no-cache-dir uv \
    && uv pip install --system --no-cache --torch-backend "$TORCH" "/source[fast,report,sweeps,tensorboard]" \
    && python -m accordion_bench.conformance.compile_kernels \
    && rm -rf /source
WORKDIR /runs
ENTRYPOINT ["accordion-bench"]
CMD ["--help"]
