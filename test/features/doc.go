// Package features checks docs/reference/features.md and docs/reference/compatibility.md. The first
// page has a row for each feature of Keelson, with its state and the tests whose comments name the
// row. The second page lists the served, refused and absent parts of Kubernetes. rows.txt has the
// rows and their states; the package reads the names of rows from the comments of tests. The
// package finds fields that are documented as honored but that no code reads; unread.txt names the
// programs that read such fields elsewhere.
package features
