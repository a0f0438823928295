package server

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/api"
)

// A replica records what is asked of it in its data folder, for nobody else to read: the writes of users and of its own
// parts, the verbs of an operator, and what was refused.
func TestReplicaRecordsRequests(t *testing.T) {
	p := newPlane(t, 1, nil)
	p.put("cp1", "a")
	if err := p.call("cp1", "DELETE", api.PathClusterMembers+"/cp9", nil, nil); err == nil {
		t.Error("a member that there is not was removed")
	}
	path := filepath.Join(p.members["cp1"].cfg.DataDir, auditFolder, "audit.log")
	type line struct {
		Level, Verb, RequestURI string
		User                    struct{ Username string }
		ResponseStatus          struct{ Code int }
	}
	eventually(t, func() error {
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
			verbs = verbs || strings.HasPrefix(l.RequestURI, api.PathClusterMembers+"/cp9") && l.Verb == "delete" && l.ResponseStatus.Code == 404
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
	if err := p.call("cp1", "GET", "/metrics", nil, &metrics); err != nil || !strings.Contains(metrics, "apiserver_audit_event_total") {
		t.Errorf("the audit has no metrics: %v", err)
	}
}

// What cannot have its effect is refused by its flag.
func TestAuditOptionsAreChecked(t *testing.T) {
	for want, change := range map[string]func(*AuditOptions){
		"--audit-log-maxsize 0":    func(o *AuditOptions) { o.MaxSize = 0 },
		"--audit-log-maxbackup -1": func(o *AuditOptions) { o.MaxBackups = -1 },
		"--audit-log-mode \"x\"":   func(o *AuditOptions) { o.Mode = "x" },
	} {
		o := DefaultAudit()
		change(&o)
		if err := o.check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
