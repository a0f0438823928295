package deviceplugin

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Records with additional fields are read. Damaged records and those of a later version are not;
// then no devices are allocated until the pod with unknown devices is deleted. F92
func TestRecords(t *testing.T) {
	r := newRig(t)
	r.plugin("thing", "--devices=a,b")
	r.has(thing, 2, 2)
	one, two := podOf("1", asks("x", 1)), podOf("2", asks("x", 1))
	if err := r.m.Allocate(t.Context(), one); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(r.cfg.State, "pod-1.json")
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct {
		text string
		fine bool
	}{
		"as it was":        {string(whole), true},
		"with a new field": {strings.Replace(string(whole), `{"version":1,`, `{"new":{"x":1},"version":1,`, 1), true},
		"another device":   {strings.Replace(string(whole), `["a"]`, `["b"]`, 1), false},
		"cut":              {string(whole[:len(whole)/2]), false},
		"empty":            {"", false},
		"of a later form":  {strings.Replace(string(whole), `"version":1`, `"version":2`, 1), false},
	} {
		put(t, file, c.text)
		r.begin()
		r.has(thing, 2, 2)
		err := r.m.Allocate(t.Context(), two)
		if c.fine && (err != nil || r.given(one) != "x:a" || r.given(two) != "x:b") {
			t.Errorf("%s: %v: %q and %q", what, err, r.given(one), r.given(two))
		}
		if !c.fine &&
			(err == nil || !strings.Contains(err.Error(), "the devices of pod 1 are unknown: delete that pod")) {
			t.Errorf("%s: %v", what, err)
		}
		if pods, err := r.m.Pods(); err != nil || len(pods) == 0 || !c.fine && pods[0] != "1" {
			t.Errorf("%s: pods %v, %v", what, pods, err)
		}
		if err := r.m.Release("2"); err != nil {
			t.Fatal(err)
		}
	}
	put(t, file, "{")
	r.begin()
	r.has(thing, 2, 2)
	if err := r.m.Release("1"); err != nil {
		t.Fatal(err)
	}
	if err := r.m.Allocate(t.Context(), two); err != nil {
		t.Errorf("the pod is gone: %v", err)
	}
	if _, err := os.Stat(file); !os.IsNotExist(err) {
		t.Errorf("its record: %v", err)
	}
}
