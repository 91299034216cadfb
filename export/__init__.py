"""Export: typed ONNX graphs and the engines built from them."""
