# The command and the library, for CPUs: docker build -t thinwire .
# For NVIDIA GPUs (then run with --gpus all): docker build -t thinwire --build-arg TORCH_INDEX=https://pypi.org/simple .
# An emulated line needs rights: docker run --cap-add SYS_ADMIN --cap-add NET_ADMIN thinwire compare
ARG BASE=python:3.13-slim
FROM $BASE
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# a user without a home has somewhere to keep compiled kernels
ENV PATH=/opt/thinwire/bin:$PATH PIP_NO_CACHE_DIR=1 NUMBA_CACHE_DIR=/tmp/numba
WORKDIR /build
COPY constraints.txt ./
RUN python3 -m venv /opt/thinwire && pip install -c constraints.txt --index-url "$TORCH_INDEX" torch numpy
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install -c constraints.txt '.[fast,stream,cli]'
WORKDIR /work
ENTRYPOINT ["thinwire"]
CMD ["--help"]
