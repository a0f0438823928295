package controllers_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/controllers/testcluster"
)

// Every package of a controller is in the list of all controllers.
func TestAllControllersAreListed(t *testing.T) {
	list, err := os.ReadFile("all.go")
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("*/*.go")
	if err != nil {
		t.Fatal(err)
	}
	listed := 0
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(file, "_test.go") || !strings.Contains(string(source), "\nfunc New(d engine.Deps") {
			continue
		}
		listed++
		if name := filepath.Dir(file); !strings.Contains(string(list), "\t\t"+name+".New(d") {
			t.Errorf("package %s has a controller that controllers.All does not return", name)
		}
	}
	if listed < 30 {
		t.Errorf("only %d packages have a controller", listed)
	}
}

// The name of a controller is the name of its service account, its ClusterRole and its metrics.
func TestNamesOfControllersAreUnique(t *testing.T) {
	w := testcluster.New(t, testcluster.Options{NoMutationGuard: true})
	var names []string
	for _, c := range w.Controllers {
		if slices.Contains(names, c.Name) {
			t.Errorf("two controllers are named %s", c.Name)
		}
		names = append(names, c.Name)
	}
}
