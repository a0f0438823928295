// Package features keeps docs/features.md true: a row for each feature of
// Keelson, its state, and the tests whose comments name it. rows.txt has the rows
// and their states; which test names which row is read from the tree.
package features
