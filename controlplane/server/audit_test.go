package server_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// A replica writes its audit log to its data directory, with mode 0600: writes of users and of its
// own parts, operators' verbs, and refused requests.
func TestReplicaRecordsRequests(t *testing.T) {
	p := newPlane(t, 1, nil)
	p.PutConfigMap("cp1", "a")
	if err := p.Call("cp1", "DELETE", api.PathClusterMembers+"/cp9", nil, nil); err == nil {
		t.Error("a member that does not exist was removed")
	}
	path := filepath.Join(p.Members["cp1"].Config.DataDir, "audit", "audit.log")
	type line struct {
		Level, Verb, RequestURI string
		User                    struct{ Username string }
		ResponseStatus          struct{ Code int }
	}
	servertest.Eventually(t, func() error {
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		users, verbs := map[string]bool{}, false
		for raw := range bytes.Lines(data) {
			var l line
			if err := json.Unmarshal(raw, &l); err != nil {
				return fmt.Errorf("%w: %s", err, raw)
			}
			if l.Level != "Metadata" {
				t.Errorf("%s", raw)
			}
			users[strings.SplitN(l.User.Username, ":", 3)[0]+" "+l.Verb] = true
			verbs = verbs || strings.HasPrefix(l.RequestURI, api.PathClusterMembers+"/cp9") && l.Verb == "delete" &&
				l.ResponseStatus.Code == 404
		}
		if !users["keelson-admin create"] || !users["system create"] || !verbs {
			return fmt.Errorf("the log has %v, the operator's verb: %v", users, verbs)
		}
		return nil
	})
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	var metrics string
	if err := p.Call("cp1", "GET", "/metrics", nil, &metrics); err != nil ||
		!strings.Contains(metrics, "apiserver_audit_event_total") {
		t.Errorf("the audit has no metrics: %v", err)
	}
}
