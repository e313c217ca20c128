"""Parts of the segmentation demo: data, network, measurements and reports."""
