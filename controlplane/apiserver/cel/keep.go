package cel

import "keelson.dev/keelson/internal/lrucache"

// programBudget is the memory budget, in estimated bytes, for the compiled expressions of all
// policies and webhooks. The least recently used expressions are evicted and compiled again on use.
const programBudget = 32 << 20

// Estimated memory in bytes: of each scope with its environments, of each program, and of each node
// of a program's syntax tree.
const (
	scopeBytes   = 4 << 10
	programBytes = 4 << 10
	nodeBytes    = 256
)

// Memoize returns a function that returns the result of compile from a cache. If the result was
// evicted, the function calls compile again. All expressions in the result must be compiled in the
// returned scope; otherwise their memory is not counted.
func Memoize[T any](a *Admission, compile func() (T, *Scope)) func() T {
	get := lrucache.Memoize(a.budget, func() (T, int64, error) {
		v, s := compile()
		s.envs = nil // needed by the compiler only
		return v, scopeBytes + s.size, nil
	})
	return func() T {
		v, _ := get() // get does not fail: compilation errors are part of the value
		return v
	}
}

// CacheUsage returns the estimated size and the number of all cached values.
func (a *Admission) CacheUsage() (bytes int64, values int) { return a.budget.Used() }
