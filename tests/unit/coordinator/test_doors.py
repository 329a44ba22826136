import subprocess
import sys

MODULES = "coordinator.app, coordinator.__main__, tandem_files.rows.reading, coordinator.workers.tasks"


def test_the_coordinator_loads_neither_torch_nor_an_engine() -> None:
    code = f"import sys, {MODULES}; print(sorted({{'torch', 'transformers', 'megatron', 'sglang'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_rows_can_be_read_without_the_rest() -> None:
    others = "{'grpc', 'numpy', 'tokenizers', 'redis'}"
    code = f"import sys, tandem_files.rows.reading; print(sorted({others} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
