package kctl

import (
	"strings"
	"testing"
)

// A trace starts at a pod, which may be written pod/NAME. Any other kind is an error that names the accepted forms of both
// arguments, also when the second argument is missing.
func TestTraceNamesItsArguments(t *testing.T) {
	for arg, want := range map[string]string{"web-0": "web-0", "pod/web-0": "web-0", "po/web-0": "web-0",
		"Pods/web-0": "web-0"} {
		if got, err := podArgument(arg); got != want || err != nil {
			t.Errorf("%s: %q, %v", arg, got, err)
		}
	}
	for _, line := range []string{"net trace deploy/x", "net trace deploy/x db", "net trace service/x db:80",
		"net trace pod/ db"} {
		code, said := run(line)
		for _, want := range []string{"kctl net trace: ", "POD or pod/POD", "SERVICE.NAMESPACE", "ADDRESS", "URL"} {
			if code != 1 || !strings.Contains(said, want) {
				t.Errorf("kctl %s: exit code %d, %q, want it to name %q", line, code, said, want)
			}
		}
	}
	if code, said := run("net trace web-0 deploy/x"); code != 1 || !strings.Contains(said, "svc/NAME") {
		t.Errorf("another kind as the target: exit code %d, %q", code, said)
	}
}
