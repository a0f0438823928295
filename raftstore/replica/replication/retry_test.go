package replication

import (
	"errors"
	"slices"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
)

// A hand-over is sent again where the connection has failed while raft waits for it, and never beside one that may still arrive.
func TestHandOverIsSentAgainAfterAFailureOnly(t *testing.T) {
	broken := errors.New("broken")
	for name, of := range map[string]struct {
		takes    time.Duration // until the kept connection answers
		first    error         // what it says
		second   error
		over     []string // which connections were asked
		succeeds bool
	}{
		"an answer":                       {0, nil, nil, []string{"kept"}, true},
		"a late answer":                   {time.Second, nil, nil, []string{"kept"}, true},
		"a failure":                       {0, broken, nil, []string{"kept", "new"}, true},
		"two failures":                    {0, broken, broken, []string{"kept", "new"}, false},
		"a failure after raft's patience": {time.Second, broken, nil, []string{"kept"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Test(t, func(t *testing.T) {
				var over []string
				var answer string
				err := callSecondAfterFailure(&answer, func(connection string, answer *string) error {
					over = append(over, connection)
					*answer = connection
					if connection == "kept" {
						time.Sleep(of.takes)
						return of.first
					}
					return of.second
				}, "kept", "new")
				if !slices.Equal(over, of.over) {
					t.Errorf("asked over %q, want %q", over, of.over)
				}
				if (err == nil) != of.succeeds || err == nil && answer != of.over[len(of.over)-1] {
					t.Errorf("answer %q, error %v", answer, err)
				}
			})
		})
	}
}
