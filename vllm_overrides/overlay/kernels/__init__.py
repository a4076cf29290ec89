"""Operators of the hybrid models, one folder each: the public function, a reference and interchangeable back ends."""
