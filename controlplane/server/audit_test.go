package server

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/audit"
	"keelson.dev/keelson/controlplane/nodegateway"
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

// auditLines is where records go.
type auditLines struct{ bytes.Buffer }

func (l *auditLines) Put(line []byte) error { _, err := l.Write(line); return err }

// Who joins at the agents' port has a record like a request's; those who prove nothing share few of them.
func TestJoinsAreInTheAuditLog(t *testing.T) {
	var out auditLines
	r := &Replica{auditor: audit.New(audit.Default(), &out, time.Now)}
	join := func(a nodegateway.Asked, got nodegateway.Answered) {
		t.Helper()
		done, err := r.auditJoins(a)
		if err != nil {
			t.Fatal(err)
		}
		done(got)
	}
	asked := nodegateway.Asked{
		Method: "/keelson.fleet.v1.Enrollment/Enroll", User: nodegateway.UserOfToken("abc123"), Verb: "create", Resource: "nodes",
		Subresource: "enrollment", Name: "w1", Token: "abc123", Source: "192.0.2.1", Received: time.Now(),
	}
	join(asked, nodegateway.Answered{})
	asked.User = api.User{Name: api.UserAnonymous}
	const refused = 1000
	for range refused {
		join(asked, nodegateway.Answered{Err: status.Error(codes.Unauthenticated, "no"), Reason: "the token has expired"})
	}
	var all []audit.Event
	for raw := range bytes.Lines(out.Bytes()) {
		var e audit.Event
		if err := json.Unmarshal(raw, &e); err != nil {
			t.Fatal(err)
		}
		all = append(all, e)
	}
	if len(all) < 2 || len(all) > refused/2 {
		t.Fatalf("%d records", len(all))
	}
	in, refusal := all[0], all[1]
	if in.User.Username != "keelson:join-token:abc123" || in.ResponseStatus.Code != 201 || in.ObjectRef.Name != "w1" ||
		in.ObjectRef.Subresource != "enrollment" || in.RequestURI != asked.Method || in.SourceIPs[0] != "192.0.2.1" {
		t.Errorf("%+v", in)
	}
	if refusal.User.Username != api.UserAnonymous || refusal.ResponseStatus.Code != 401 || refusal.ResponseStatus.Message != "no" ||
		refusal.Annotations["audit.keelson.dev/reason"] != "the token has expired" || refusal.Annotations["audit.keelson.dev/join-token"] != "abc123" {
		t.Errorf("%+v", refusal)
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
