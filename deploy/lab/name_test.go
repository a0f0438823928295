package lab

import "testing"

// A lab's name is part of paths, and no lab finds what is another's by what it begins with.
func TestNames(t *testing.T) {
	for name, want := range map[string]string{"": "keelson-lab", "second": "keelson-lab@second", "a-1": "keelson-lab@a-1"} {
		if got, err := rootOf(name); err != nil || got != want {
			t.Errorf("%q: %q, %v", name, got, err)
		}
	}
	for _, name := range []string{"-a", "A", "a/b", "..", "a b", "a@b", "aaaaaaaaaaaaaaaaaaaaa"} {
		if got, err := rootOf(name); err == nil || got != "keelson-lab" {
			t.Errorf("%q: %q, %v", name, got, err)
		}
	}
	if within("/run/keelson-lab@b/ns", "/run/keelson-lab") || !within("/run/keelson-lab/ns", "/run/keelson-lab") || !within("/run/keelson-lab", "/run/keelson-lab") {
		t.Error("what of a lab lies where is not told apart")
	}
}
