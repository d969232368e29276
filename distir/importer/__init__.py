"""Import of models from files. Loads onnx."""

from distir.importer.onnx import import_from_onnx, symbolic_dims
from distir.importer.tensor_proto import parse_tensor_from_file

__all__ = ["import_from_onnx", "parse_tensor_from_file", "symbolic_dims"]
