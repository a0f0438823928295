// Package features keeps docs/reference/features.md and docs/reference/compatibility.md true: a row for each feature of Keelson, its state,
// and the tests whose comments name it; what is served, refused and absent of Kubernetes. rows.txt has the rows and
// their states; which test names which row is read from the tree. It finds the fields that are called honoured and
// that nothing uses; unread.txt says who uses those that are used elsewhere.
package features
