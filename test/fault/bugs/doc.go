// Package bugs shows that the tests of the store would notice if it broke: known
// failures of replicated stores are put back into the source one by one, and a
// named test must then fail. The test passes without them in the ordinary run.
//
// A bug is an exact piece of today's source and what it is replaced with, given
// to the go command as an overlay: nothing on the disk changes. When the source
// moves on, the row of the table says so and has to move with it.
package bugs
