// Package bugs shows that the store's tests detect a broken store. Known failures of replicated
// stores are put into the source one by one, and a named test must then fail. Without the bugs the
// same test passes in the ordinary run.
//
// A bug is an exact fragment of the current source and its replacement. The go command gets it as
// an overlay, so no file in the tree changes. If the source no longer has the fragment, the test
// fails and the table must be updated.
package bugs
