package lab

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
)

// A lab's name is part of paths, and no lab finds what is another's by what it begins with.
func TestNames(t *testing.T) {
	for name, want := range map[string]string{"": "keelson-lab", "second": "keelson-lab@second",
		"a-1": "keelson-lab@a-1"} {
		if got, err := rootOf(name); err != nil || got != want {
			t.Errorf("%q: %q, %v", name, got, err)
		}
	}
	for _, name := range []string{"-a", "A", "a/b", "..", "a b", "a@b", "aaaaaaaaaaaaaaaaaaaaa"} {
		if got, err := rootOf(name); err == nil || got != "keelson-lab" {
			t.Errorf("%q: %q, %v", name, got, err)
		}
	}
	if isAtOrBelow("/run/keelson-lab@b/ns", "/run/keelson-lab") ||
		!isAtOrBelow("/run/keelson-lab/ns", "/run/keelson-lab") ||
		!isAtOrBelow("/run/keelson-lab", "/run/keelson-lab") {
		t.Error("what of a lab lies where is not told apart")
	}
}

// A lab with a name takes the next address when its preferred one is in use or belongs to a lab that is down; the lab without
// a name has a fixed address, because users and pages name it.
func TestNamedLabTakesAFreePort(t *testing.T) {
	states, name := t.TempDir(), "second"
	other := func(lab, listen string) {
		t.Helper()
		dir := filepath.Join(states, lab)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "lab.json"), fmt.Appendf(nil, `{"listen":%q}`, listen), 0o600); err !=
			nil {
			t.Fatal(err)
		}
	}
	address := func() string {
		t.Helper()
		got, err := freeListen(name, states)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	if got, err := freeListen("", states); err != nil || got != "127.0.0.1:6443" {
		t.Errorf("the lab without a name: %s, %v", got, err)
	}
	held, err := net.Listen("tcp", listenOf(name))
	if err == nil { // otherwise a process of this machine holds it, which serves as well
		defer held.Close()
	}
	second := address()
	if second == listenOf(name) {
		t.Errorf("%s is in use, and was chosen", second)
	}
	other("keelson-lab@third", second)
	third := address()
	if third == second || third == listenOf(name) {
		t.Errorf("%s belongs to another lab or is in use, and was chosen", third)
	}
	other("keelson-lab", third)
	if got := address(); got == listenOf(name) || got == second || got == third {
		t.Errorf("%s belongs to a lab that is down, and was chosen", got)
	}
}

// The namespaces of lab "a-b" are not leftovers of lab "a".
func TestNamespacesOfOtherLabs(t *testing.T) {
	for _, c := range []struct{ root, namespace, exists, want string }{
		{"keelson-lab", "keelson-lab-w1", "", "w1"},
		{"keelson-lab", "keelson-lab@a-w1", "keelson-lab@a", ""},
		{"keelson-lab@a", "keelson-lab@a-w1", "keelson-lab@a", "w1"},
		{"keelson-lab@a", "keelson-lab@a-b-w1", "keelson-lab@a-b", ""},
		{"keelson-lab@a", "keelson-lab@a-b-c-w1", "keelson-lab@a-b-c", ""},
		{"keelson-lab@a-b", "keelson-lab@a-b-w1", "keelson-lab@a", "w1"},
		{"keelson-lab@a", "keelson-lab@a-b-w1", "", "b-w1"},
	} {
		if got := hostOfNetNS(c.root, c.namespace, func(root string) bool { return root == c.exists }); got != c.want {
			t.Errorf("root %s, namespace %s, other lab %q: host %q, want %q", c.root, c.namespace,
				c.exists, got, c.want)
		}
	}
}
