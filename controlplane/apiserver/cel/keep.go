package cel

import "keelson.dev/keelson/internal/lrucache"

// roomForPrograms is the memory budget for compiled expressions of all policies and webhooks, by
// estimate. The least recently used ones are evicted and compiled again on use.
const roomForPrograms = 32 << 20

// Estimated memory of each scope with its environments, of each program, and of each node of its
// syntax tree.
const (
	scopeBytes   = 4 << 10
	programBytes = 4 << 10
	nodeBytes    = 256
)

// Keep returns a function that returns the value of f from a cache. f compiles it again after it
// was evicted. Expressions of the value must be compiled in the returned scope; otherwise their
// memory is not counted.
func Keep[T any](a *Admission, f func() (T, *Scope)) func() T {
	get := lrucache.Memoize(a.room, func() (T, int64, error) {
		v, s := f()
		s.envs = nil // needed by the compiler only
		return v, scopeBytes + s.size, nil
	})
	return func() T {
		v, _ := get() // f does not fail: compilation errors are part of the value
		return v
	}
}

// Kept returns the estimated size and the number of all cached values.
func (a *Admission) Kept() (bytes int64, values int) { return a.room.Used() }
