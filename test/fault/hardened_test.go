package fault

import (
	"context"
	"strings"
	"testing"

	"keelson.dev/keelson/test/testenv"
)

// Tests the rows about nodes in the checklist of docs/reference/hardening.md: every port authenticates its clients, and other users
// cannot read the keys.
func TestNodesAreHardened(t *testing.T) {
	for _, w := range []string{"w1", "w2", "w3"} {
		run := func(line string) string {
			out, err := testenv.Host(t, w).Command(context.Background(), "sh", "-c", line).CombinedOutput()
			if err != nil {
				t.Errorf("%s: %s: %v: %s", w, line, err, out)
			}
			return strings.TrimSpace(string(out))
		}
		for path, want := range map[string]string{"/pods": "401", "/metrics": "401", "/logs/keelson-agent.log": "401",
			"/run/x": "401"} {
			if got := run("curl -sk -o /dev/null -w '%{http_code}' https://127.0.0.1:10250" + path); got != want {
				t.Errorf("%s responds to an unauthenticated request for %s with %s, want %s", w, path, got, want)
			}
		}
		if got := run("curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:10255/pods || true"); got != "000" {
			t.Errorf("%s has a port for unauthenticated clients: it responds with %s", w, got)
		}
		// Files of pods that end go meanwhile.
		if got := run("find /var/lib/keelson -xdev -type f -exec grep -slI 'PRIVATE KEY' {} + 2>/dev/null | xargs -r " +
			"stat -c '%a %n' 2>/dev/null || true"); got == "" {
			t.Errorf("%s: no file with a key was found, and there are some", w)
		} else {
			for line := range strings.Lines(got) {
				if mode := strings.Fields(line)[0]; !strings.HasSuffix(mode, "00") {
					t.Errorf("%s: others may read %s", w, line)
				}
			}
		}
	}
}
