package lab

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/cli-runtime/pkg/genericclioptions"
)

// The folder that a lab takes away is the one in which kubectl's own code keeps the kinds of that address, and no other:
// whoever asks at the same address of the next lab finds what that serves.
func TestDiscoveryOfTheLastLabIsForgotten(t *testing.T) {
	served := "old.example.com"
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch r.URL.Path {
		case "/api":
			fmt.Fprint(w, `{"kind":"APIVersions","apiVersion":"v1","versions":["v1"]}`)
		case "/apis":
			gv := `{"groupVersion":"` + served + `/v1","version":"v1"}`
			fmt.Fprintf(w,
				`{"kind":"APIGroupList","apiVersion":"v1","groups":[{"name":%q,"versions":[%s],`+
					`"preferredVersion":%s}]}`, served, gv, gv)
		default:
			http.NotFound(w, r)
		}
	}))
	defer srv.Close()
	address := strings.TrimPrefix(srv.URL, "http://")
	cache := t.TempDir()
	t.Setenv("KUBECACHEDIR", cache)
	groups := func() string {
		flags := genericclioptions.NewConfigFlags(false) // as a new process of kubectl has them
		flags.APIServer = &srv.URL
		d, err := flags.ToDiscoveryClient()
		if err != nil {
			t.Fatal(err)
		}
		list, err := d.ServerGroups()
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, g := range list.Groups {
			names = append(names, g.Name)
		}
		return strings.Trim(strings.Join(names, " "), " ")
	}
	if got := groups(); got != "old.example.com" {
		t.Fatalf("served is %q", got)
	}
	served = "new.example.com"
	if got := groups(); got != "old.example.com" {
		t.Fatalf("kubectl keeps nothing any more (%q): then there is nothing to forget", got)
	}
	other := filepath.Join(cache, "discovery", "192.0.2.1_6443")
	if err := os.MkdirAll(other, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := removeDiscoveryCache(address); err != nil {
		t.Fatal(err)
	}
	if got := groups(); got != "new.example.com" {
		t.Errorf("served is %q", got)
	}
	for _, listen := range []string{"", ".", "..", "../..", "a/b", "/etc"} {
		if folder := discoveryCacheFolder(listen); folder != "" {
			t.Errorf("%q is kept in %s", listen, folder)
		}
	}
	if _, err := os.Stat(other); err != nil {
		t.Errorf("what is known of another cluster: %v", err)
	}
}
