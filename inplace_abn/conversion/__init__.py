"""Conversion of models: norms and activations in place, and back.

convert, classes, hooks     which modules are converted, and what surrounds the model's forward pass
norms, layer_norms, activations, called, scaled     what each converted module does
offered, recipes, recipes_of_rows, results, recognition, consumers     what becomes of a tensor when it is read
watch, observed     the steps in which every op is seen
formulas, report, table, verification     what a norm's class computes, and what users are told
"""
