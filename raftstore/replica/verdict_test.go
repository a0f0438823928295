package replica

import (
	"fmt"
	"testing"
)

// Whom a comparison blames.
func TestOddOnes(t *testing.T) {
	for _, x := range []struct {
		hashes map[string]string
		leader string
		right  []string // any of them
		odd    string
	}{
		{map[string]string{"a": "1"}, "a", []string{"a"}, "[]"},
		{map[string]string{"a": "1", "b": "1", "c": "1"}, "a", []string{"a", "b", "c"}, "[]"},
		{map[string]string{"a": "1", "b": "2", "c": "1"}, "a", []string{"a", "c"}, "[b]"},
		{map[string]string{"a": "2", "b": "1", "c": "1"}, "a", []string{"b", "c"}, "[a]"},
		{map[string]string{"a": "1", "b": "2"}, "a", []string{"a"}, "[b]"}, // no telling: the leader is believed
		{map[string]string{"a": "1", "b": "2"}, "b", []string{"b"}, "[a]"},
		{map[string]string{"a": "1", "b": "2", "c": "3"}, "c", []string{"c"}, "[a b]"},
		// the leader itself gave none
		{map[string]string{"b": "2", "c": "3", "d": "3"}, "a", []string{"c", "d"}, "[b]"},
		{map[string]string{"b": "2", "c": "3"}, "a", []string{"b"}, "[c]"},
		{map[string]string{}, "a", []string{"a"}, "[]"},
	} {
		for range 20 { // whatever the order of the map
			right, odd := findDiverged(x.hashes, x.leader)
			ok := false
			for _, r := range x.right {
				ok = ok || r == right
			}
			if !ok || fmt.Sprint(odd) != x.odd {
				t.Fatalf("%v led by %s: %s is right, %v odd", x.hashes, x.leader, right, odd)
			}
		}
	}
}
