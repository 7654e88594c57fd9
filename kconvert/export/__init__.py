"""Back to transformers: a converted directory as a KernelConfig, and its kernels as a package of their own."""

from kconvert.export.config import KernelConfigText, PackagePlace, kernel_config
from kconvert.export.package import ExportedPackage, export_package

__all__ = ["ExportedPackage", "KernelConfigText", "PackagePlace", "export_package", "kernel_config"]
