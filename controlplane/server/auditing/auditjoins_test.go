package auditing

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/audit"
	"keelson.dev/keelson/controlplane/nodegateway/accept"
)

// auditLines collects audit records.
type auditLines struct{ bytes.Buffer }

func (l *auditLines) Put(line []byte) error { _, err := l.Write(line); return err }

// A join through the port of agents is recorded like a request. The records of unauthenticated
// requests are limited.
func TestJoinsAreInTheAuditLog(t *testing.T) {
	var out auditLines
	auditor := audit.New(audit.Default(), &out, time.Now)
	join := func(a accept.AuditRequest, got accept.AuditResult) {
		t.Helper()
		done, err := RecordJoin(auditor, a)
		if err != nil {
			t.Fatal(err)
		}
		done(got)
	}
	asked := accept.AuditRequest{
		Method: "/keelson.fleet.v1.Enrollment/Enroll", User: accept.UserOfToken("abc123"), Verb: "create",
		Resource:    "nodes",
		Subresource: "enrollment", Name: "w1", Token: "abc123", Source: "192.0.2.1", Received: time.Now(),
	}
	join(asked, accept.AuditResult{})
	asked.User = api.User{Name: api.UserAnonymous}
	const refused = 1000
	for range refused {
		join(asked, accept.AuditResult{Err: status.Error(codes.Unauthenticated, "no"), Reason: "the token has expired"})
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
	if refusal.User.Username != api.UserAnonymous || refusal.ResponseStatus.Code != 401 ||
		refusal.ResponseStatus.Message != "no" ||
		refusal.Annotations["audit.keelson.dev/reason"] != "the token has expired" ||
		refusal.Annotations["audit.keelson.dev/join-token"] != "abc123" {
		t.Errorf("%+v", refusal)
	}
}
