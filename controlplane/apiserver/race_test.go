//go:build race

package apiserver

// instrumented: the race detector copies texts that are shared without it, so that more memory is asked for.
const instrumented = true
