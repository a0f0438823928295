// Package retry repeats writes that conflict with the writes of other clients.
package retry

// OnConflict calls attempt until it reports no conflict, at most tries times, without pauses. It
// returns the error of the last call. If the last call also reports a conflict, its error can be
// that of the write, or an error that names the object.
//
// An attempt reads the object, changes it and writes it. It may start with a cached object, but
// must read the object again after a conflict. Unlike RetryOnConflict of
// k8s.io/client-go/util/retry, attempt itself decides which errors are conflicts. For example, a
// missing object is a conflict if the next attempt creates it.
func OnConflict(tries int, attempt func() (conflict bool, err error)) error {
	for try := 1; ; try++ {
		if conflict, err := attempt(); !conflict || try >= tries {
			return err
		}
	}
}

// DefaultTries is the number of attempts for a write to an object that few other clients write.
const DefaultTries = 5
