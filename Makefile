# Aliases only; the scripts do the work and their own set-up.
.PHONY: run test full check format build

run:
	./run.sh

test:
	./test.sh

full:
	./test.sh --full

check:
	.ci/run

format:
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

build:
	.venv/bin/python setup.py build_ext --inplace
