package cel

import "keelson.dev/keelson/internal/lrucache"

// roomForPrograms bounds what is kept of the expressions of all policies and webhooks, by estimate. What was used least
// lately is compiled again when it is needed.
const roomForPrograms = 32 << 20

// What is compiled takes so much for each scope, for the types that each environment of a scope adds, for each program
// and for each node of its syntax tree.
const (
	scopeBytes   = 4 << 10
	programBytes = 4 << 10
	nodeBytes    = 256
)

// Keep returns what gets a value made of the expressions of a scope. It is compiled again by f whenever it is no longer
// kept; what the value refers to must be compiled in that scope, or it is not counted.
func Keep[T any](a *Admission, f func() (T, *Scope)) func() T {
	get := lrucache.Memoize(a.room, func() (T, int64, error) {
		v, s := f()
		s.envs = nil // only the compiler needs them
		return v, scopeBytes + s.size, nil
	})
	return func() T {
		v, _ := get() // f does not fail: what does not compile is a part of the value
		return v
	}
}

// Kept is what all kept values take, by estimate, and how many they are.
func (a *Admission) Kept() (bytes int64, values int) { return a.room.Used() }
